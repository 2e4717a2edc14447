"""Mamba-2: state spaces in all layers, and nothing else (arXiv 2405.21060)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import RMSNorm
from hmt.models.config import Config, require
from hmt.models.decoder import Decoder, attention_block
from hmt.models.hybrid import convolution_taps
from hmt.models.state_space.sizes import checked, time_step_limit


class Mamba2LM(Decoder):
    """No layer keeps KV, so that a sequence takes the same memory however long it is."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "hidden_act", "silu")
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        self.norm = RMSNorm(hidden, eps)
        fields = {
            "heads": config.num_heads,
            "head_dim": config.head_dim,
            "groups": config.n_groups,
            "state_dim": config.state_size,
            "conv": convolution_taps(config, "conv_kernel"),
            "steps": time_step_limit(config),
            "eps": eps,
            "bias": config.use_bias,
            "output_bias": config.use_bias,
            "conv_bias": config.use_conv_bias,
        }
        self.recurrent = checked(config, self.norm, int(config.expand * hidden), fields)
        layers = config.num_hidden_layers
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            norm_name="backbone.norm_f.weight",
            table_name="backbone.embeddings.weight",
            kv=[None] * layers,
            state=[self.recurrent.state] * layers,
            activation_width=self.recurrent.activation_width,
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"backbone.layers.{index}."
        norm = self.norm.param("norm", f"{at}norm.weight")
        yield attention_block(index, norm, *self.recurrent.params(f"{at}mixer."))

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            return hidden + self.recurrent(hidden, index, step, params, kv)

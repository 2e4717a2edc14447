"""Mamba and Falcon-Mamba: state spaces in all layers (arXiv 2312.00752, 2410.05355)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import Mamba, RMSNorm
from hmt.models.config import Config, require
from hmt.models.decoder import Decoder, attention_block
from hmt.models.hybrid import convolution_taps


class MambaLM(Decoder):
    """No layer keeps KV, so that a sequence takes the same memory however long it is.

    Falcon-Mamba norms what steps, keys and queries are made of, without weights.
    """

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "hidden_act", "silu")
        hidden, layers = config.hidden_size, config.num_hidden_layers
        self.norm = RMSNorm(hidden, config.layer_norm_epsilon)
        self.recurrent = Mamba(
            hidden,
            config.intermediate_size,  # Falcon-Mamba's `expand` is another number
            config.state_size,
            int(config.time_step_rank),
            self.norm,
            convolution_taps(config, "conv_kernel"),
            eps=getattr(config, "mixer_rms_eps", None),
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
        )
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

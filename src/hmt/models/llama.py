"""Llama 1 to 3 (arXiv 2302.13971, 2407.21783)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import FusableLayer
from hmt.models.config import Config, attention, norm, residual_ffn, rotary
from hmt.models.decoder import Decoder, attention_block, ffn_block


class Llama(Decoder):
    """Norms before attention and FFN, grouped queries, rotary positions, a gated SiLU."""

    divides = ("heads", "width")

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.norm = norm(config)
        biased = config.attention_bias
        self.attention = attention(config, rotary(config), bias=biased, output_bias=biased)
        self.ffn = residual_ffn(config, bias=config.mlp_bias)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=[self.attention.kv] * config.num_hidden_layers,
            activation_width=max(self.attention.activation_width, self.ffn.activation_width),
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield attention_block(
            index,
            self.norm.param("norm", f"{at}input_layernorm.weight"),
            *self.attention.params(f"{at}self_attn."),
        )
        yield ffn_block(
            index,
            self.norm.param("norm", f"{at}post_attention_layernorm.weight"),
            *self.ffn.ffn.params(f"{at}mlp."),
        )

    @override
    def fusable_layer(self, index: int) -> FusableLayer:
        return FusableLayer(self.attention, self.ffn)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = self.attention(hidden, index, step, params, kv)
        with weights.lease(BlockId(index, BlockKind.FFN)) as params:
            return self.ffn(hidden, x, params)

"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import FusableLayer
from hmt.models.config import Config, attention, norm, residual_ffn, rotary, windows
from hmt.models.decoder import Decoder, attention_block, ffn_block


class Qwen2(Decoder):
    """Llama with biases on queries, keys and values; some layers may see a sliding window."""

    divides = ("heads", "width")

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.norm = norm(config)
        turned_by = rotary(config)
        self.attention = [
            attention(config, turned_by, window=window, bias=True) for window in windows(config)
        ]
        self.ffn = residual_ffn(config)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=[layer.kv for layer in self.attention],
            activation_width=max(self.attention[0].activation_width, self.ffn.activation_width),
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield attention_block(
            index,
            self.norm.param("norm", f"{at}input_layernorm.weight"),
            *self.attention[index].params(f"{at}self_attn."),
        )
        yield ffn_block(
            index,
            self.norm.param("norm", f"{at}post_attention_layernorm.weight"),
            *self.ffn.ffn.params(f"{at}mlp."),
        )

    @override
    def fusable_layer(self, index: int) -> FusableLayer:
        return FusableLayer(self.attention[index], self.ffn)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = self.attention[index](hidden, index, step, params, kv)
        with weights.lease(BlockId(index, BlockKind.FFN)) as params:
            return self.ffn(hidden, x, params)

"""Phi-3, Phi-3.5 and Phi-4 text models (arXiv 2404.14219, 2412.08905)."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import FusableLayer, linear_params
from hmt.models.config import Config, attention, norm, residual_ffn, rotary
from hmt.models.decoder import Decoder, attention_block, ffn_block


class Phi3(Decoder):
    """Llama whose checkpoints keep q, k and v in one matrix, and gate and up in another.

    Long-context versions turn only part of each head, by LongRoPE.
    """

    divides = ("heads", "width")

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.norm = norm(config)
        self.attention = attention(config, rotary(config), window=config.sliding_window or 0)
        self.ffn = residual_ffn(config)
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
        hidden, dim = self.attention.hidden_size, self.attention.head_dim
        query, kv = self.attention.heads * dim, self.attention.kv_heads * dim
        qkv = f"{at}self_attn.qkv_proj.weight"
        yield attention_block(
            index,
            self.norm.param("norm", f"{at}input_layernorm.weight"),
            _rows("q_proj", qkv, hidden, 0, query),
            _rows("k_proj", qkv, hidden, query, kv),
            _rows("v_proj", qkv, hidden, query + kv, kv),
            *linear_params("o_proj", hidden, query, f"{at}self_attn.o_proj"),
        )
        width = self.ffn.ffn.width
        gate_up = f"{at}mlp.gate_up_proj.weight"
        yield ffn_block(
            index,
            self.norm.param("norm", f"{at}post_attention_layernorm.weight"),
            _rows("gate_proj", gate_up, hidden, 0, width),
            _rows("up_proj", gate_up, hidden, width, width),
            *linear_params("down_proj", hidden, width, f"{at}mlp.down_proj"),
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


def _rows(name: str, source: str, inputs: int, first: int, count: int) -> ParamSpec:
    return ParamSpec(name, (count, inputs), (source,), rows=(first, first + count))

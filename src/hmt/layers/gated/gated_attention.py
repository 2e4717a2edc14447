"""Attention whose results are gated, head by head, by another projection of the token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec
from hmt.contracts.model import KVLayer
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers.attention import Attention
from hmt.layers.linear import Params, linear_params, project

_QUERY = ("q_proj", "q_proj_bias")


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """`attention`, times the sigmoid of gates, before the last projection (Qwen3-Next).

    The rows of `q_proj` are those of each head's query, then of its gate; then the next head's.
    """

    attention: Attention

    @property
    def kv(self) -> KVLayer:
        """What one layer keeps per token."""
        return self.attention.kv

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: those of attention, gates as they came and gated results."""
        attention = self.attention
        return attention.activation_width + 3 * attention.heads * attention.head_dim

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters but for the norm, called `at` + q_proj and so on in the checkpoint."""
        own = self.attention
        width = 2 * own.heads * own.head_dim
        return (
            *linear_params("q_proj", width, own.hidden_size, f"{at}q_proj", bias=own.bias),
            *(param for param in own.params(at) if param.name not in _QUERY),
        )

    def __call__(
        self, hidden: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """Attention to the norm of hidden [tokens, hidden_size], same shape.  Appends to `kv`.

        The norm's weight is `norm` of `params`.
        """
        own = self.attention
        heads, gates = self.heads(own.norm(hidden, params["norm"]), step, params)
        out = kv.append_attend(layer, step, heads, scale=own.scale, softcap=own.softcap)
        return project(ops.sigmoid_gated(out, gates), params, "o_proj")

    def heads(self, x: Tensor, step: Step, params: Params) -> tuple[Tensor, Tensor]:
        """Queries, keys and values [tokens, heads + 2 * kv_heads, head_dim], and gates.

        x [tokens, hidden_size] is normed; gates are [tokens, heads * head_dim].
        """
        own = self.attention
        projected = ops.linear_many(x, params, ("q_proj", "k_proj", "v_proj"))
        queries = 2 * own.heads * own.head_dim
        query, gate = projected[:, :queries].unflatten(1, (own.heads, -1)).chunk(2, dim=2)
        others = projected[:, queries:].unflatten(1, (-1, own.head_dim))
        heads = torch.cat((query, others), dim=1)  # [tokens, heads + 2 * kv_heads, head_dim]
        query, key = heads[:, : own.heads], heads[:, own.heads : own.heads + own.kv_heads]
        if (norm := own.head_norm) is not None:
            ops.rms_norm_inplace(query, params["q_norm"].data, norm.eps, offset=norm.offset)
            ops.rms_norm_inplace(key, params["k_norm"].data, norm.eps, offset=norm.offset)
        ops.rope_inplace(query, key, *own.rotary.cos_sin(step))
        return heads, gate.flatten(1)

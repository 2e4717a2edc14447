"""Attention with norms of the queries and of the keys of all heads as one row (OLMo 2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec
from hmt.contracts.model import KVLayer
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers.attention import Attention
from hmt.layers.linear import Params, project
from hmt.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class PostNormAttention:
    """`attention` to tokens as they are; its norm is of the result (arXiv 2501.00656).

    Queries and keys are normed before they are rotated, those of all heads as one row.

    pre_norm   The norm is of what comes in, as usual (MiniMax-M2).
    """

    attention: Attention
    pre_norm: bool = False

    @property
    def kv(self) -> KVLayer:
        """What one layer keeps per token."""
        return self.attention.kv

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: those of attention, and its result before the norm."""
        return self.attention.activation_width + self.attention.hidden_size

    def _norms(self) -> tuple[RMSNorm, RMSNorm]:
        """Of a token's queries, and of its keys."""
        own = self.attention
        eps = own.norm.eps
        return RMSNorm(own.heads * own.head_dim, eps), RMSNorm(own.kv_heads * own.head_dim, eps)

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters but for the norm of results, called `at` + q_proj and so on."""
        query, key = self._norms()
        return (
            *self.attention.params(at),
            query.param("q_norm", f"{at}q_norm.weight"),
            key.param("k_norm", f"{at}k_norm.weight"),
        )

    def __call__(
        self, hidden: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """The norm of attention to hidden [tokens, hidden_size], same shape.  Appends to `kv`.

        With `pre_norm`, attention to the norm of hidden.

        The norm's weight is `norm` of `params`.
        """
        own = self.attention
        x = own.norm(hidden, params["norm"]) if self.pre_norm else hidden
        projected = ops.linear_many(x, params, ("q_proj", "k_proj", "v_proj"))
        query_norm, key_norm = self._norms()
        query, key, value = projected.split((query_norm.width, key_norm.width, key_norm.width), 1)
        query, key = query_norm(query, params["q_norm"]), key_norm(key, params["k_norm"])
        heads = torch.cat((query, key, value), dim=1).unflatten(1, (-1, own.head_dim))
        query, key = heads[:, : own.heads], heads[:, own.heads : own.heads + own.kv_heads]
        ops.rope_inplace(query, key, *own.rotary.cos_sin(step))
        out = kv.append_attend(layer, step, heads, scale=own.scale, softcap=own.softcap)
        result = project(out, params, "o_proj")
        return result if self.pre_norm else own.norm(result, params["norm"])

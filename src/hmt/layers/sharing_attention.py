"""Attention whose keys and values may be those of an earlier layer (Gemma 4)."""

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


@dataclass(frozen=True, slots=True)
class SharingAttention:
    """`attention` with heads of queries, keys and values that are each normed, values unweighted.

    source            the layer to whose keys and values it attends; None: it has its own
    keys_are_values   values are made of what keys are, before both are normed
    """

    attention: Attention
    source: int | None = None
    keys_are_values: bool = False

    @property
    def kv(self) -> KVLayer | None:
        """What one layer keeps per token; None where it uses another's."""
        return self.attention.kv if self.source is None else None

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: those of attention, its normed input, and values apart."""
        own = self.attention
        return own.activation_width + own.hidden_size + own.kv_heads * own.head_dim

    @property
    def _projections(self) -> tuple[str, ...]:
        if self.source is not None:
            return ("q_proj",)
        return ("q_proj", "k_proj") if self.keys_are_values else ("q_proj", "k_proj", "v_proj")

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters but for the norm of hidden states, called `at` + q_proj and so on."""
        own = self.attention
        head_norm = own.head_norm
        assert head_norm is not None
        widths = {"q_proj": own.heads, "k_proj": own.kv_heads, "v_proj": own.kv_heads}
        projections = (
            linear_params(
                name, widths[name] * own.head_dim, own.hidden_size, at + name, bias=own.bias
            )
            for name in self._projections
        )
        norms = [head_norm.param("q_norm", f"{at}q_norm.weight")]
        if self.source is None:
            norms.append(head_norm.param("k_norm", f"{at}k_norm.weight"))
        width = own.heads * own.head_dim
        out = linear_params("o_proj", own.hidden_size, width, f"{at}o_proj", bias=own.output_bias)
        return (*(param for each in projections for param in each), *norms, *out)

    def __call__(
        self, hidden: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """Attention to the norm of hidden [tokens, hidden_size], same shape.  Appends to `kv`.

        The norm's weight is `norm` of `params`.
        """
        own = self.attention
        x = own.norm(hidden, params["norm"])
        heads = ops.linear_many(x, params, self._projections).unflatten(1, (-1, own.head_dim))
        if self.source is None and self.keys_are_values:
            heads = torch.cat((heads, heads[:, own.heads :]), dim=1)
        cos, sin = own.rotary.cos_sin(step)
        query, key = heads[:, : own.heads], heads[:, own.heads : own.heads + own.kv_heads]
        self._norm(query, params["q_norm"].data)
        if self.source is not None:
            query = ops.rope(query, cos, sin)
            out = kv.attend(self.source, step, query, scale=own.scale).flatten(1)
            if step.has_blocks and own.window:
                own.attend_within_blocks(out, query, self.source, step, kv)
            return project(out, params, "o_proj")
        self._norm(key, params["k_norm"].data)
        value = heads[:, own.heads + own.kv_heads :]
        self._norm(value, torch.ones(own.head_dim, dtype=heads.dtype, device=heads.device))
        ops.rope_inplace(query, key, cos, sin)
        out = kv.append_attend(layer, step, heads, scale=own.scale)
        if step.has_blocks and own.window:
            own.attend_within_blocks(out, heads, layer, step, kv)
        return project(out, params, "o_proj")

    def _norm(self, heads: Tensor, weight: Tensor) -> None:
        norm = self.attention.head_norm
        assert norm is not None
        ops.rms_norm_inplace(heads, weight, norm.eps)

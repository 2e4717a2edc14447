"""Attention with grouped queries."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.sharding import RankShare
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers.linear import Params, linear_params, project, project_share
from hmt.layers.norm import RMSNorm
from hmt.layers.rope import Rotary


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions (arXiv 2305.13245, 2104.09864).

    norm         of hidden states, before they are projected
    scale        what query . key is multiplied with
    window       a position sees this many positions, itself included; 0 means all before it
    softcap      bound of the scores; 0 for none
    head_norm    norm of each head of queries and keys, before they are rotated
    sinks        each head has one more score, learned, that has no value (arXiv 2309.17453)
    share        of the rank that has these heads, and others the others; None: there are no others
    inputs       what kernels need to know of all this
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary
    norm: RMSNorm
    scale: float
    window: int = 0
    softcap: float = 0.0
    bias: bool = False  # of the query, key and value projections
    output_bias: bool = False
    head_norm: RMSNorm | None = None
    sinks: bool = False
    share: RankShare | None = None
    inputs: ops.AttentionInputs = field(init=False)

    def __post_init__(self) -> None:
        head_norm = None if self.head_norm is None else self.head_norm.options
        inputs = ops.AttentionInputs(
            self.heads, self.kv_heads, self.head_dim, self.norm.options, head_norm
        )
        object.__setattr__(self, "inputs", inputs)

    @property
    def kv(self) -> KVLayer:
        """What one layer keeps per token."""
        kind = KVKind.SLIDING if self.window else KVKind.FULL
        relative = not (self.sinks or self.softcap)
        dims = self.kv_heads, self.head_dim, self.head_dim
        return KVLayer(kind, *dims, self.window, relative=relative)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: residual, input, q and k before and after rotation, v, out."""
        return 2 * self.hidden_size + 3 * (self.heads + self.kv_heads) * self.head_dim

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters but for the norm, called `at` + q_proj and so on in the checkpoint."""
        hidden = self.hidden_size
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            *linear_params("q_proj", query, hidden, f"{at}q_proj", bias=self.bias),
            *linear_params("k_proj", kv, hidden, f"{at}k_proj", bias=self.bias),
            *linear_params("v_proj", kv, hidden, f"{at}v_proj", bias=self.bias),
            *self.head_norm_params(at),
            *self._sink_params(at),
            *linear_params("o_proj", hidden, query, f"{at}o_proj", bias=self.output_bias),
        )

    def head_norm_params(self, at: str) -> tuple[ParamSpec, ...]:
        """Weights of `head_norm` for queries and keys, if there is one."""
        if self.head_norm is None:
            return ()
        return (
            self.head_norm.param("q_norm", f"{at}q_norm.weight"),
            self.head_norm.param("k_norm", f"{at}k_norm.weight"),
        )

    def _sink_params(self, at: str) -> tuple[ParamSpec, ...]:
        sinks = ParamSpec("sinks", (self.heads,), (f"{at}sinks",), Role.VECTOR)
        return (sinks,) if self.sinks else ()

    def sinks_of(self, params: Params) -> Tensor | None:
        """The heads' sinks f32 [heads]; None where there are none."""
        return params["sinks"].data.float().contiguous() if self.sinks else None

    def __call__(
        self, hidden: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """Attention to the norm of hidden [tokens, hidden_size], same shape.  Appends to `kv`.

        The norm's weight is `norm` of `params`.
        """
        cos, sin = self.rotary.cos_sin(step)
        heads = ops.attention_inputs(hidden, params, self.inputs, cos, sin)
        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
        if self.sinks:
            options["sinks"] = self.sinks_of(params)
        out = kv.append_attend(layer, step, heads, **options)
        if step.has_blocks:
            self.attend_within_blocks(out, heads, layer, step, kv)
        if self.share is not None:
            return project_share(out, params, "o_proj", self.share)
        return project(out, params, "o_proj")

    def attend_within_blocks(
        self, out: Tensor, heads: Tensor, layer: int, step: Step, kv: KVCache
    ) -> None:
        """Let tokens see all of their `Segment.blocks`: changes their rows of `out`.

        out     [tokens, q_heads * dim], of causal attention
        heads   [tokens, heads, dim], of which queries are the first
        """
        if self.sinks:
            raise AssertionError("blocks are not seen by heads with sinks")
        found = out.unflatten(1, (self.heads, self.head_dim))
        for run in step.segments:
            for first, end in run.blocks:
                begin = max(first, run.start)
                low = max(0, begin - self.window + 1) if self.window else 0
                rows = slice(run.offset + begin - run.start, run.offset + end - run.start)
                key, value = kv.gather(layer, run, torch.arange(low, end, device=heads.device))
                found[rows] = ops.block_attention(
                    heads[rows, : self.heads], key, value, start=begin - low,
                    scale=self.scale, window=self.window, softcap=self.softcap,
                )  # fmt: skip

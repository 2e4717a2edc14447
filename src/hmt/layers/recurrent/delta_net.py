"""Gated delta nets: attention whose memory is a matrix of a fixed size for each head."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import LayerState, StateTensor
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, StateRun
from hmt.kernels import ops
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The gated delta rule over convolved queries, keys and values (arXiv 2412.06464).

    norm       of hidden states, before they are projected; None: they come normed
    conv       tokens that the convolution sees, the token itself included
    eps        of the norm of results, which a projection of the token gates
    grouped    checkpoints have two projections (Qwen3-Next): of queries, keys, values and gates,
               all of one key head before those of the next, and so of learning rates and decays;
               otherwise four, each ordered by head
    apart      grouped, but gates have a projection of their own, which is ordered by head, as is
               that of Q, K and V (GGUF files of Qwen3-Next)
    sigmoid    gates of results are the sigmoid of what is projected, not its silu
    chain      what kernels need to know to compute the layer in one call; None without a norm
    tiled      gates, and inputs of the last projection, are those of the first head of each key
               head, then of the second of each, and so on (GGUF files of Qwen3.5)
    """

    hidden_size: int
    heads: ops.DeltaHeads
    norm: RMSNorm | None
    conv: int
    eps: float
    grouped: bool
    apart: bool = False
    tiled: bool = False
    sigmoid: bool = False
    out_norm: RMSNorm = field(init=False)
    chain: ops.DeltaChain | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_norm", RMSNorm(self.heads.value_dim, self.eps))
        object.__setattr__(self, "chain", self._chain())

    @property
    def state(self) -> LayerState:
        """What one layer keeps of a sequence."""
        heads = self.heads
        matrix = heads.heads, heads.key_dim, heads.value_dim
        return (
            StateTensor("matrix", matrix, inputs=2 * heads.heads),  # decays and rates
            StateTensor("conv", (self.conv - 1, heads.width), inputs=heads.width),
        )

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: residual, input, what is projected, convolved and normed, out.

        And in f32 queries and keys of all heads, with copies for their lengths.
        """
        heads = self.heads
        expanded = 2 * heads.heads * heads.key_dim
        return (
            3 * self.hidden_size
            + 3 * heads.width
            + 4 * heads.values_width
            + 2 * expanded
            + 4 * heads.heads
        )

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters but for the norm, called `at` + in_proj_qkvz and so on in the checkpoint."""
        hidden, heads = self.hidden_size, self.heads
        per_head, one = 2 * heads.heads, heads.heads
        inputs = (
            *linear_params("qkv", heads.width, hidden, f"{at}in_proj_qkv"),
            *linear_params("z", heads.values_width, hidden, f"{at}in_proj_z"),
        )
        if self.grouped:
            width = heads.width + heads.values_width
            joined = linear_params("qkvz", width, hidden, f"{at}in_proj_qkvz")
            inputs = (
                *(inputs if self.apart else joined),
                # Errors of decays grow with every token.
                ParamSpec("ba", (per_head, hidden), (f"{at}in_proj_ba.weight",), Role.VECTOR),
            )
        else:
            inputs = (
                *inputs,
                ParamSpec("b", (one, hidden), (f"{at}in_proj_b.weight",), Role.VECTOR),
                ParamSpec("a", (one, hidden), (f"{at}in_proj_a.weight",), Role.VECTOR),
            )
        return (
            *inputs,
            ParamSpec("conv", (heads.width, 1, self.conv), (f"{at}conv1d.weight",), Role.VECTOR),
            ParamSpec("decay_scale", (one,), (f"{at}A_log",), Role.VECTOR),
            ParamSpec("decay_bias", (one,), (f"{at}dt_bias",), Role.VECTOR),
            self.out_norm.param("out_norm", f"{at}norm.weight"),
            *linear_params("out", hidden, heads.values_width, f"{at}out_proj"),
        )

    def _chain(self) -> ops.DeltaChain | None:
        if self.norm is None:
            return None
        heads = self.heads
        width, count = heads.width, heads.heads
        rest = width + heads.values_width
        inputs: tuple[str, ...] = ("qkv", "z", "b", "a")
        qkv: ops.Spans = ((0, width),)
        gate: ops.Spans = ((width, heads.values_width),)
        rate: ops.Spans = ((rest, count),)
        decay: ops.Spans = ((rest + count, count),)
        if self.grouped:
            inputs = ("qkv", "z", "ba") if self.apart else ("qkvz", "ba")
            each = count // heads.key_heads
            firsts = range(rest, rest + 2 * count, 2 * each)
            rate = tuple((first, each) for first in firsts)
            decay = tuple((first + each, each) for first in firsts)
            if not self.apart:
                qkv, gate = _grouped_spans(heads)
        return ops.DeltaChain(
            heads,
            self.norm.options,
            inputs,
            qkv,
            gate,
            rate,
            decay,
            self.out_norm.options,
            "sigmoid" if self.sigmoid else "silu",
            "out",
            tiled=self.tiled,
        )

    def __call__(
        self, hidden: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """The layer's result for the norm of hidden [tokens, hidden_size], same shape.

        Advances the layer's state in `kv`.  The norm's weight, if any, is `norm` of `params`.
        """
        state = kv.state(layer, step)
        if self.chain is not None and not state.copies:
            added = ops.delta_layer(hidden, params, self.chain, state.tensors, state.runs)
            if added is not None:
                return added
        x = hidden if self.norm is None else self.norm(hidden, params["norm"])
        qkv, gate, rate, decay = self._grouped(x, params) if self.grouped else _each(x, params)

        def update(inputs: Sequence[Tensor], runs: Sequence[StateRun]) -> Tensor:
            qkv, decay, rate = inputs
            weight = params["conv"].data.squeeze(1)
            qkv = ops.causal_conv(qkv, weight, state.tensors["conv"], runs)
            return ops.gated_delta_rule(
                qkv,
                decay,
                rate,
                params["decay_scale"].data,
                params["decay_bias"].data,
                state.tensors["matrix"],
                runs,
                self.heads,
            )

        out = state.advance((qkv, decay, rate), update)
        if self.tiled:
            out = out.unflatten(1, (self.heads.key_heads, -1)).transpose(1, 2).flatten(1, 2)
        out = self.out_norm(out, params["out_norm"])
        out = out.flatten(1)
        gated = ops.sigmoid_gated(out, gate) if self.sigmoid else ops.gated(gate, out, "silu")
        return project(gated, params, "out")

    def _grouped(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [tokens, width], gates, learning rates and decays."""
        heads = self.heads
        rate, decay = project(x, params, "ba").unflatten(1, (heads.key_heads, -1)).chunk(2, dim=2)
        rate, decay = rate.flatten(1), decay.flatten(1)
        if self.apart:
            return project(x, params, "qkv"), project(x, params, "z"), rate, decay
        values = heads.heads // heads.key_heads * heads.value_dim
        grouped = project(x, params, "qkvz").unflatten(1, (heads.key_heads, -1))
        parts = grouped.split((heads.key_dim, heads.key_dim, values, values), dim=2)
        query, key, value, gate = (part.flatten(1) for part in parts)
        return torch.cat((query, key, value), dim=1), gate, rate, decay


def _grouped_spans(heads: ops.DeltaHeads) -> tuple[ops.Spans, ops.Spans]:
    """The spans of Q, K and V, and of gates, in rows ordered by key head."""
    dim, values = heads.key_dim, heads.heads // heads.key_heads * heads.value_dim
    firsts = [number * 2 * (dim + values) for number in range(heads.key_heads)]
    sizes = ((0, dim), (dim, dim), (2 * dim, values))
    qkv = tuple((first + at, count) for at, count in sizes for first in firsts)
    return qkv, tuple((first + 2 * dim + values, values) for first in firsts)


def _each(x: Tensor, params: Params) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values [tokens, width], gates, learning rates and decays."""
    qkv, gate, rate, decay = (project(x, params, name) for name in ("qkv", "z", "b", "a"))
    return qkv, gate, rate, decay

"""Mamba-2: a state space with one decay per head, behind a short convolution over time."""

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
class Mamba2:
    """A state space over a convolved token, keys and queries (arXiv 2405.21060).

    A token is projected to a gate, the convolution's inputs (what the heads take in, keys and
    queries, which the paper calls X, B and C) and the length of each head's time step.

    groups       of heads, each with keys and queries of its own
    norm         of hidden states, before they are projected
    conv         tokens that the convolution sees, the token itself included
    steps        shortest and longest time step
    eps          of the norm of results, apart for each group; None: they are gated only
    norm_first   the norm is of results before they are gated
    bias         of the projection of hidden states
    output_bias  of the projection of results
    conv_bias    of the convolution
    factors      what the gate, X, B, C and the time steps are multiplied with once projected
    """

    hidden_size: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    norm: RMSNorm
    conv: int
    steps: tuple[float, float]
    eps: float | None
    norm_first: bool = False
    bias: bool = False
    output_bias: bool = False
    conv_bias: bool = True
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    # Of all groups, and of gate, X, B and C, by device.  None goes: captured steps read them.
    _kept: dict[tuple[str, torch.device, torch.dtype], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def inner(self) -> int:
        """Numbers that all heads take in, and give."""
        return self.heads * self.head_dim

    @property
    def keys_width(self) -> int:
        """Numbers of a token's keys, and of its queries."""
        return self.groups * self.state_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.keys_width

    @property
    def state(self) -> LayerState:
        """What one layer keeps of a sequence."""
        return (
            StateTensor("matrix", (self.heads, self.state_dim, self.head_dim), inputs=self.heads),
            StateTensor("conv", (self.conv - 1, self.conv_width), inputs=self.conv_width),
        )

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: residual, input, what is projected, scaled, convolved, out.

        And results, gated, normed and scaled, and time steps in f32.
        """
        projected = self.inner + self.conv_width
        return (
            3 * self.hidden_size + 2 * projected + self.conv_width + 4 * self.inner + self.heads * 6
        )

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters but for the norm, called `at` + in_proj and so on in the checkpoint."""
        hidden, heads, width = self.hidden_size, self.heads, self.inner + self.conv_width
        source = (f"{at}in_proj.weight",)
        taps = ParamSpec(
            "conv", (self.conv_width, 1, self.conv), (f"{at}conv1d.weight",), Role.VECTOR
        )
        return (
            ParamSpec("in_proj", (width, hidden), source, rows=(0, width)),
            # Errors of decays grow with every token.
            ParamSpec("dt", (heads, hidden), source, Role.VECTOR, rows=(width, width + heads)),
            *self._biases(at, width),
            taps,
            ParamSpec("decay_scale", (heads,), (f"{at}A_log",), Role.VECTOR),
            ParamSpec("skip", (heads,), (f"{at}D",), Role.VECTOR),
            ParamSpec("step_bias", (heads,), (f"{at}dt_bias",), Role.VECTOR),
            *self._norm_params(at),
            *linear_params("out_proj", hidden, self.inner, f"{at}out_proj", bias=self.output_bias),
        )

    def _biases(self, at: str, width: int) -> tuple[ParamSpec, ...]:
        own = (f"{at}in_proj.bias",)
        end = width + self.heads
        biases = (
            ParamSpec("in_proj_bias", (width,), own, Role.VECTOR, rows=(0, width)),
            ParamSpec("dt_bias", (self.heads,), own, Role.VECTOR, rows=(width, end)),
        )
        conv = ParamSpec("conv_bias", (self.conv_width,), (f"{at}conv1d.bias",), Role.VECTOR)
        return (*(biases if self.bias else ()), *((conv,) if self.conv_bias else ()))

    def _norm_params(self, at: str) -> tuple[ParamSpec, ...]:
        if self.eps is None:
            return ()
        return (ParamSpec("out_norm", (self.inner,), (f"{at}norm.weight",), Role.VECTOR),)

    def __call__(
        self, hidden: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """The layer's result for the norm of hidden [tokens, hidden_size], same shape.

        Advances the layer's state in `kv`.  The norm's weight is `norm` of `params`.
        """
        x = self.norm(hidden, params["norm"])
        projected, raw = project(x, params, "in_proj"), project(x, params, "dt")
        if set(self.factors) != {1.0}:
            projected = projected * self._factors(projected)
            raw = raw * self.factors[4]
        gate, given = projected.split((self.inner, self.conv_width), dim=1)
        state = kv.state(layer, step)
        bias = params["conv_bias"].data if self.conv_bias else None
        taps, tails = params["conv"].data.squeeze(1), state.tensors["conv"]
        parts = self.inner, self.keys_width, self.keys_width

        def update(inputs: Sequence[Tensor], runs: Sequence[StateRun]) -> Tensor:
            given, raw = inputs
            given = ops.causal_conv(given, taps, tails, runs, bias=bias)
            taken, keys, queries = given.split(parts, dim=1)
            lengths, decay = ops.time_steps(
                raw, params["step_bias"].data, params["decay_scale"].data, *self.steps
            )
            return ops.state_space_scan(
                taken.unflatten(1, (self.heads, -1)),
                keys.unflatten(1, (self.groups, -1)),
                queries.unflatten(1, (self.groups, -1)),
                decay,
                lengths,
                params["skip"].data,
                state.tensors["matrix"],
                runs,
            )

        out = state.advance((given, raw), update)
        return project(self._gated(out.flatten(1), gate, params), params, "out_proj")

    def _gated(self, out: Tensor, gate: Tensor, params: Params) -> Tensor:
        """Results [tokens, inner], normed and gated."""
        if self.eps is None:
            return ops.gated(gate, out, "silu")
        weight = params["out_norm"].data
        if self.norm_first:
            return ops.gated(gate, self._normed(out, weight, self.eps), "silu")
        return self._normed(ops.gated(gate, out, "silu"), weight, self.eps)

    def _normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [tokens, inner], normed for each group."""
        if self.groups == 1:
            return ops.rms_norm(x, weight, eps)
        normed = ops.rms_norm(x.unflatten(1, (self.groups, -1)), self._ones(x), eps)
        return normed.flatten(1) * weight.to(x.dtype)

    def _ones(self, like: Tensor) -> Tensor:
        """Weights of a norm that has none: [inner / groups]."""
        key = "ones", like.device, like.dtype
        if key not in self._kept:
            size = self.inner // self.groups
            self._kept[key] = torch.ones(size, dtype=like.dtype, device=like.device)
        return self._kept[key]

    def _factors(self, like: Tensor) -> Tensor:
        """What gate, X, B and C are multiplied with: [inner + conv_width]."""
        key = "factors", like.device, like.dtype
        if key not in self._kept:
            widths = (self.inner, self.inner, self.keys_width, self.keys_width)
            parts = [
                torch.full((width,), factor)
                for width, factor in zip(widths, self.factors[:4], strict=True)
            ]
            self._kept[key] = torch.cat(parts).to(like.device, like.dtype)
        return self._kept[key]

"""Mamba: a state space with a decay for each number of its state, behind a short convolution."""

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

_NORMS = ("dt", "b", "c")


@dataclass(frozen=True, slots=True)
class Mamba:
    """A selective state space over convolved channels (arXiv 2312.00752).

    inner        channels
    rank         numbers that time steps are projected from
    norm         of hidden states, before they are projected
    conv         tokens that the convolution sees, the token itself included
    eps          of the norms of time steps' inputs, keys and queries; None: there are none
    weighted     These norms have weights.
    bias         of the projections of hidden states and of results
    conv_bias    of the convolution
    """

    hidden_size: int
    inner: int
    state_dim: int
    rank: int
    norm: RMSNorm
    conv: int
    eps: float | None = None
    weighted: bool = False
    bias: bool = False
    conv_bias: bool = True
    # Weights of norms that have none, by width and place.  None goes: captured steps read them.
    _ones: dict[tuple[int, torch.device, torch.dtype], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def state(self) -> LayerState:
        """What one layer keeps of a sequence."""
        return (
            StateTensor("numbers", (self.state_dim, self.inner)),
            StateTensor("conv", (self.conv - 1, self.inner), inputs=self.inner),
        )

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: residual, input, channels and gate, convolved, steps, out."""
        return 3 * self.hidden_size + 6 * self.inner + 2 * (self.rank + 2 * self.state_dim)

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters but for the norm, called `at` + in_proj and so on in the checkpoint."""
        hidden, inner, rank, states = self.hidden_size, self.inner, self.rank, self.state_dim
        conv = ParamSpec("conv_bias", (inner,), (f"{at}conv1d.bias",), Role.VECTOR)
        made = rank + 2 * states
        return (
            *linear_params("in_proj", 2 * inner, hidden, f"{at}in_proj", bias=self.bias),
            ParamSpec("conv", (inner, 1, self.conv), (f"{at}conv1d.weight",), Role.VECTOR),
            *((conv,) if self.conv_bias else ()),
            # Errors of decays grow with every token.
            ParamSpec("x_proj", (made, inner), (f"{at}x_proj.weight",), Role.VECTOR),
            *self._norm_params(at),
            ParamSpec("dt_proj", (inner, rank), (f"{at}dt_proj.weight",), Role.VECTOR),
            ParamSpec("step_bias", (inner,), (f"{at}dt_proj.bias",), Role.VECTOR),
            ParamSpec("decay_scale", (inner, states), (f"{at}A_log",), Role.VECTOR),
            ParamSpec("skip", (inner,), (f"{at}D",), Role.VECTOR),
            *linear_params("out_proj", hidden, inner, f"{at}out_proj", bias=self.bias),
        )

    def _norm_params(self, at: str) -> tuple[ParamSpec, ...]:
        if self.eps is None or not self.weighted:
            return ()
        widths = zip(_NORMS, (self.rank, self.state_dim, self.state_dim), strict=True)
        return tuple(
            ParamSpec(f"{name}_norm", (width,), (f"{at}{name}_layernorm.weight",), Role.VECTOR)
            for name, width in widths
        )

    def __call__(
        self, hidden: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """The layer's result for the norm of hidden [tokens, hidden_size], same shape.

        Advances the layer's state in `kv`.  The norm's weight is `norm` of `params`.
        """
        x = self.norm(hidden, params["norm"])
        x, gate = project(x, params, "in_proj").chunk(2, dim=1)
        state = kv.state(layer, step)
        bias = params["conv_bias"].data if self.conv_bias else None
        taps, tails = params["conv"].data.squeeze(1), state.tensors["conv"]

        def update(inputs: Sequence[Tensor], runs: Sequence[StateRun]) -> Tensor:
            x = ops.causal_conv(inputs[0], taps, tails, runs, bias=bias)
            made = project(x, params, "x_proj").split(
                (self.rank, self.state_dim, self.state_dim), 1
            )
            steps, keys, queries = (
                self._normed(part, name, params) for part, name in zip(made, _NORMS, strict=True)
            )
            return ops.selective_scan(
                x,
                project(steps, params, "dt_proj"),
                params["step_bias"].data,
                params["decay_scale"].data,
                keys,
                queries,
                params["skip"].data,
                state.tensors["numbers"],
                runs,
            )

        out = state.advance((x,), update)
        return project(ops.gated(gate, out, "silu"), params, "out_proj")

    def _normed(self, x: Tensor, name: str, params: Params) -> Tensor:
        """A part of what a token is projected to, [tokens, width], as the scan takes it."""
        x = x.contiguous()
        if self.eps is None:
            return x
        if self.weighted:
            return ops.rms_norm(x, params[f"{name}_norm"].data, self.eps)
        key = x.shape[1], x.device, x.dtype
        if key not in self._ones:
            self._ones[key] = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
        return ops.rms_norm(x, self._ones[key], self.eps)

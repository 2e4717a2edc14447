"""Several residual streams, from which each sublayer reads a mixture, and into which it writes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.kernels import ops
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class StreamNorm:
    """A norm of each of some streams by itself, with weights of its own.

    streams   that lie one after the other in a row
    norm      of one stream
    """

    streams: int
    norm: RMSNorm

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.streams * self.norm.width

    def param(self, name: str, source: str) -> ParamSpec:
        """The weight, called `name` in its block and `source` in the checkpoint."""
        return ParamSpec(name, (self.width,), (source,), Role.VECTOR)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [tokens, width] normalised, in x.dtype; weight [width]."""
        rows = x.reshape(-1, self.norm.width).float()
        unit = ops.rms_norm(rows, torch.ones(rows.shape[1], device=x.device), self.norm.eps)
        return (unit.view_as(x) * (weight.float() + self.norm.offset)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class GatedResidual:
    """Gates by which a sublayer's input is mixed of streams, and its output added to each.

    Gates are made of all streams through a narrow matrix (Qwen4-Exp in transformers).

    norm     of the streams, before gates are made of them, and they are mixed
    rank     of the gates of the mixture
    name     that its parameters' local names begin with
    writes   whether an output is added
    """

    norm: StreamNorm
    rank: int
    name: str
    writes: bool = True

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: streams, normed, by stream, gates in f32, mixed, their sum."""
        return 8 * self.norm.width + 3 * self.rank

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + hc_norm and so on in the checkpoint."""
        width, own = self.norm.width, self.name
        inject = f"{at}block_inject_weight.weight"
        # VECTOR: a stream's one gate stands for all numbers of an output, and it is small.
        gates = ParamSpec(f"{own}inject", (self.norm.streams, width), (inject,), Role.VECTOR)
        return (
            self.norm.param(f"{own}norm", f"{at}hc_norm.weight"),
            *linear_params(f"{own}down", self.rank, width, f"{at}input_mix_weight_down"),
            *linear_params(f"{own}up", width, self.rank, f"{at}input_mix_weight_up"),
            *((gates,) if self.writes else ()),
        )

    def read(self, streams: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """A sublayer's input, and the normed streams, of which `write` makes gates.

        streams [tokens, streams * hidden_size]; the input is [tokens, hidden_size].
        """
        count, own = self.norm.streams, self.name
        normed = self.norm(streams, params[f"{own}norm"].data)
        narrow = project(normed, params, f"{own}down") / count
        narrow = ops.sigmoid_gated(narrow, narrow)
        gated = ops.sigmoid_gated(normed, project(narrow, params, f"{own}up"))
        first, *others = gated.chunk(count, 1)
        for other in others:  # in this order, whatever the number of tokens
            first = first + other
        return first / count, normed

    def write(self, streams: Tensor, out: Tensor, normed: Tensor, params: Params) -> Tensor:
        """The streams with a sublayer's output [tokens, hidden_size] added to each by its gate."""
        count = self.norm.streams
        wanted = project(normed, params, f"{self.name}inject") / count
        gates = (2 * ops.sigmoid(wanted)).to(out.dtype)
        return streams + (out[:, None] * gates[..., None]).flatten(1)

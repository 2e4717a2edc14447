"""Root mean square norm."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.encoding import WeightTensor
from hmt.kernels import ops


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * (offset + weight), over the last dimension (arXiv 1910.07467).

    offset   0 for most families; 1 for Gemma, whose weights are centred on zero
    """

    width: int
    eps: float
    offset: float = 0.0

    @property
    def options(self) -> ops.NormOptions:
        """What kernels need to know."""
        return ops.NormOptions(self.eps, self.offset)

    def param(self, name: str, source: str) -> ParamSpec:
        """The weight, called `name` in its block and `source` in the checkpoint."""
        return ParamSpec(name, (self.width,), (source,), Role.VECTOR)

    def __call__(self, x: Tensor, weight: WeightTensor) -> Tensor:
        """x [..., width] normalised, in x.dtype."""
        return ops.rms_norm(x, weight.data, self.eps, offset=self.offset)

    def add(self, residual: Tensor, x: Tensor, weight: WeightTensor) -> Tensor:
        """residual += x, in place; the norm of the sum [..., width]."""
        return ops.add_rms_norm(residual, x, weight.data, self.eps, offset=self.offset)


@dataclass(frozen=True, slots=True)
class GatedRMSNorm:
    """y * sigmoid(up(silu(down(y)))) of a norm's y: a gate of low rank (A.X-K2).

    rank   numbers between `down` and `up`
    name   of the norm's weight in its block, which the names of the others begin with
    """

    norm: RMSNorm
    rank: int
    name: str = "norm"

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + norm, W_down and W_up in the checkpoint."""
        width, rank = self.norm.width, self.rank
        return (
            self.norm.param(self.name, f"{at}norm.weight"),
            ParamSpec(f"{self.name}_down", (rank, width), (f"{at}W_down.weight",)),
            ParamSpec(f"{self.name}_up", (width, rank), (f"{at}W_up.weight",)),
        )

    def __call__(self, x: Tensor, params: Mapping[str, WeightTensor]) -> Tensor:
        """x [tokens, width] normed and gated, in x.dtype."""
        y = self.norm(x, params[self.name])
        low = ops.linear(y, params[f"{self.name}_down"])
        # torch's silu rounds the last numbers of a tensor otherwise, which depend on its tokens.
        low = ops.sigmoid_gated(low, low)
        return ops.sigmoid_gated(y, ops.linear(low, params[f"{self.name}_up"]))

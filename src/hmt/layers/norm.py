"""Root mean square norm."""

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

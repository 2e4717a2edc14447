"""What quantising did to each weight: errors, and what was special."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hmt.quant.methods.interface import QuantizedWeight, Target
from hmt.quantizing.units import Unit

_AT_ONCE = 1 << 22  # numbers whose error is computed at once


@dataclass(frozen=True, slots=True)
class Error:
    """A relative error: of outputs for the calibration's inputs where these are known.

    Squares of what differs, over squares of what there was; sums, so that rows can be added.
    """

    lost: float = 0.0
    whole: float = 0.0

    def __add__(self, other: "Error") -> "Error":
        return Error(self.lost + other.lost, self.whole + other.whole)

    @property
    def share(self) -> float:
        """What is lost of the whole; 0 where there was nothing."""
        return self.lost / self.whole if self.whole else 0.0


def error_of(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor | None) -> Error:
    """How far `quantized` is from weight f32 [outputs, inputs], which does not change."""
    numbers = quantized.dequantized()
    total = Error()
    step = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        before, lost = weight[rows], numbers[rows] - weight[rows]
        total += Error(_energy(lost, hessian), _energy(before, hessian))
    return total


def _energy(rows: Tensor, hessian: Tensor | None) -> float:
    products = rows if hessian is None else rows @ hessian
    return float((products * rows).sum(dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight's line of the report.

    tokens   that its input was seen for; None: no text was read
    nearest  relative error of rounding to nearest
    error    relative error of what was written
    note     what was done otherwise, or ""
    """

    module: str
    target: Target
    tokens: int | None
    nearest: float
    error: float
    note: str = ""


def entry_of(
    unit: Unit, tokens: int | None, nearest: Error, error: Error, note: str
) -> dict[str, Any]:
    """The line of a unit, as JSON; errors with six digits, which all machines agree on."""
    entry = Entry(
        unit.module, unit.target, tokens, _digits(nearest.share), _digits(error.share), note
    )
    return asdict(entry)


def _digits(value: float) -> float:
    return float(f"{value:.6g}")

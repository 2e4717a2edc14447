"""How much a linear layer suffers from fewer bits: functions of weights and of some inputs.

The three measures of sensitivity: the distribution of outputs before and after (KL divergence),
their spread beyond the quartiles, and how much of the weight's energy lies in one direction.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_KL: Final = 0.02
MAX_SPREAD: Final = 15.0
MAX_ENERGY: Final = 0.42

# Rows of inputs, and bins of a channel's outputs.  A histogram of so many rows differs from that of
# others of the same distribution by (bins that are filled) / rows, here some 0.004.
SAMPLED_ROWS: Final = 2048
_BINS: Final = 16
_UNSEEN: Final = 0.5  # is added to each bin, as an empty one has no logarithm
_STEPS: Final = 24  # of power iteration; four digits where the largest value stands out
_QUARTILE_NUMBERS: Final = 1 << 20  # that quartiles are taken of


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Of one linear layer.

    kl       mean over output channels of KL(before || after), in nats
    spread   R: (largest - smallest) / (upper - lower quartile) of all outputs before
    energy   share of the weight's squared singular values that is the largest one's
    """

    kl: float
    spread: float
    energy: float

    @property
    def is_high(self) -> bool:
        """Whether one of them is above its limit: such a layer stays in 16 bits."""
        return self.kl > MAX_KL or self.spread > MAX_SPREAD or self.energy > MAX_ENERGY


def divergence(before: Tensor, after: Tensor) -> float:
    """KL(before || after) of outputs f32 [tokens, channels], the mean over channels.

    Histograms of each channel have as many bins between the least and the largest output before;
    what is outside afterwards counts in the outer ones.
    """
    low, high = before.amin(0), before.amax(0)
    width = (high - low) / _BINS
    width = width.masked_fill(width == 0, 1)
    shares = []
    for outputs in (before, after):
        bins = ((outputs - low) / width).long().clamp_(0, _BINS - 1)
        counts = torch.full((_BINS, before.shape[1]), _UNSEEN, device=before.device)
        counts.scatter_add_(0, bins, torch.ones_like(outputs))
        shares.append(counts / counts.sum(0))
    return float((shares[0] * (shares[0] / shares[1]).log()).sum(0).mean())


def spread(outputs: Tensor) -> float:
    """(largest - smallest) / (upper - lower quartile) of all numbers; 0 where all are alike.

    A million where half of them are equal and others not.
    """
    numbers = outputs.flatten()
    some = numbers[:: -(-len(numbers) // _QUARTILE_NUMBERS)]
    lower, upper = (float(some.quantile(share)) for share in (0.25, 0.75))
    whole = float(numbers.amax() - numbers.amin())
    if not whole:
        return 0.0
    return whole / (upper - lower) if upper > lower else 1e6


def energy(weight: Tensor) -> float:
    """Largest squared singular value of f32 [outputs, inputs] over the sum of all of them."""
    whole = float(weight.square().sum(dtype=torch.float64))
    if not whole:
        return 0.0
    # A start that the weight alone decides, so that equal weights give equal numbers.
    direction = weight[weight.square().sum(1).argmax()].clone()
    for _ in range(_STEPS):
        direction = weight.T @ (weight @ direction)
        direction /= direction.norm()
    return float((weight @ direction).square().sum(dtype=torch.float64)) / whole


class SampledInputs:
    """Some rows of a linear layer's inputs, evenly from all that come."""

    def __init__(self, columns: int, shares: int, where: torch.device) -> None:
        """Up to SAMPLED_ROWS of `columns` numbers, a part of them from each of `shares` calls.

        They are on the device `where`.
        """
        self.tokens = 0
        self._rows = [torch.empty(0, columns, device=where)]
        self._left, self._share = SAMPLED_ROWS, -(-SAMPLED_ROWS // shares)

    def add(self, inputs: Tensor) -> None:
        """Add inputs [tokens, columns] of any float dtype."""
        self.tokens += len(inputs)
        count = min(self._left, self._share, len(inputs))
        if count:
            places = torch.arange(count, device=inputs.device) * len(inputs) // count
            self._rows.append(inputs[places].float())
            self._left -= count

    def rows(self) -> Tensor:
        """f32 [rows, columns]; none where nothing came."""
        return torch.cat(self._rows)


def sampled_bytes(columns: int) -> int:
    """What SampledInputs take at most, while their rows are read."""
    return 2 * 4 * SAMPLED_ROWS * columns

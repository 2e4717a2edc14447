"""SmoothQuant: what is hard to round in activations moves into the weights."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.quant.methods.interface import Needs, Statistics, Target

_LEAST = 1e-5


@dataclass(frozen=True, slots=True)
class SmoothQuant:
    """Factors max|x|^alpha / max|w|^(1 - alpha) of each input (arXiv 2211.10438, equation 4).

    alpha   0 to 1: the larger, the more of the difficulty moves
    """

    alpha: float = 0.5

    @property
    def needs(self) -> Needs:
        """The largest activation of each input."""
        return Needs.MAX_ABS

    def factors(self, inputs: Statistics, weights: Iterable[tuple[Tensor, Target]]) -> Tensor:
        """See Scaling.  Raises ConfigError where the statistics have no largest activations."""
        if inputs.max_abs is None:
            raise ConfigError("smoothquant needs the largest activation of each input")
        peaks = torch.zeros_like(inputs.max_abs)
        for weight, _ in weights:
            peaks = torch.maximum(peaks, weight.abs().amax(0))
        seen = inputs.max_abs > 0
        activations, peaks = inputs.max_abs.clamp_min(_LEAST), peaks.clamp_min(_LEAST)
        found = (activations**self.alpha / peaks ** (1 - self.alpha)).clamp_min(_LEAST)
        return torch.where(seen, found, 1.0)

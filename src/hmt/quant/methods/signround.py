"""Signed rounding: which way each number is rounded is learned, and how large each scale is.

SignRound (arXiv 2309.05516): offsets V in [-1/2, 1/2] are added before rounding, scales have a
factor, and both go against the sign of their gradient with a rate that falls to zero.  The paper's
error is that of a block of layers for samples; here it is that of one linear layer for the Hessian,
the same as GPTQ's, so that nothing but the Hessian is needed.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.quant.methods.interface import Needs, QuantizedWeight, Statistics, Target
from hmt.quant.methods.rounding import importance, nearest, round_weight

_RANGE = 0.2  # how far a scale may be from the one that rounding to nearest has, as a share


@dataclass(frozen=True, slots=True)
class SignRound:
    """Learns roundings by signs of gradients.

    steps   of descent, each a product of the weight with the Hessian; the paper's 200
    """

    steps: int = 200

    @property
    def needs(self) -> Needs:
        """The whole Hessian."""
        return Needs.HESSIAN

    def quantize(self, weight: Tensor, inputs: Statistics, target: Target) -> QuantizedWeight:
        """See Method.  No row errs more than rounded to the nearest.

        Raises ConfigError where the statistics have no Hessian or saw no tokens, where the target
        is no integer, and what `round_weight` raises.
        """
        if inputs.hessian is None or inputs.tokens < 1:
            raise ConfigError(
                f"signround needs a Hessian of at least one token, and has seen {inputs.tokens}"
            )
        if target.kind != "int":
            raise ConfigError(f"signround rounds to integers, not {target.kind}: choose gptq")
        hessian = inputs.hessian / inputs.tokens
        best = round_weight(weight, target, importance(hessian))
        groups = weight.float().view(*best.scales.shape, -1)
        zeros = 0.0 if best.zero_points is None else best.zero_points.float()[..., None]
        scales = best.scales
        offsets, factors = torch.zeros_like(groups), torch.ones_like(scales)
        least = torch.full((len(weight),), torch.inf, device=weight.device)
        for step in range(self.steps + 1):
            tried = replace(best, scales=(scales * factors).bfloat16().float())
            steps = tried.scales[..., None].masked_fill(tried.scales[..., None] == 0, 1)
            shares = groups / steps
            codes = nearest(shares + offsets, torch.ones_like(steps), _zeros(best), target)
            tried = replace(tried, codes=codes.view(weight.shape))
            lost = tried.dequantized() - weight
            slope = lost @ hessian
            errors = (slope * lost).sum(1)
            better = errors < least
            least = torch.where(better, errors, least)
            best = _rows(better, tried, best)
            rate = 1 / self.steps * (1 - step / self.steps)
            slope = slope.view(groups.shape)
            # Rounding counts as the identity; a number that is cut off follows its scale alone.
            numbers = codes.float() - zeros
            inside = (numbers - shares).abs() <= 1
            grown = torch.where(inside, numbers - shares, numbers)
            pull = (slope * grown * scales[..., None]).sum(2)
            offsets -= rate * torch.sign(slope * scales[..., None]) * inside
            offsets.clamp_(-0.5, 0.5)
            factors = (factors - rate * pull.sign()).clamp_(1 - _RANGE, 1 + _RANGE)
        return best


def _zeros(quantized: QuantizedWeight) -> Tensor | None:
    zeros = quantized.zero_points
    return None if zeros is None else zeros.float()[..., None]


def _rows(chosen: Tensor, one: QuantizedWeight, other: QuantizedWeight) -> QuantizedWeight:
    """Rows of `one` where they are chosen, else of `other`; both have the same zero points."""
    return replace(
        other,
        codes=torch.where(chosen[:, None], one.codes, other.codes),
        scales=torch.where(chosen[:, None], one.scales, other.scales),
    )

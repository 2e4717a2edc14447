"""Signed rounding: which way each number is rounded is learned, and how large each scale is.

SignRound (arXiv 2309.05516): offsets V in [-1/2, 1/2] of the way between two codes are added before
rounding, scales have a factor, and both go against the sign of their gradient with a rate that
falls to zero.  The paper's error is that of a block of layers for samples; here it is that of one
linear layer for the Hessian, the same as GPTQ's, so that nothing but the Hessian is needed.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.quant.fp4 import fp4_numbers
from hmt.quant.methods.interface import Needs, QuantizedWeight, Statistics, Target
from hmt.quant.methods.rounding import importance, nearest, round_weight

_NUMBERS = 1 << 20  # of a weight that are learned at once, of which about ten f32 copies are alive
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

        Raises ConfigError where the statistics have no Hessian or saw no tokens, and what
        `round_weight` raises.
        """
        if inputs.hessian is None or inputs.tokens < 1:
            raise ConfigError(
                f"signround needs a Hessian of at least one token, and has seen {inputs.tokens}"
            )
        hessian = inputs.hessian / inputs.tokens
        rounded = round_weight(weight, target, importance(hessian))
        step = max(1, _NUMBERS // weight.shape[1])
        parts = []
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            parts.append(self._learn(weight[rows].float(), hessian, rounded.rows(rows)))
        zeros = [part.zero_points for part in parts if part.zero_points is not None]
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zero_points=torch.cat(zeros) if zeros else None,
        )

    def _learn(self, weight: Tensor, hessian: Tensor, rounded: QuantizedWeight) -> QuantizedWeight:
        """The best of all steps for each row, the first of which is `rounded`."""
        best, target = rounded, rounded.target
        steps = rounded.steps()[..., None]
        # Scales of 4-bit floats are too coarse to follow a gradient: with them learned too, the
        # error of nvfp4 was two thirds larger.
        learns_scales = target.kind == "int"
        groups = weight.view(*rounded.scales.shape, -1)
        zeros = rounded.zero_points
        zeros = None if zeros is None else zeros.float()[..., None]
        offsets, factors = torch.zeros_like(groups), torch.ones_like(steps)
        least = torch.full((len(weight),), torch.inf, device=weight.device)
        for step in range(self.steps + 1):
            tried = (steps * factors).bfloat16().float() if learns_scales else steps
            shares = groups / tried.masked_fill(tried == 0, 1)
            gaps = _gaps(shares, target)
            codes, numbers, inside = _rounded(shares, offsets * gaps, zeros, target)
            lost = (numbers * tried).view(weight.shape) - weight
            slope = lost @ hessian
            errors = (slope * lost).sum(1)
            better = errors < least
            least = torch.where(better, errors, least)
            codes = torch.where(better[:, None], codes.view(weight.shape), best.codes)
            best = replace(best, codes=codes)
            if learns_scales:
                scales = torch.where(better[:, None], tried[..., 0], best.scales)
                best = replace(best, scales=scales)
            rate = 1 / self.steps * (1 - step / self.steps)
            slope = slope.view(groups.shape)
            # Rounding counts as the identity; a number that is cut off follows its scale alone, and
            # keeps its offset.
            pull = torch.where(inside, numbers - shares, numbers)
            pull = (slope * pull * steps).sum(2, keepdim=True)
            offsets -= rate * torch.sign(slope * steps) * inside
            offsets.clamp_(-0.5, 0.5)
            factors = (factors - rate * pull.sign()).clamp_(1 - _RANGE, 1 + _RANGE)
        return best


def _gaps(shares: Tensor, target: Target) -> Tensor | float:
    """How far the two codes are apart that each number lies between."""
    if target.kind == "int":
        return 1.0
    magnitudes = shares.abs()
    return 0.5 + 0.5 * (magnitudes >= 2) + (magnitudes >= 4)


def _rounded(
    shares: Tensor, moved: Tensor, zeros: Tensor | None, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of numbers that are `moved` before, what steps multiply, and which are not cut off."""
    one = torch.ones_like(shares[..., :1])
    if target.kind == "int":
        unlimited = torch.round(shares + moved)
        codes = nearest(unlimited, one, zeros, target)
        numbers = codes.float() if zeros is None else codes.float() - zeros
        return codes, numbers, numbers == unlimited
    codes = nearest(shares + moved, one, zeros, target)
    numbers = fp4_numbers(codes)
    return codes, numbers, (numbers - shares).abs() <= _gaps(shares, target)

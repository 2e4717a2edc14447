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
        counts = importance(hessian)
        step = max(1, _NUMBERS // weight.shape[1])
        parts = []
        for start in range(0, len(weight), step):
            rows = weight[start : start + step].float()
            parts.append(self._learn(rows, hessian, round_weight(rows, target, counts)))
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
        groups = weight.view(*rounded.scales.shape, -1)
        zeros = rounded.zero_points
        zeros = None if zeros is None else zeros.float()[..., None]
        scales = rounded.scales[..., None]
        offsets, factors = torch.zeros_like(groups), torch.ones_like(scales)
        least = torch.full((len(weight),), torch.inf, device=weight.device)
        for step in range(self.steps + 1):
            tried = (scales * factors).bfloat16().float()
            shares = groups / tried.masked_fill(tried == 0, 1)
            unlimited = torch.round(shares + offsets)
            codes = nearest(unlimited, torch.ones_like(tried), zeros, target)
            numbers = codes.float() if zeros is None else codes.float() - zeros
            lost = (numbers * tried).view(weight.shape) - weight
            slope = lost @ hessian
            errors = (slope * lost).sum(1)
            better = errors < least
            least = torch.where(better, errors, least)
            best = _rows(better, codes.view(weight.shape), tried[..., 0], best)
            rate = 1 / self.steps * (1 - step / self.steps)
            slope = slope.view(groups.shape)
            # Rounding counts as the identity; a number that is cut off follows its scale alone, and
            # keeps its offset.
            inside = numbers == unlimited
            pull = torch.where(inside, numbers - shares, numbers)
            pull = (slope * pull * scales).sum(2, keepdim=True)
            offsets -= rate * torch.sign(slope * scales) * inside
            offsets.clamp_(-0.5, 0.5)
            factors = (factors - rate * pull.sign()).clamp_(1 - _RANGE, 1 + _RANGE)
        return best


def _rows(chosen: Tensor, codes: Tensor, scales: Tensor, other: QuantizedWeight) -> QuantizedWeight:
    """Codes and scales in rows that are chosen, and those of `other` in the rest."""
    return replace(
        other,
        codes=torch.where(chosen[:, None], codes, other.codes),
        scales=torch.where(chosen[:, None], scales, other.scales),
    )

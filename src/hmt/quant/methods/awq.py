"""AWQ: inputs with large activations get larger weights, which rounding spoils less.

Activation-aware weight quantisation (arXiv 2306.00978): factors of inputs are a power of their mean
activation, and the power is searched for; then each group's range is clipped as far as its outputs
gain by it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.quant.methods.interface import Needs, QuantizedWeight, Statistics, Target
from hmt.quant.methods.rounding import importance, nearest, round_weight
from hmt.quant.rtn import scale_factors

_LEAST = 1e-4
_NUMBERS = 1 << 20  # of a weight that are clipped at once


@dataclass(frozen=True, slots=True)
class AWQ:
    """Factors mean|x|^power for the power of least output error (section 3.2).

    Weights are rounded to the whole range of each group meanwhile, as they are there: the best of
    many scales takes ten times as long.

    steps     powers that are tried, from 0 to 1
    """

    steps: int = 20

    @property
    def needs(self) -> Needs:
        """Mean activations, and the Hessian to know errors of outputs by."""
        return Needs.MEAN_ABS | Needs.HESSIAN

    def factors(self, inputs: Statistics, weights: Iterable[tuple[Tensor, Target]]) -> Tensor:
        """See Scaling.  Raises ConfigError where the statistics have not what is needed."""
        if inputs.mean_abs is None or inputs.hessian is None:
            raise ConfigError("awq needs mean activations and a Hessian")
        tried = self.candidates(inputs.mean_abs)
        return tried[self.errors(inputs, weights, tried).argmin()]

    def candidates(self, mean_abs: Tensor) -> Tensor:
        """All factors that are tried: f32 [steps, inputs], around 1; first, all are 1."""
        powers = torch.arange(self.steps, device=mean_abs.device) / (self.steps - 1)
        found = (mean_abs ** powers[:, None]).clamp_min(_LEAST)
        middle = (found.amax(1) * found.amin(1)).sqrt()
        return found / middle[:, None]

    def errors(
        self, inputs: Statistics, weights: Iterable[tuple[Tensor, Target]], tried: Tensor
    ) -> Tensor:
        """Squared errors of all outputs, summed over tokens: f64 [candidates]."""
        assert inputs.hessian is not None
        found = torch.zeros(len(tried), dtype=torch.float64)
        for weight, target in weights:
            for number, factors in enumerate(tried):
                lost = _rounded(weight * factors, target).div_(factors).sub_(weight)
                found[number] += float(((lost @ inputs.hessian) * lost).sum(dtype=torch.float64))
        return found


@dataclass(frozen=True, slots=True)
class Clipping:
    """Rounds to the nearest with the scale of each group whose outputs err least.

    The error is that of the group's own part of the outputs, as in AWQ's search for what is
    clipped.  Floats of 4 bits and asymmetric integers have scales of least weighted error.
    """

    @property
    def needs(self) -> Needs:
        """The Hessian, of which the blocks of groups are used."""
        return Needs.HESSIAN

    def quantize(self, weight: Tensor, inputs: Statistics, target: Target) -> QuantizedWeight:
        """See Method.  Raises ConfigError without a Hessian, and what `round_weight` raises."""
        if inputs.hessian is None or inputs.tokens < 1:
            raise ConfigError(
                f"awq needs a Hessian of at least one token, and has seen {inputs.tokens}"
            )
        start = round_weight(weight, target, importance(inputs.hessian))
        if target.kind != "int" or target.bits == 8 or not target.symmetric:
            return start
        groups = start.scales.shape[1]
        size = weight.shape[1] // groups
        parts = inputs.hessian.view(groups, size, groups, size)
        blocks = torch.stack([parts[group, :, group] for group in range(groups)]) / inputs.tokens
        step = max(1, _NUMBERS // weight.shape[1])
        codes, scales = [], []
        for rows in torch.arange(len(weight)).split(step):
            some = slice(int(rows[0]), int(rows[-1]) + 1)
            kept = replace(start, codes=start.codes[some], scales=start.scales[some])
            found = _clip(weight[some].float(), kept, blocks)
            codes.append(found.codes)
            scales.append(found.scales)
        return replace(start, codes=torch.cat(codes), scales=torch.cat(scales))


def _rounded(weight: Tensor, target: Target) -> Tensor:
    """The numbers that a weight is rounded to; for integers, without a search for scales."""
    if target.kind != "int":
        return round_weight(weight, target).dequantized()
    grouped = weight.view(len(weight), -1, target.group_size or weight.shape[1])
    half = 1 << target.bits - 1
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    zeros = None
    if target.symmetric:
        steps = torch.maximum(-low, high) / (half - 0.5)
    else:
        low, high = low.clamp_max(0), high.clamp_min(0)
        steps = (high - low) / (2 * half - 1)
        zeros = torch.round(-half - low / steps.masked_fill(steps == 0, 1))
    codes = nearest(grouped, steps, zeros, target).float()
    return (codes if zeros is None else codes - zeros).mul_(steps).view(weight.shape)


def _clip(weight: Tensor, start: QuantizedWeight, blocks: Tensor) -> QuantizedWeight:
    """The best scale of each group, the first of which is that of `start`.

    weight   f32 [rows, inputs]
    blocks   f32 [groups, size, size]: of each group's inputs the Hessian
    """
    target, half = start.target, 1 << start.target.bits - 1
    grouped = weight.view(*start.scales.shape, -1)  # [rows, groups, size]
    peak = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))[..., 0]

    def error(codes: Tensor, scales: Tensor) -> Tensor:
        lost = (codes.float() * scales[..., None] - grouped).transpose(0, 1)
        return ((lost @ blocks) * lost).sum(2).T

    codes, scales = start.codes.view(grouped.shape), start.scales
    least = error(codes, scales)
    for factor in scale_factors(half):
        tried = (peak * (-factor / half)).bfloat16().float()
        found = nearest(grouped, tried[..., None], None, target)
        own = error(found, tried)
        better = own < least
        least = torch.where(better, own, least)
        codes = torch.where(better[..., None], found, codes)
        scales = torch.where(better, tried, scales)
    return replace(start, codes=codes.reshape(weight.shape), scales=scales)

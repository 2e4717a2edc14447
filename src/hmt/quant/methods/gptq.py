"""GPTQ: what one input's rounding spoils, the inputs that are not rounded yet make up for.

GPTQ (arXiv 2210.17323), with scales that are fixed beforehand, so that inputs can be rounded in
any order and groups stay where they are (llm-compressor's "static" activation order).  The sweeps
that may follow are QuantEase's (arXiv 2309.01885): cyclic descent over the inputs of the same
error, which never rises.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.quant.fp4 import fp4_numbers
from hmt.quant.methods.interface import Needs, QuantizedWeight, Statistics, Target
from hmt.quant.methods.rounding import importance, nearest, round_weight

_BLOCK = 128  # inputs between two products with all that follow


@dataclass(frozen=True, slots=True)
class GPTQ:
    """Rounds a weight so that its outputs err least for the inputs that were seen.

    damping     added to the Hessian's diagonal, as a share of its mean
    act_order   inputs of large mean square first, as long as most others can make up for them
    sweeps      of cyclic descent after GPTQ's own pass; each costs about as much
    """

    damping: float = 0.01
    act_order: bool = True
    sweeps: int = 0

    @property
    def needs(self) -> Needs:
        """The whole Hessian."""
        return Needs.HESSIAN

    def quantize(self, weight: Tensor, inputs: Statistics, target: Target) -> QuantizedWeight:
        """See Method.  Rows that rounding to the nearest would serve better stay so rounded.

        Raises ConfigError where the statistics have no Hessian or saw no tokens, and what
        `round_weight` raises.
        """
        if inputs.hessian is None or inputs.tokens < 1:
            raise ConfigError(
                f"GPTQ needs a Hessian of at least one token, and has seen {inputs.tokens}"
            )
        hessian = inputs.hessian.double() / inputs.tokens
        rounded = round_weight(weight, target, importance(hessian))
        steps, zeros = _of_inputs(rounded, weight.shape[1])
        codes = self._compensate(weight.float(), hessian, rounded, steps, zeros)
        found = replace(rounded, codes=codes)
        # Greedy compensation can lose to rounding in a row, by clipping mostly.
        better = output_errors(weight, found, hessian) < output_errors(weight, rounded, hessian)
        codes = torch.where(better[:, None], codes, rounded.codes)
        found = replace(rounded, codes=codes)
        for _ in range(self.sweeps):
            found = _sweep(weight, found, hessian.float(), steps, zeros)
        return found

    def _compensate(
        self,
        weight: Tensor,
        hessian: Tensor,
        rounded: QuantizedWeight,
        steps: Tensor,
        zeros: Tensor | None,
    ) -> Tensor:
        """Codes int8 [outputs, inputs] of one pass over the inputs."""
        order = torch.arange(len(hessian), device=weight.device)
        if self.act_order:
            order = hessian.diagonal().argsort(descending=True, stable=True)
        upper = _inverse_root(hessian[order][:, order], self.damping)
        left = weight[:, order]  # a copy, which later inputs' share of errors is taken from
        codes = torch.empty_like(rounded.codes)
        for start in range(0, len(order), _BLOCK):
            stop = min(start + _BLOCK, len(order))
            errors = torch.empty(len(weight), stop - start, device=weight.device)
            for at in range(start, stop):
                column = order[at]
                zero = None if zeros is None else zeros[:, column]
                code = nearest(left[:, at], steps[:, column], zero, rounded.target)
                number = _numbers(code, steps[:, column], zero, rounded.target)
                error = (left[:, at] - number) / upper[at, at]
                left[:, at:stop] -= error[:, None] * upper[at, at:stop]
                codes[:, column] = code
                errors[:, at - start] = error
            left[:, stop:] -= errors @ upper[start:stop, stop:]
        return codes


def output_errors(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> Tensor:
    """Mean squared error of each output: f64 [outputs], for a Hessian that is a mean."""
    difference = quantized.dequantized().double() - weight.double()
    return ((difference @ hessian.double()) * difference).sum(1)


def _inverse_root(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse: f32 [inputs, inputs].

    Where it is singular in spite of the damping, ten times as much is added until it is not.
    """
    mean = hessian.diagonal().mean()
    mean = torch.where(mean > 0, mean, 1.0)
    identity = torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
    damping = max(damping, 1e-8)
    while True:
        lower, failed = torch.linalg.cholesky_ex(hessian + identity * (mean * damping))
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper.float()
        damping *= 10


def _of_inputs(quantized: QuantizedWeight, inputs: int) -> tuple[Tensor, Tensor | None]:
    """Steps and zero points of each number: f32 [outputs, inputs]."""
    steps = quantized.steps()
    size = inputs // steps.shape[1]
    zeros = quantized.zero_points
    if zeros is not None:
        zeros = zeros.float().repeat_interleave(size, 1)
    return steps.repeat_interleave(size, 1), zeros


def _numbers(codes: Tensor, steps: Tensor, zeros: Tensor | None, target: Target) -> Tensor:
    if target.kind == "int":
        return (codes.float() - zeros) * steps if zeros is not None else codes.float() * steps
    return fp4_numbers(codes) * steps


def _sweep(
    weight: Tensor,
    quantized: QuantizedWeight,
    hessian: Tensor,
    steps: Tensor,
    zeros: Tensor | None,
) -> QuantizedWeight:
    """Each input once: the code that is best while all others stay."""
    codes = quantized.codes.clone()
    numbers = quantized.dequantized()
    slope = (numbers - weight) @ hessian  # [outputs, inputs], half the gradient
    curvature = hessian.diagonal()
    for start in range(0, len(hessian), _BLOCK):
        stop = min(start + _BLOCK, len(hessian))
        before = numbers[:, start:stop].clone()
        for at in range(start, stop):
            if curvature[at] <= 0:
                continue
            zero = None if zeros is None else zeros[:, at]
            wanted = numbers[:, at] - slope[:, at] / curvature[at]
            code = nearest(wanted, steps[:, at], zero, quantized.target)
            number = _numbers(code, steps[:, at], zero, quantized.target)
            slope[:, at:stop] += (number - numbers[:, at])[:, None] * hessian[at, at:stop]
            codes[:, at], numbers[:, at] = code, number
        slope[:, stop:] += (numbers[:, start:stop] - before) @ hessian[start:stop, stop:]
    return replace(quantized, codes=codes)

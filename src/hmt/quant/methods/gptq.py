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
_AT_ONCE = 1 << 20  # numbers whose error is computed at once in f64


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
        hessian = inputs.hessian.double().div_(inputs.tokens)
        rounded = round_weight(weight, target, importance(hessian))
        found = replace(rounded, codes=self._compensate(weight, hessian, rounded))
        # Greedy compensation can lose to rounding in a row, by clipping mostly.
        better = output_errors(weight, found, hessian) < output_errors(weight, rounded, hessian)
        found = replace(rounded, codes=torch.where(better[:, None], found.codes, rounded.codes))
        if self.sweeps:
            steps, zeros = _of_inputs(rounded, weight.shape[1])
            for _ in range(self.sweeps):
                found = _sweep(weight, found, hessian.float(), steps, zeros)
        return found

    def _compensate(self, weight: Tensor, hessian: Tensor, rounded: QuantizedWeight) -> Tensor:
        """Codes int8 [outputs, inputs] of one pass over the inputs."""
        order = torch.arange(len(hessian), device=weight.device)
        if self.act_order:
            order = hessian.diagonal().argsort(descending=True, stable=True)
        upper = _inverse_root(hessian, order, self.damping)
        # Inputs are rows here, which numbers of one input are read and written fastest in.
        steps = rounded.steps().T.contiguous()
        zeros = rounded.zero_points
        zeros = None if zeros is None else zeros.T.float().contiguous()
        size = weight.shape[1] // len(steps)
        left = weight.float().T[order]  # a copy, which later inputs' share of errors is taken from
        codes = torch.empty(left.shape, dtype=torch.int8, device=weight.device)
        groups = (order // size).tolist()
        for start in range(0, len(order), _BLOCK):
            stop = min(start + _BLOCK, len(order))
            errors = torch.empty(stop - start, len(weight), device=weight.device)
            for at in range(start, stop):
                step = steps[groups[at]]
                zero = None if zeros is None else zeros[groups[at]]
                code = nearest(left[at], step, zero, rounded.target)
                number = _numbers(code, step, zero, rounded.target)
                error = (left[at] - number) / upper[at, at]
                left[at:stop].addr_(upper[at, at:stop], error, alpha=-1)
                codes[at] = code
                errors[at - start] = error
            left[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
        del left, upper
        out = torch.empty_like(rounded.codes)
        out.T[order] = codes
        return out


def output_errors(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> Tensor:
    """Mean squared error of each output: f64 [outputs], for a Hessian that is a mean."""
    numbers, hessian = quantized.dequantized(), hessian.double()
    parts = []
    for rows in torch.arange(len(weight)).split(max(1, _AT_ONCE // weight.shape[1])):
        some = slice(int(rows[0]), int(rows[-1]) + 1)
        difference = numbers[some].double() - weight[some]
        parts.append(((difference @ hessian) * difference).sum(1))
    return torch.cat(parts)


def _inverse_root(hessian: Tensor, order: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse: f32 [inputs, inputs].

    Of the Hessian f64 with its inputs in `order`.  Its own factor from the last input to the first
    is the inverse of what is wanted: a triangle to invert, instead of a matrix.  Where it is
    singular in spite of the damping, ten times as much is added until it is not.
    """
    mean = hessian.diagonal().mean()
    mean = torch.where(mean > 0, mean, 1.0)
    backwards = order.flip(0)
    damping = max(damping, 1e-8)
    while True:
        damped = hessian[backwards[:, None], backwards]
        damped.diagonal().add_(mean * damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not failed:
            break
        damping *= 10
    inverse = torch.eye(len(order), dtype=torch.float64, device=hessian.device)
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    return inverse.flip(0, 1).float()


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

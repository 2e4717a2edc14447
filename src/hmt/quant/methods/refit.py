"""Scales of least output error for codes that are given: least squares of each row."""

from dataclasses import replace

import torch
from torch import Tensor

from hmt.quant.fp4 import fp4_numbers
from hmt.quant.methods.interface import QuantizedWeight

_NUMBERS = 1 << 21  # of f64 that are alive for the rows of one turn
_LEAST_DAMPING = 1e-6  # of the mean of what is solved for, towards the scales as they are


def refit(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> QuantizedWeight:
    """`quantized` with other scales, in rows where the outputs err less with them.

    weight   f32 [outputs, inputs]
    hessian  f64 [inputs, inputs], the mean of x x^T

    A row's output is linear in the scales of its groups: with numbers n_g of group g,
    A[g, h] = n_g^T H n_h and b[g] = n_g^T H w give A s = b.  Scales of mxfp4 are powers of two,
    and stay.
    """
    if quantized.target.kind == "mxfp4":
        return quantized
    steps = quantized.steps()
    step = max(1, _NUMBERS // (2 * steps.shape[1] ** 2 + 3 * weight.shape[1]))
    parts = []
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        parts.append(_refitted(weight[rows].double(), quantized.rows(rows), hessian))
    return replace(quantized, scales=torch.cat(parts))


def _refitted(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> Tensor:
    """Scales [rows, groups] of some rows."""
    before = quantized.steps().double()
    numbers = _without_steps(quantized).double()  # [rows, groups, size]
    rows, groups, size = numbers.shape
    wanted = weight @ hessian  # [rows, inputs]
    right = (numbers * wanted.view(numbers.shape)).sum(2)
    left = torch.empty(rows, groups, groups, dtype=torch.float64, device=weight.device)
    for group in range(groups):
        through = numbers[:, group] @ hessian[group * size : (group + 1) * size]
        left[:, group] = (through.view(numbers.shape) * numbers).sum(2)
    damping = left.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) * _LEAST_DAMPING + 1e-30
    damped = left + torch.diag_embed(damping.expand(-1, groups))
    found = torch.linalg.solve(damped, right + damping * before)
    scales = _stored(found, quantized)
    after = replace(quantized, scales=scales).steps().double()
    gain = _error(after, left, right) < _error(before, left, right)
    if scales.dtype != torch.float8_e4m3fn:
        return torch.where(gain[:, None], scales, quantized.scales)
    kept = torch.where(gain[:, None], scales.view(torch.uint8), quantized.scales.view(torch.uint8))
    return kept.view(torch.float8_e4m3fn)


def _error(steps: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Of each row's output, less what no scale changes: f64 [rows]."""
    return ((left @ steps[..., None])[..., 0] * steps - 2 * right * steps).sum(1)


def _without_steps(quantized: QuantizedWeight) -> Tensor:
    """What steps multiply: f32 [rows, groups, size]."""
    grouped = quantized.codes.view(*quantized.scales.shape, -1)
    if quantized.target.kind != "int":
        return fp4_numbers(grouped)
    if quantized.zero_points is None:
        return grouped.float()
    return grouped.float() - quantized.zero_points.float()[..., None]


def _stored(steps: Tensor, quantized: QuantizedWeight) -> Tensor:
    """Scales that can be written: numbers of bf16, or for nvfp4 of FP8."""
    if quantized.global_scale is None:
        return steps.bfloat16().float()
    shares = (steps / quantized.global_scale.double()).float().clamp_(0, 448)
    return shares.to(torch.float8_e4m3fn)

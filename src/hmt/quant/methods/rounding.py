"""Rounding to the nearest number that a target has, with a search for the best scales."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.base.errors import ConfigError, NumericsError
from hmt.quant.fp4 import ALL_PEAKS, nearest_fp4, nvfp4_factor, round_mxfp4, round_nvfp4
from hmt.quant.methods.interface import Needs, QuantizedWeight, Statistics, Target
from hmt.quant.rtn import round_groups

# Rows are searched this many numbers at a time, of which about ten f32 copies are alive.
_CHUNK_NUMBERS = 1 << 20
# How much of a group's range an asymmetric grid covers.
_SHRINKS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7, 0.6)
_GROUPS = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True, slots=True)
class Rounding:
    """Nearest codes, with the scale of least squared error for each group.

    weighted   errors of an input count as its mean square does, the diagonal of the Hessian: the
               expected squared error of the output where inputs are not correlated
    """

    weighted: bool = False

    @property
    def needs(self) -> Needs:
        """The Hessian, of which the diagonal is used, where errors are weighted."""
        return Needs.HESSIAN if self.weighted else Needs.NOTHING

    def quantize(self, weight: Tensor, inputs: Statistics, target: Target) -> QuantizedWeight:
        """See Method."""
        known = self.weighted and inputs.hessian is not None
        return round_weight(weight, target, importance(inputs.hessian) if known else None)


def importance(hessian: Tensor | None) -> Tensor:
    """What errors of each input count: f32 [inputs], with mean 1 and 1% of it at least."""
    assert hessian is not None
    diagonal = hessian.diagonal().float()
    mean = diagonal.mean()
    if mean == 0:
        return torch.ones_like(diagonal)
    return (diagonal / mean).clamp_min(0.01)


def round_weight(
    weight: Tensor, target: Target, importance: Tensor | None = None
) -> QuantizedWeight:
    """f32 [outputs, inputs] in its target form; `importance` is f32 [inputs].

    Scales of "int" are numbers that bf16 has, so that they can be stored as such.  Without
    importance, 4 bits are what `hmt.quant.quantize` gives; 8 symmetric bits have the scale of the
    largest number and codes from -127.  Raises ConfigError where the target is none for this
    shape, NumericsError where the weight is not finite.
    """
    size = check_target(target, weight.shape[1])
    if not torch.isfinite(weight.abs().amax()):
        raise NumericsError("the weight holds NaN or infinite numbers and cannot be quantised")
    factor = nvfp4_factor(weight.abs().amax()) if target.kind == "nvfp4" else None
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    parts: list[tuple[Tensor, Tensor | None]] = []
    for rows in _row_chunks(weight):
        groups = weight[rows].float().reshape(-1, size)
        counts = None
        if importance is not None:
            counts = importance.view(1, -1).expand(rows.stop - rows.start, -1).reshape(-1, size)
        found, scales, zeros = _round(groups, target, factor, counts)
        codes[rows] = found.to(torch.int8).view(rows.stop - rows.start, -1)
        parts.append((scales, zeros))
    shape = (weight.shape[0], weight.shape[1] // size)
    scales = torch.cat(
        [scales.view(torch.uint8) if factor is not None else scales for scales, _ in parts]
    ).view(shape)
    zero_points = [zeros for _, zeros in parts if zeros is not None]
    return QuantizedWeight(
        target,
        codes,
        scales.view(torch.float8_e4m3fn) if factor is not None else scales,
        torch.cat(zero_points).view(shape) if zero_points else None,
        factor[0] if factor is not None else None,
    )


def nearest(values: Tensor, steps: Tensor, zeros: Tensor | None, target: Target) -> Tensor:
    """Nearest codes int8 of f32 values; `steps` and `zeros` broadcast to them."""
    if target.kind != "int":
        return nearest_fp4(values, steps).to(torch.int8)
    half = 1 << target.bits - 1
    least = -half + 1 if target.bits == 8 and zeros is None else -half
    codes = torch.round(values / steps.masked_fill(steps == 0, torch.inf))
    if zeros is not None:
        codes += zeros
    return codes.clamp_(least, half - 1).to(torch.int8)


def check_target(target: Target, inputs: int) -> int:
    """Inputs that share a scale.  Raises ConfigError where there is no such target."""
    size = target.group_size or inputs
    if target.kind not in ("int", *_GROUPS):
        raise ConfigError(f"the form {target.kind!r} is unknown; choose int, nvfp4 or mxfp4")
    if target.kind == "int" and not 2 <= target.bits <= 8:
        raise ConfigError(f"{target.bits} bits were asked for; choose 2 to 8")
    if target.kind in _GROUPS and size != _GROUPS[target.kind]:
        raise ConfigError(f"{target.kind} has groups of {_GROUPS[target.kind]}, not of {size}")
    if inputs % size:
        raise ConfigError(
            f"groups of {size} do not divide {inputs} inputs; choose a size that does, or 0"
        )
    return size


def _round(
    groups: Tensor, target: Target, factor: Tensor | None, importance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [groups, size], scales [groups] and zero points of a few rows."""
    if factor is not None:
        codes, scales = round_nvfp4(groups, factor, importance, ALL_PEAKS)
        return codes, scales, None
    if target.kind == "mxfp4":
        codes, scales = round_mxfp4(groups, importance)
        return codes, scales, None
    if not target.symmetric:
        return _round_asymmetric(groups, target, importance)
    if target.bits == 8:
        scales = _stored(groups.abs().amax(1) / 127)
        return nearest(groups, scales[:, None], None, target), scales, None
    codes, scales = round_groups(groups, torch.bfloat16, target.bits, importance)
    return codes, scales.float(), None


def _round_asymmetric(
    groups: Tensor, target: Target, importance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of each group's range, which includes 0, whose grid errs least."""
    half = 1 << target.bits - 1
    low, high = groups.amin(1).clamp_max(0), groups.amax(1).clamp_min(0)
    kept: tuple[Tensor, Tensor, Tensor] | None = None
    for shrink in _SHRINKS:
        scales = _stored((high - low) * (shrink / (2 * half - 1)))
        divisors = scales.masked_fill(scales == 0, 1)
        zeros = torch.round(-half - low * shrink / divisors).clamp_(-half, half - 1)
        codes = nearest(groups, scales[:, None], zeros[:, None], target).float()
        errors = ((codes - zeros[:, None]) * scales[:, None] - groups).square()
        error = (errors if importance is None else errors * importance).sum(1)
        if kept is None:
            kept = error, scales, zeros
            continue
        better = error < kept[0]
        kept = (
            torch.where(better, error, kept[0]),
            torch.where(better, scales, kept[1]),
            torch.where(better, zeros, kept[2]),
        )
    assert kept is not None
    _, scales, zeros = kept
    codes = nearest(groups, scales[:, None], zeros[:, None], target)
    return codes, scales, zeros.to(torch.int8)


def _stored(scales: Tensor) -> Tensor:
    return scales.bfloat16().float()


def _row_chunks(weight: Tensor) -> Iterator[slice]:
    rows, columns = weight.shape
    step = max(1, _CHUNK_NUMBERS // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))

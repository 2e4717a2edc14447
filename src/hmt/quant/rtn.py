"""Rounding to the nearest code, without calibration data."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hmt.base.errors import NumericsError
from hmt.base.units import round_up
from hmt.contracts.encoding import PANEL_ROWS, Encoding, WeightTensor
from hmt.kernels import ops
from hmt.kernels.panel_packing import pack_codes
from hmt.quant.fp4 import nvfp4_factor, round_mxfp4, round_nvfp4
from hmt.quant.packed import pack_groups

# Rows are converted this many numbers at a time.  About ten f32 copies are alive (10 MiB), which
# is small beside any block, and the search runs mostly in the cache.
_CHUNK_NUMBERS = 1 << 18
# Scales that are tried for a group of 4-bit codes, as multiples of -peak / 8, where peak is the
# number of largest magnitude: at 1 it becomes code -8.  Smaller ones clip it in favour of the
# others; negative ones give it a positive code.  On a trained model's weights the squared error is
# 0.697 of plain max / 7 rounding with groups of 32 or 64 and 0.679 with 128; a grid of 132 factors
# reaches 0.696 and 0.676.
_FACTORS = (0.78, 0.82, 0.86, 0.9, 0.94, 0.98, 1.02, 1.06, -1.1, -1.14)


def quantize(source: WeightTensor, target: WeightTensor) -> None:
    """Round `source` [out, in] of any encoding to the codes and scales of `target`, in place.

    `target` is INT8_CHANNEL or INT8_GROUP: codes -127..127, scale max / 127 per row or group;
    INT4_GROUP without zeros and minima: codes -8..7, the scale per group that gives the least
    squared error (`_search_scales`); NVFP4 or MXFP4: see hmt.quant.fp4.  Zeros get scale 0 (INT).
    Raises NumericsError where `source` is NaN or infinite; `target` is then partly written.
    """
    assert source.shape == target.shape and target.scales is not None
    assert target.zeros is None and target.minima is None
    if target.factor is not None:
        target.factor.copy_(nvfp4_factor(_peak(source)))
    for rows in _row_chunks(source):
        values = ops.dequantize(source, torch.float32, rows)
        if not torch.isfinite(values.abs().amax()):
            raise NumericsError(
                f"rows {rows.start} to {rows.stop - 1} hold NaN or infinite numbers, which cannot "
                "be quantised"
            )
        if target.encoding is Encoding.INT8_CHANNEL:
            target.data[rows], target.scales[rows] = ops.quantize_activations(values)
            continue
        groups = values.view(-1, target.group_size)
        if target.encoding is Encoding.INT8_GROUP:
            codes, scales = ops.quantize_activations(groups)
            target.data[rows] = codes.view(values.shape)
            target.scales[rows] = scales.view(len(values), -1)
            continue
        if target.encoding is Encoding.NVFP4:
            assert target.factor is not None
            codes, scales = round_nvfp4(groups, target.factor)
        elif target.encoding is Encoding.MXFP4:
            codes, scales = round_mxfp4(groups)
        else:
            codes, scales = round_groups(groups, target.scales.dtype)
            codes = codes.add_(8).to(torch.uint8)
        panels = slice(rows.start // PANEL_ROWS, -(-rows.stop // PANEL_ROWS))
        target.data[panels] = pack_codes(codes.view(values.shape))
        target.scales[panels] = pack_groups(scales.view(len(values), -1))


def _peak(source: WeightTensor) -> Tensor:
    """The largest magnitude in `source`."""
    peaks = [
        ops.dequantize(source, torch.float32, rows).abs().amax() for rows in _row_chunks(source)
    ]
    return torch.stack(peaks).amax()


def round_groups(
    values: Tensor,
    scale_dtype: torch.dtype,
    bits: int = 4,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round each row of f32 [groups, size] to codes from -2^(bits - 1) with the best scale.

    Gives (codes f32 [groups, size], scales [groups] of `scale_dtype`); bits from 2 to 7.
    `importance`, f32 [groups, size] or broadcast to it, is what each squared error counts.
    """
    half = 1 << bits - 1
    peak = values.gather(1, values.abs().argmax(1, keepdim=True))
    # Relative to the peak nothing can overflow, and every factor is one number for all groups.
    relative = values / peak.masked_fill(peak == 0, 1)
    scales = _search_scales(relative, half, importance)
    codes = _round(relative, scales, half)
    # The scale that is best for these codes, rounded as it will be stored, then the codes that are
    # best for that scale.
    if importance is None:
        scales = (relative * codes).sum(1) / codes.square().sum(1).clamp_min(1)
    else:
        squares = (importance * codes.square()).sum(1)
        scales = (importance * relative * codes).sum(1) / squares.masked_fill(squares == 0, 1)
    stored = (scales * peak[:, 0]).to(scale_dtype)
    divisors = stored.float().masked_fill(stored == 0, 1)
    return _round(values, divisors, half), stored


def _search_scales(relative: Tensor, half: int, importance: Tensor | None) -> Tensor:
    """The scale of least squared error for each row of [groups, size], among the factors."""
    factors = scale_factors(half)
    codes = torch.empty_like(relative)
    errors = torch.empty(len(factors), len(relative), device=relative.device)
    for factor, error in zip(factors, errors, strict=True):
        torch.mul(relative, -half / factor, out=codes)
        codes.round_().clamp_(-half, half - 1)
        codes.mul_(factor / half).add_(relative).square_()
        if importance is not None:
            codes.mul_(importance)
        torch.sum(codes, dim=1, out=error)
    return torch.tensor(factors, device=relative.device)[errors.argmin(0)].div_(-half)


def scale_factors(half: int) -> tuple[float, ...]:
    """Multiples of -peak / half: the fewer bits, the more is clipped."""
    if half == 8:
        return _FACTORS
    low = max(0.3, 1 - 1.8 / half)
    steps = [low + (1.06 - low) * step / 11 for step in range(12)]
    return (*steps, *(-half / (half - 1) * shrink for shrink in (0.8, 0.9, 0.965, 1)))


def _round(relative: Tensor, scales: Tensor, half: int) -> Tensor:
    return relative.div(scales[:, None]).round_().clamp_(-half, half - 1)


def _row_chunks(weight: WeightTensor) -> Iterator[slice]:
    rows, columns = weight.shape
    step = round_up(max(1, _CHUNK_NUMBERS // columns), PANEL_ROWS)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))

"""Rounding to 4-bit floats (e2m1) with small scales: NVFP4 and MXFP4."""

from collections.abc import Iterable

import torch
from torch import Tensor

# Between two neighbouring numbers of e2m1 (0, .5, 1, 1.5, 2, 3, 4, 6) lies one of these.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST = 6.0
_LARGEST_E4M3 = 448.0
# What a group's largest number may become.  At 6 the others meet the coarse end of the grid; 4 is
# often better (arXiv 2512.02010, "four over six"), and 5 and 7 (clipped) sometimes are.
_PEAKS = (6.0, 4.0, 5.0, 7.0)
# Every scale of e4m3 (eight in an octave) that makes the largest number 4 to 8.  With weights for
# the errors those that clip it are often the best.
ALL_PEAKS = (6.0, 4.0, 4.33, 4.67, 5.0, 5.33, 5.67, 6.33, 6.67, 7.0, 7.5, 8.0)


def nvfp4_factor(peak: Tensor) -> Tensor:
    """The factor f32 [1] of a weight whose largest magnitude is `peak`."""
    factor = peak.float().reshape(1) / (_LARGEST * _LARGEST_E4M3)
    return torch.where(factor > 0, factor, 1.0)


def round_nvfp4(
    values: Tensor,
    factor: Tensor,
    importance: Tensor | None = None,
    peaks: tuple[float, ...] = _PEAKS,
) -> tuple[Tensor, Tensor]:
    """f32 [groups, 16] to (codes uint8 [groups, 16], scales float8_e4m3fn [groups]).

    importance   f32 of the values' shape, or one that broadcasts to it: what each squared error
                 counts; None: all the same
    peaks        what a group's largest magnitude may become
    """
    peak = values.abs().amax(1)
    scales = [
        (peak / (target * factor)).clamp_max(_LARGEST_E4M3).to(torch.float8_e4m3fn)
        for target in peaks
    ]
    codes, best = _best(values, (scale.float() * factor for scale in scales), importance)
    stacked = torch.stack([scale.view(torch.uint8) for scale in scales])
    return codes, stacked.gather(0, best[None])[0].view(torch.float8_e4m3fn)


def round_mxfp4(values: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """f32 [groups, 32] to (codes uint8 [groups, 32], exponents uint8 [groups]).

    The power of two is the one of OCP MX 1.0, section 6.3, or the next, whichever errs less.
    `importance` as in `round_nvfp4`.
    """
    _, exponent = torch.frexp(values.abs().amax(1))  # peak = m * 2^exponent, m in [1/2, 1)
    low = (exponent - 3).clamp(-127, 126)
    scales = (torch.exp2((low + up).float()) for up in (0, 1))
    codes, best = _best(values, scales, importance)
    return codes, (low + best + 127).to(torch.uint8)


def nearest_fp4(values: Tensor, scales: Tensor) -> Tensor:
    """Nearest codes, the sign in bit 3: uint8 of the values' shape, which scales broadcast to."""
    relative = values / scales.masked_fill(scales == 0, torch.inf)
    codes = torch.bucketize(relative.abs(), torch.tensor(_MIDDLES, device=values.device))
    negative = (relative < 0) & (codes > 0)
    return (codes + 8 * negative).to(torch.uint8)


def fp4_numbers(codes: Tensor) -> Tensor:
    """What codes 0 to 15 stand for: f32 of their shape."""
    signed = _MAGNITUDES + tuple(-number for number in _MAGNITUDES)
    return torch.tensor(signed, device=codes.device)[codes.long()]


def _best(
    values: Tensor, scales: Iterable[Tensor], importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes for the scale of least squared error, and which one that is: int64 [groups]."""
    kept: tuple[Tensor, Tensor, Tensor] | None = None
    for index, scale in enumerate(scales):
        codes = nearest_fp4(values, scale[:, None])
        errors = (fp4_numbers(codes) * scale[:, None] - values).square()
        error = (errors if importance is None else errors * importance).sum(1)
        here = torch.full_like(error, index, dtype=torch.int64)
        if kept is None:
            kept = codes, error, here
            continue
        better = error < kept[1]
        kept = (
            torch.where(better[:, None], codes, kept[0]),
            torch.where(better, error, kept[1]),
            torch.where(better, here, kept[2]),
        )
    assert kept is not None
    return kept[0], kept[2]

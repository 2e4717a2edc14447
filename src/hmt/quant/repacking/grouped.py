"""Integers with a scale per group of inputs, and perhaps a zero point: what they become in memory.

Nothing is rounded.  A number is (code - zero) * scale, a product of at most 9 bits with the scale's
11 (f16) or 8 (bf16), which f32 holds.
"""

import torch
from torch import Tensor

from hmt.base.errors import CheckpointError
from hmt.contracts.encoding import PANEL_BLOCK, Encoding, WeightTensor
from hmt.kernels.panel_packing import pack_codes, pack_pairs
from hmt.quant.packed import Format, pack_groups
from hmt.quant.repacking.bits import unpack_nibbles

_GROUPS = (128, 64, 32, 16)  # those that kernels have


def memory_group(columns: int, group: int) -> int:
    """The largest group that kernels have and that divides groups of `group`; 0 if there is none.

    group   inputs that share a scale as published; 0 for all of a row
    """
    return next((size for size in _GROUPS if (group or columns) % size == 0), 0)


def grouped_format(
    bits: int, columns: int, group: int, scale_dtype: torch.dtype, *, zeros: bool
) -> Format:
    """What weights of `bits` bits become, with `columns` inputs and a scale for each `group`.

    At most 4 bits become INT4_GROUP, with zeros where there are `zeros`.  More bits become
    INT8_CHANNEL or INT8_GROUP, with minima where there are zeros: (middle - zero) * scale, which
    is exact where scales have 16 bits, and so is the sum.  What kernels have no form for becomes
    f32: rows of 4 bits that are no multiple of 32, groups that are none of 16.
    """
    size = memory_group(columns, group)
    if bits <= 4 and size and columns % PANEL_BLOCK == 0:
        return Format(Encoding.INT4_GROUP, size, scale_dtype=scale_dtype, zeros=zeros)
    if bits > 4 and not zeros and group in (0, columns):
        return Format(Encoding.INT8_CHANNEL)
    if bits > 4 and size and not (zeros and scale_dtype is torch.float32):
        return Format(Encoding.INT8_GROUP, size, minima=zeros)
    return Format(Encoding.F32)


def fill_grouped(
    target: WeightTensor, codes: Tensor, scales: Tensor, zeros: Tensor | int, middle: int
) -> None:
    """Write weights to `target`, of the format that `grouped_format` said.

    codes    uint8 [rows, columns], or [rows, columns / 2] where they lie two in a byte, the low
             nibble first
    scales   [rows, groups as published]
    zeros    uint8 of that shape, or one for all
    middle   the zero point of a format without zeros: 2^(bits - 1)
    """
    columns = target.shape[1]
    paired = codes.shape[1] < columns
    if paired and target.encoding is not Encoding.INT4_GROUP:
        codes = unpack_nibbles(codes)
    if target.encoding.is_float:
        _fill_floats(target.data, codes, scales, zeros)
        return
    assert target.scales is not None
    repeats = columns // (target.group_size or columns) // scales.shape[1]
    if target.minima is not None:
        assert isinstance(zeros, Tensor)
        minima = (middle - zeros.float()) * scales.float()
        target.minima.copy_(minima.repeat_interleave(repeats, 1))
    elif target.zeros is None:
        check_middle(zeros, middle)
    if target.encoding is Encoding.INT4_GROUP:
        offset = 8 - middle if target.zeros is None else 0
        assert not (paired and offset), "pairs have 4 bits"
        target.data.copy_(pack_pairs(codes) if paired else pack_codes(codes + offset))
        fill_groups(target, scales, zeros)
        return
    # int8 wraps: 200 - 128 is 72 as uint8 and 10 - 128 is 138 there, which is -118.
    target.data.copy_((codes - middle).view(torch.int8))
    target.scales.copy_(scales.repeat_interleave(repeats, 1).view(target.scales.shape))


def fill_groups(target: WeightTensor, scales: Tensor, zeros: Tensor | int) -> None:
    """Write what groups of 4-bit codes have: see `fill_grouped`."""
    assert target.scales is not None
    groups = target.shape[1] // (target.group_size or target.shape[1])
    repeats = groups // scales.shape[1]
    target.scales.copy_(pack_groups(scales.repeat_interleave(repeats, 1)))
    if target.zeros is not None:
        assert isinstance(zeros, Tensor)
        target.zeros.copy_(pack_groups(zeros.repeat_interleave(repeats, 1)))


def fill_minima(target: WeightTensor, codes: Tensor, scales: Tensor, minima: Tensor) -> None:
    """Write code * scale + minimum to `target`, of a format with minima or of floats.

    codes    uint8 [rows, columns] of at most 4 bits; int8 for INT8_GROUP
    scales   f32 [rows, groups as published]
    minima   of that shape and dtype
    """
    rows, columns = target.shape
    if target.encoding.is_float:
        groups = codes.float().view(rows, scales.shape[1], -1) * scales[..., None]
        target.data.copy_((groups + minima[..., None]).view(target.shape))
        return
    assert target.scales is not None and target.minima is not None
    repeats = columns // target.group_size // scales.shape[1]
    scales, minima = (part.repeat_interleave(repeats, 1) for part in (scales, minima))
    if target.encoding is Encoding.INT4_GROUP:
        target.data.copy_(pack_codes(codes))
        target.scales.copy_(pack_groups(scales))
        target.minima.copy_(pack_groups(minima))
        return
    target.data.copy_(codes)
    target.scales.copy_(scales)
    target.minima.copy_(minima)


def minima_format(
    bits: int, columns: int, group: int, scale_dtype: torch.dtype = torch.float32
) -> Format:
    """What code * scale + minimum becomes: INT4_GROUP, INT8_GROUP, or numbers.

    scale_dtype   holds scales and minima; INT8_GROUP has them in f32 anyway
    """
    size = memory_group(columns, group)
    if bits <= 4 and size and columns % PANEL_BLOCK == 0:
        return Format(Encoding.INT4_GROUP, size, scale_dtype=scale_dtype, minima=True)
    if bits > 4 and size:
        return Format(Encoding.INT8_GROUP, size, minima=True)
    return Format(Encoding.F32)


def check_middle(zeros: Tensor | int, middle: int) -> None:
    """Raise CheckpointError unless all zero points are `middle`, as the configuration promises."""
    if isinstance(zeros, Tensor) and bool((zeros != middle).any()):
        found = int(zeros[zeros != middle][0])
        raise CheckpointError(
            f"it has a zero point of {found} where the quantisation config says symmetric, which "
            f"means {middle}: config and weights do not belong together"
        )


def _fill_floats(out: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | int) -> None:
    groups = codes.to(torch.int16).view(len(codes), scales.shape[1], -1)
    signed = groups - (zeros.to(torch.int16)[..., None] if isinstance(zeros, Tensor) else zeros)
    out.copy_((signed.float() * scales.float()[..., None]).view(out.shape))

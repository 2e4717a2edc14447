"""Weights as numbers, weights as integers, and activations as integers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import Encoding, Packing, WeightTensor
from hmt.kernels import reference
from hmt.kernels.triton.gemm.block_numbers import numbers_of_blocks
from hmt.kernels.triton.gemm.skinny_w4 import MINIMA, NO_OFFSETS, ZEROS
from hmt.kernels.triton.gemm.unpack import INTERPRETED, e2m1_halves, panel_integers, scale_numbers
from hmt.kernels.triton.gemm.unpack_words import word_numbers

_BLOCKS = 4  # of 32 inputs, in a program that takes one panel: 1 KB of codes
_PANEL_WARPS = 2
_TILE = (16, 256)
_MOST_COLUMNS_AT_ONCE = 16384


def dequantize(w: WeightTensor, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
    """See `reference.dequantize`: [rows, in] in `dtype`; a view where nothing is converted."""
    if w.encoding.is_float:
        return reference.dequantize(w, dtype, rows)
    start, stop, _ = (rows or slice(None)).indices(w.shape[0])
    shape = max(0, stop - start), w.shape[1]
    if w.encoding is Encoding.INT8_GROUP and w.minima is not None:
        # No kernel has them; rounded once all the same.
        numbers = torch.empty(shape, device=w.data.device)
        dequantize_into(numbers, w, start)
        minima = w.minima[start:stop]
        numbers.view(*minima.shape, -1).add_(minima[..., None])
        return numbers.to(dtype)
    out = torch.empty(shape, dtype=dtype, device=w.data.device)
    dequantize_into(out, w, start)
    return out


def dequantize_into(
    out: Tensor, w: WeightTensor, start: int = 0, *, units: Tensor | None = None
) -> None:
    """Rows of `w` from `start` on, written to out [rows, in], contiguous.

    Numbers where `out` is of floats; where it is int8, what `reference.linear_int8_tokens`
    multiplies with: codes less their zeros, or numbers of e2m1 doubled.  With units, f32 [rows],
    numbers are those of panels without offsets and factor, divided by the unit of their row.
    """
    count, columns = out.shape
    if out.numel() == 0:
        return
    if w.encoding.packing is Packing.BLOCKS:
        numbers_of_blocks(out, w, start)
        return
    if w.encoding in (Encoding.INT4_GROUP, Encoding.NVFP4, Encoding.MXFP4):
        first = start // 16
        if units is None and _is_plain_int4(out, w):
            _dequantize_int4[(triton.cdiv(start + count, 16) - first, triton.cdiv(columns, 256))](
                out,
                w.data,
                w.scales,
                first,
                start,
                start + count,
                columns // 32,
                GROUP_BLOCKS=w.group_size // 32,
                BLOCKS=8,
                num_warps=1,
            )
            return
        grid = (triton.cdiv(start + count, 16) - first, triton.cdiv(columns, 32 * _BLOCKS))
        _dequantize_panels[grid](
            out,
            w.data,
            w.scales,
            None if units is not None else offsets_of(w),
            None if units is not None else w.factor,
            units,
            first,
            start,
            start + count,
            columns // 32,
            GROUP=w.group_size,
            E2M1=w.encoding is not Encoding.INT4_GROUP,
            OFFSETS=0 if units is not None else offset_kind(w),
            BLOCKS=_BLOCKS,
            num_warps=_PANEL_WARPS,
        )
        return
    height, width = w.tile if w.encoding is Encoding.FP8_BLOCK else (1, w.group_size or columns)
    assert w.scales is not None
    grid = (triton.cdiv(count, _TILE[0]), triton.cdiv(columns, _TILE[1]))
    _dequantize_rows[grid](
        out,
        w.data,
        w.scales,
        start,
        count,
        columns,
        triton.cdiv(columns, width),
        HEIGHT=height,
        WIDTH=width,
        ROWS=_TILE[0],
        COLUMNS=_TILE[1],
        num_warps=4,
    )


def _is_plain_int4(out: Tensor, w: WeightTensor) -> bool:
    """True where `_dequantize_int4` makes numbers of w."""
    assert w.scales is not None
    return (
        out.dtype is w.scales.dtype is torch.bfloat16
        and w.encoding is Encoding.INT4_GROUP
        and w.group_size % 32 == 0
        and offset_kind(w) == NO_OFFSETS.value
        and all(part.data_ptr() % 16 == 0 for part in (out, w.data))
        and not INTERPRETED
    )


def offset_kind(w: WeightTensor) -> int:
    """What `offsets_of` are."""
    if w.zeros is not None:
        return ZEROS.value
    return NO_OFFSETS.value if w.minima is None else MINIMA.value


def offsets_of(w: WeightTensor) -> Tensor | None:
    """Zeros or minima."""
    return w.minima if w.zeros is None else w.zeros


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_activations`: (int8 [tokens, in], f32 [tokens])."""
    tokens, columns = x.shape
    if columns > 1 and x.stride(1) != 1:
        x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        block = min(triton.next_power_of_2(max(columns, 1)), _MOST_COLUMNS_AT_ONCE)
        # Not `dependent`: where nothing ends a chain of so many small kernels, an H200 took 1.63 ms
        # instead of 1.0 for a step (8 layers of int8, one token behind 2048 positions).
        _quantize_tokens[(tokens,)](
            codes,
            scales,
            x,
            columns,
            x.stride(0),
            BLOCK=block,
            ONCE=columns <= block,
            num_warps=max(1, min(16, block // 512)),
        )
    return codes, scales


@triton.jit
def _dequantize_panels(
    out,
    codes,
    scales,
    offsets,
    factor,
    units,
    first_panel,
    start,
    stop,
    blocks,
    GROUP: tl.constexpr,
    E2M1: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    panel = (first_panel + tl.program_id(0)).to(tl.int64)
    first = tl.program_id(1) * BLOCKS
    at = tl.arange(0, BLOCKS * 256)
    pairs = tl.load(
        codes + panel * (blocks * 256) + first * 256 + at, mask=first + at // 256 < blocks, other=0
    )
    INTEGERS: tl.constexpr = out.dtype.element_ty == tl.int8
    if E2M1 and not INTEGERS:
        low, high = e2m1_halves(pairs)
        low, high = low.to(tl.float32) * 16384.0, high.to(tl.float32) * 16384.0
    else:
        low, high = panel_integers(pairs, E2M1)
    both = tl.reshape(tl.join(low, high), (BLOCKS, 4, 16, 4, 2))  # block, j, row, i, half
    # In groups, so that each scale is loaded once.
    WIDTH: tl.constexpr = GROUP if 32 * BLOCKS % GROUP == 0 else 1
    COUNT: tl.constexpr = 32 * BLOCKS // WIDTH
    numbers = tl.reshape(tl.permute(both, (2, 0, 4, 1, 3)), (16, COUNT, WIDTH))
    row = tl.arange(0, 16)
    groups = blocks * 32 // GROUP
    group = (first * 32 + tl.arange(0, COUNT) * WIDTH) // GROUP
    group_at = panel * (groups * 16) + (group * 16)[None, :, None] + row[:, None, None]
    inside = (group < groups)[None, :, None]
    if OFFSETS == ZEROS:
        numbers += 8 - tl.load(offsets + group_at, mask=inside, other=0).to(tl.int32)
    if OFFSETS == MINIMA:
        numbers += 8
    if INTEGERS:
        result = numbers
    else:
        scale = scale_numbers(tl.load(scales + group_at, mask=inside, other=0.0))
        if factor is not None:
            scale *= tl.load(factor)
        if units is not None:
            unit = tl.load(units + panel * 16 + row, mask=panel * 16 + row < stop, other=1.0)
            scale = tl.div_rn(scale, tl.broadcast_to(unit[:, None, None], scale.shape))
        result = numbers.to(tl.float32) * scale
        if OFFSETS == MINIMA:
            result += tl.load(offsets + group_at, mask=inside, other=0.0).to(tl.float32)
    result = tl.reshape(result, (16, 32 * BLOCKS))
    column = first * 32 + tl.arange(0, 32 * BLOCKS)
    inside = (column < blocks * 32)[None, :]
    row = panel * 16 + row
    at = out + (row - start)[:, None] * (blocks * 32) + column[None, :]
    mask = inside & ((row >= start) & (row < stop))[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_int4(
    out, codes, scales, first_panel, start, stop, blocks,
    GROUP_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """As `_dequantize_panels`, to bf16 with scales of bf16: two instructions a number, not twelve.

    A prompt's weights are made numbers at the rate of memory so.
    """
    panel = (first_panel + tl.program_id(0)).to(tl.int64)
    first = tl.program_id(1) * BLOCKS
    at = tl.arange(0, BLOCKS * 64)
    block = first + at // 64
    words = tl.multiple_of(codes.to(tl.pointer_type(tl.int32)), 16)
    words = tl.load(words + (panel * blocks + first) * 64 + at, mask=block < blocks, other=0)
    scale_at = panel * (blocks // GROUP_BLOCKS * 16) + block // GROUP_BLOCKS * 16 + at % 16
    scale = tl.load(scales + scale_at, mask=block < blocks, other=0.0)
    a, b, c, d = word_numbers(words, scale)
    both = tl.join(tl.join(a, b), tl.join(c, d))
    both = tl.reshape(both, (BLOCKS, 4, 16, 2, 2))  # block, j, row, i >= 2, half
    pairs = tl.reshape(tl.permute(both, (2, 0, 4, 1, 3)), (16, BLOCKS * 16))
    row = panel * 16 + tl.arange(0, 16)
    column = first * 16 + tl.arange(0, BLOCKS * 16)
    target = tl.multiple_of(out.to(tl.pointer_type(tl.int32)), 16)
    target = target + ((row - start) * (blocks * 16))[:, None] + column[None, :]
    inside = (column < blocks * 16)[None, :] & ((row >= start) & (row < stop))[:, None]
    tl.store(target, pairs, mask=inside)


@triton.jit
def _dequantize_rows(
    out,
    codes,
    scales,
    start,
    count,
    columns,
    scale_columns,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < count)[:, None] & (column < columns)[None, :]
    numbers = tl.load(
        codes + (start + row)[:, None] * columns + column[None, :], mask=mask, other=0.0
    )
    scale_at = ((start + row) // HEIGHT * scale_columns)[:, None] + (column // WIDTH)[None, :]
    result = numbers.to(tl.float32) * tl.load(scales + scale_at, mask=mask, other=0.0)
    at = out + row[:, None] * columns + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_tokens(
    codes,
    scales,
    x,
    columns,
    x_stride,
    BLOCK: tl.constexpr,
    ONCE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    row = x + token * x_stride
    if ONCE:
        values = tl.load(row + at, mask=at < columns, other=0.0).to(tl.float32)
        scale = _token_scale(tl.max(_size(values), 0))
        tl.store(codes + token * columns + at, _rounded(values, scale), mask=at < columns)
    else:
        largest = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, columns, BLOCK):
            values = tl.load(row + start + at, mask=start + at < columns, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, _size(values))
        scale = _token_scale(tl.max(largest, 0))
        for start in range(0, columns, BLOCK):
            mask = start + at < columns
            values = tl.load(row + start + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(codes + token * columns + start + at, _rounded(values, scale), mask=mask)
    tl.store(scales + token, scale)


@triton.jit
def _size(values):
    """Int32 in the order of absolute values; what is no number is above all."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def _token_scale(largest):
    return tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0)


@triton.jit
def _rounded(values, scale):
    """int8, ties to even; numbers that are none become 0, their token's scale says so."""
    values = tl.div_rn(values, tl.where(scale > 0, scale, 1.0))
    values = tl.where(values == values, values, 0.0)
    values = tl.minimum(tl.maximum(values, -127.0), 127.0)
    # Adding 1.5 * 2^23 leaves no bits for the fraction.
    return ((values + 12582912.0) - 12582912.0).to(tl.int8)

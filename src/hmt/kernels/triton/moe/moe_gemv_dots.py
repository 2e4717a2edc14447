"""Dot products of some rows of several matrices with one vector each, on CUDA cores.

Reading is all that counts with one vector, and at 4 bits the arithmetic units are the next limit:
H200 reads 37 codes per cycle and core, which can start 128 operations.  So codes are multiplied as
bytes, four in one instruction.  Activations that are not rounded to int8 come as two bytes (14
bits and a power of two for each 16), which is more than bfloat16 has, or as three for f32.
"""

import triton
import triton.language as tl

from hmt.kernels.triton.weight_codes import dot4, nibble_bytes, pointers, scale_numbers


@triton.jit
def _word_dots(
    codes, x_words, block, mask, there, x_plane,
    MATRICES: tl.constexpr, STEP: tl.constexpr, E2M1: tl.constexpr, PLANES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Low and high nibbles of four words times activations, and the sums of these activations.

    Int32: two of [MATRICES, STEP, 16], two of [x rows, STEP, 1].
    """
    ones = tl.full((1, STEP, 1), 0x01010101, tl.int32)
    nothing = tl.zeros((1, STEP, 1), tl.int32)
    low_sum = nothing
    high_sum = nothing
    low_top_sum = nothing  # of the higher planes
    high_top_sum = nothing
    low_dot = tl.zeros((MATRICES, STEP, 16), tl.int32)
    high_dot = low_dot
    low_top = low_dot
    high_top = low_dot
    for j in tl.static_range(4):
        read = tl.load(codes + block * 64 + j * 16, mask=mask, other=0)
        low, high = nibble_bytes(read, E2M1, ASM)
        for plane in tl.static_range(PLANES):
            at = x_words + plane * x_plane + block * 8 + j
            x_low = tl.load(at, mask=there, other=0)
            x_high = tl.load(at + 4, mask=there, other=0)
            if plane == PLANES - 1:
                low_sum = dot4(x_low, ones, low_sum, ASM)
                high_sum = dot4(x_high, ones, high_sum, ASM)
                low_dot = dot4(low, x_low, low_dot, ASM)
                high_dot = dot4(high, x_high, high_dot, ASM)
            elif plane == PLANES - 2:
                low_top_sum = dot4(x_low, ones, low_top_sum, ASM)
                high_top_sum = dot4(x_high, ones, high_top_sum, ASM)
                low_top = dot4(low, x_low, low_top, ASM)
                high_top = dot4(high, x_high, high_top, ASM)
            else:
                low_top_sum += dot4(x_low, ones, nothing, ASM) << 8
                high_top_sum += dot4(x_high, ones, nothing, ASM) << 8
                low_top += dot4(low, x_low, nothing, ASM) << 8
                high_top += dot4(high, x_high, nothing, ASM) << 8
    if PLANES > 1:
        low_sum += low_top_sum << 8
        high_sum += high_top_sum << 8
        low_dot += low_top << 8
        high_dot += high_top << 8
    return low_dot, high_dot, low_sum, high_sum


@triton.jit
def panel_dots(
    data, scales, extra, factor, present, panel, x, x_scales, x_row, blocks, x_plane,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, EXTRA: tl.constexpr,
    PLANES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Rows 16 * panel to 16 * panel + 15 of matrices [m, 1, 1]: f32 [m, 16].

    data, scales, extra   int64 addresses [m, 1, 1]; factor f32 or 1.0; present: where to read
    x                     int8 as int32 [rows, PLANES, x_plane]; x_row [m or 1, 1, 1] or a number
    x_scales              f32 [rows, 2 * blocks], one for 16; read where PLANES > 1
    STEP                  blocks of 32 inputs at a time

    A lane has all four words of a row and block, so that what is done with a scale is done once
    for 32 codes.
    """
    apart: tl.constexpr = GROUP == 16 or PLANES > 1  # low and high nibbles have their own scales
    KEPT: tl.constexpr = tl.uint8 if EXTRA == "zeros" else SCALE
    row = tl.arange(0, 16)[None, None, :]
    groups = blocks * 32 // GROUP
    codes = pointers(data, tl.int32) + panel * blocks * 64 + row
    scale = pointers(scales, SCALE) + panel * groups * 16 + row
    added = pointers(extra, KEPT) + panel * groups * 16 + row
    x_words = x + x_row * PLANES * x_plane
    x_groups = x_scales + x_row * 2 * blocks
    total = tl.zeros((data.shape[0], STEP, 16), tl.float32)
    for start in tl.range(0, blocks, STEP, num_stages=STAGES):
        block = start + tl.arange(0, STEP)[None, :, None]
        mask = present if EVEN else present & (block < blocks)
        there = block < blocks
        low_dot, high_dot, low_sum, high_sum = _word_dots(
            codes, x_words, block, mask, there, x_plane,
            data.shape[0], STEP, KIND != "int4", PLANES, ASM,
        )  # fmt: skip
        group = block * 32 // GROUP
        if EXTRA == "zeros":
            high_group = group + 1 if GROUP == 16 else group
            low_dot -= tl.load(added + group * 16, mask=mask, other=0).to(tl.int32) * low_sum
            high_dot -= tl.load(added + high_group * 16, mask=mask, other=0).to(tl.int32) * high_sum
        elif KIND == "int4" and EXTRA == "":
            low_dot -= 8 * low_sum
            high_dot -= 8 * high_sum
        by = scale_numbers(tl.load(scale + group * 16, mask=mask, other=0.0), factor, KIND)
        high_by = by
        if GROUP == 16:
            other = tl.load(scale + group * 16 + 16, mask=mask, other=0.0)
            high_by = scale_numbers(other, factor, KIND)
        if apart:
            low_part = low_dot.to(tl.float32)
            high_part = high_dot.to(tl.float32)
            low_x = low_sum.to(tl.float32)
            high_x = high_sum.to(tl.float32)
            if PLANES > 1:
                x_low_by = tl.load(x_groups + block * 2, mask=there, other=0.0)
                x_high_by = tl.load(x_groups + block * 2 + 1, mask=there, other=0.0)
                low_part *= x_low_by
                high_part *= x_high_by
                low_x *= x_low_by
                high_x *= x_high_by
            if GROUP == 16:
                total += low_part * by + high_part * high_by
            else:
                total += (low_part + high_part) * by
        else:
            total += (low_dot + high_dot).to(tl.float32) * by
            low_x = low_sum.to(tl.float32)
            high_x = high_sum.to(tl.float32)
        if EXTRA == "minima":
            least = tl.load(added + group * 16, mask=mask, other=0.0).to(tl.float32)
            if GROUP == 16:
                more = tl.load(added + group * 16 + 16, mask=mask, other=0.0).to(tl.float32)
                total += low_x * least + high_x * more
            else:
                total += (low_x + high_x) * least
    return tl.sum(total, axis=1)


@triton.jit
def row_dots(
    data, scales, present, panel, x, x_row, rows, columns,
    KIND: tl.constexpr, DATA: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, CODES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `panel_dots`, of row-major matrices [rows, columns]; x [.., columns], int8 if CODES."""
    row = panel * 16 + tl.arange(0, 16)[None, :, None]
    inside = present & (row < rows)
    at = pointers(data, DATA, ALIGNED) + row.to(tl.int64) * columns
    tiles = tl.cdiv(columns, TILE_COLUMNS)
    scale = pointers(scales, tl.float32, ALIGNED)
    if KIND == "int8" and CODES:
        total = tl.zeros((data.shape[0], 16, COLUMNS), tl.int32)
    else:
        total = tl.zeros((data.shape[0], 16, COLUMNS), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, None, :]
        there = column < columns
        mask = inside & there
        numbers = tl.load(at + column, mask=mask, other=0.0)
        by_x = tl.load(x + x_row * columns + column, mask=there, other=0.0)
        if CODES:
            product = numbers.to(tl.int32) * by_x.to(tl.int32)
        else:
            product = numbers.to(tl.float32) * by_x.to(tl.float32)
        if KIND == "fp8":
            by = scale + row // TILE_ROWS * tiles
            if TILE_COLUMNS % COLUMNS == 0:
                total += product * tl.load(by + start // TILE_COLUMNS, mask=inside, other=0.0)
            else:
                total += product * tl.load(by + column // TILE_COLUMNS, mask=mask, other=0.0)
        elif KIND == "int8-group":
            by = scale + row * (columns // GROUP)
            number = tl.load(by + column // GROUP, mask=mask, other=0.0)
            total += product.to(tl.float32) * number
        else:
            total += product
    out = tl.sum(total, axis=2, keep_dims=True).to(tl.float32)
    if KIND == "int8":
        out *= tl.load(scale + row, mask=inside, other=0.0)
    return tl.reshape(out, (data.shape[0], 16))

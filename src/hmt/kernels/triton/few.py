"""Products of few tokens with weights in panels: every byte of the weights is read once.

The layout of panels is that of operands of tensor cores.  Of the 16 bytes at (panel, block, j, 4 q)
a thread makes the numbers that lane (4 (panel % 2) + q, j) of a warp has to hold, for four rows; so
nothing moves between threads until the last sum.  Each warp takes blocks of its own.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hmt.kernels.triton.unpack import (
    float_codes,
    int8_codes,
    large_activations,
    scale_numbers,
)

NO_OFFSETS = tl.constexpr(0)
ZEROS = tl.constexpr(1)
MINIMA = tl.constexpr(2)


@triton.jit
def few_tokens(
    out,
    x,
    token_scales,
    codes_0,
    codes_1,
    codes_2,
    scales_0,
    scales_1,
    scales_2,
    offsets_0,
    offsets_1,
    offsets_2,
    factor_0,
    factor_1,
    factor_2,
    bias_0,
    bias_1,
    bias_2,
    rows_0,
    rows_1,
    rows_2,
    tokens,
    blocks,
    x_stride,
    out_stride,
    COUNT: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    E2M1: tl.constexpr,
    OFFSETS: tl.constexpr,
    UNIT: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAIRS: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    EVEN: tl.constexpr,
):
    """x [tokens, in] times up to three weights, side by side.

    GROUP_BLOCKS   blocks of 32 inputs per group; 0 stands for groups of 16 inputs
    OFFSETS        what offsets_* are: nothing, zeros or minima
    UNIT           `code_unit`
    DEPTH          dots that a warp takes at once
    BLOCKS         blocks of 32 inputs in a dot
    PAIRS          panels of a program, in pairs
    SPLIT          groups in a dot.  Tensor cores have eight columns; where there are fewer tokens,
                   each group of inputs gets columns of its own, so that scales are applied to the
                   sums of several groups at once
    TOKENS         tokens of a program; SPLIT * TOKENS is 8, 16 or 32
    STAGES         1, or buffers in shared memory through which the inputs of following steps come
    EARLY          begin while the kernel before is still running, and let the next one begin
    EVEN           blocks are a multiple of WARPS * DEPTH * BLOCKS
    """
    tile = tl.program_id(0)
    codes, scales, offsets, rows = codes_0, scales_0, offsets_0, rows_0
    factor, column, which = factor_0, 0, 0
    if COUNT > 1:
        tiles = tl.cdiv(rows_0, 32 * PAIRS)
        if tile >= tiles:
            tile, column, which = tile - tiles, rows_0, 1
            codes, scales, offsets, rows, factor = codes_1, scales_1, offsets_1, rows_1, factor_1
            if COUNT > 2:
                tiles = tl.cdiv(rows_1, 32 * PAIRS)
                if tile >= tiles:
                    tile, column, which = tile - tiles, rows_0 + rows_1, 2
                    codes, scales, offsets = codes_2, scales_2, offsets_2
                    rows, factor = rows_2, factor_2
    if EARLY:
        gdc_launch_dependents()
    first_token = tl.program_id(1) * TOKENS
    total = _sum_of_blocks(
        x + first_token.to(tl.int64) * x_stride,
        codes,
        scales,
        offsets,
        tile * (2 * PAIRS),
        tl.cdiv(rows, 16),
        tokens - first_token,
        blocks,
        x_stride,
        GROUP_BLOCKS,
        E2M1,
        OFFSETS,
        WARPS * DEPTH,
        BLOCKS,
        PAIRS,
        SPLIT,
        TOKENS,
        STAGES,
        EARLY,
        EVEN,
    )
    total *= UNIT
    if factor is not None:
        total *= tl.load(factor)
    # Row m of the result is row 4 (m / 2^3 % 4) + ... of the panels: see the module's docstring.
    m = tl.arange(0, 32 * PAIRS)
    row = tile * (32 * PAIRS) + m // 32 * 32 + m // 4 % 2 * 16 + m % 4 * 4 + m // 8 % 4
    token = first_token + tl.arange(0, TOKENS)
    if token_scales is not None:
        total *= tl.load(token_scales + token, mask=token < tokens, other=0.0)[None, :]
    if bias_0 is not None:
        bias = tl.load(bias_0 + row, mask=(which == 0) & (row < rows), other=0.0)
        total += bias.to(tl.float32)[:, None]
    if bias_1 is not None:
        bias = tl.load(bias_1 + row, mask=(which == 1) & (row < rows), other=0.0)
        total += bias.to(tl.float32)[:, None]
    if bias_2 is not None:
        bias = tl.load(bias_2 + row, mask=(which == 2) & (row < rows), other=0.0)
        total += bias.to(tl.float32)[:, None]
    at = out + token.to(tl.int64)[None, :] * out_stride + (column + row)[:, None]
    mask = (row < rows)[:, None] & (token < tokens)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_of_blocks(
    x,
    codes,
    scales,
    offsets,
    first_panel,
    panels,
    tokens,
    blocks,
    x_stride,
    GROUP_BLOCKS: tl.constexpr,
    E2M1: tl.constexpr,
    OFFSETS: tl.constexpr,
    DOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAIRS: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    EVEN: tl.constexpr,
):
    """f32 [32 * PAIRS, SPLIT * TOKENS]: scaled products, in units of `code_unit`."""
    # 16 bytes each: [PAIRS, BLOCKS, DOTS, panel of 2, q of 4, j of 4] where threads load what they
    # compute on, with j before q where they take it from shared memory, so that neighbours load
    # neighbours.  As a list, because the order in which Triton gives dimensions to lanes differs
    # between versions.
    DIRECT: tl.constexpr = STAGES == 1
    at = tl.arange(0, PAIRS * BLOCKS * DOTS * 32)
    block = at // 32 % DOTS * BLOCKS + at // (32 * DOTS) % BLOCKS
    panel = first_panel + at // (32 * DOTS * BLOCKS) * 2 + at // 16 % 2
    panel = tl.minimum(panel, panels - 1).to(tl.int64)
    in_block = at % 4 * 64 + at // 4 % 4 * 16 if DIRECT else at % 16 * 16
    code_at = (codes + panel * (blocks * 256) + block * 256 + in_block)[:, None]
    code_at += tl.arange(0, 16)[None, :]

    COLUMNS: tl.constexpr = SPLIT * TOKENS
    if DIRECT:
        # Four inputs each: [columns / 8, BLOCKS, half, DOTS, column of 8, j of 4].
        X_WIDTH: tl.constexpr = 4
        xs = tl.arange(0, 8 * COLUMNS * BLOCKS * DOTS)
        x_column = xs // (64 * DOTS * BLOCKS) * 8 + xs // 4 % 8
        x_half, x_in_dot = xs // (32 * DOTS) % 2, xs // (64 * DOTS) % BLOCKS
        x_block = xs // 32 % DOTS * BLOCKS + x_in_dot
        x_input = x_block * 32 + x_half * 16 + xs % 4 * 4
    else:
        # Eight inputs each: [columns, DOTS, BLOCKS, quarter of a block].
        X_WIDTH: tl.constexpr = 8
        xs = tl.arange(0, 4 * COLUMNS * BLOCKS * DOTS)
        x_column = xs // (4 * BLOCKS * DOTS)
        x_half, x_in_dot = xs // 2 % 2, xs // 4 % BLOCKS
        x_block = xs // 4 % (BLOCKS * DOTS)
        x_input = xs % (4 * BLOCKS * DOTS) * 8
    x_token = x_column % TOKENS
    x_at = (x + x_token.to(tl.int64) * x_stride + x_input)[:, None]
    x_at += tl.arange(0, X_WIDTH)[None, :]
    x_mask = x_token < tokens
    if SPLIT > 1:
        x_group = x_in_dot * 2 + x_half if GROUP_BLOCKS == 0 else x_in_dot // GROUP_BLOCKS
        x_mask &= x_column // TOKENS == x_group

    if EARLY:
        gdc_wait()
    total = tl.zeros((DOTS, 32 * PAIRS, COLUMNS), tl.float32)
    for start in tl.range(0, blocks, DOTS * BLOCKS, num_stages=STAGES):
        # What lies behind the last block is some code, too, and is multiplied with zeros.
        if EVEN:
            pairs = tl.load(code_at + start * 256)
        else:
            pairs = tl.load(code_at + start * 256, mask=(block + start < blocks)[:, None])
        scale = _group_numbers(
            scales,
            start,
            first_panel,
            panels,
            blocks,
            GROUP_BLOCKS,
            DOTS,
            BLOCKS,
            PAIRS,
            SPLIT,
            TOKENS,
        )
        mask = x_mask if EVEN else x_mask & (x_block + start < blocks)
        values = tl.load(x_at + start * 32, mask=mask[:, None], other=0)
        values = large_activations(values, E2M1)
        if DIRECT:
            values = tl.reshape(values, (COLUMNS // 8, BLOCKS, 2, DOTS, 8, 4, 4))
            values = tl.permute(values, (3, 1, 5, 2, 6, 0, 4))  # dot, block, j, half, i, column
        else:
            values = tl.reshape(values, (COLUMNS, DOTS, BLOCKS, 2, 4, 4))
            values = tl.permute(values, (1, 2, 4, 3, 5, 0))  # the same
        values = tl.reshape(values, (DOTS, 32 * BLOCKS, COLUMNS))
        weights = _operand(pairs, E2M1, x.dtype.element_ty, DOTS, BLOCKS, PAIRS, DIRECT)
        product = tl.dot(weights, values, out_dtype=_sum_type(x.dtype.element_ty))
        if OFFSETS != NO_OFFSETS:
            # Sums of x, by the tensor cores too, so that they lie where they are wanted.
            ones = tl.full(weights.shape, 1, weights.dtype)
            sums = tl.dot(ones, values, out_dtype=_sum_type(x.dtype.element_ty))
            added = _group_numbers(
                offsets,
                start,
                first_panel,
                panels,
                blocks,
                GROUP_BLOCKS,
                DOTS,
                BLOCKS,
                PAIRS,
                SPLIT,
                TOKENS,
            )
            INT8: tl.constexpr = x.dtype.element_ty == tl.int8
            if OFFSETS == ZEROS:
                product += (8 - added.to(product.dtype)) * (sums * 16 if INT8 else sums)
            else:
                product += sums * (128 if INT8 else 8)
                total += added.to(tl.float32) * (sums * 16 if INT8 else sums).to(tl.float32)
        total += product.to(tl.float32) * scale_numbers(scale)
    if SPLIT > 1:
        total = tl.sum(tl.reshape(total, (DOTS, 32 * PAIRS, SPLIT, TOKENS)), 2)
    return tl.sum(total, 0)


@triton.jit
def _group_numbers(
    numbers,
    start,
    first_panel,
    panels,
    blocks,
    GROUP_BLOCKS: tl.constexpr,
    DOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAIRS: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Numbers of groups for each element of a product: [DOTS, 32 PAIRS, SPLIT * TOKENS].

    Loaded as a thread of the tensor cores' result needs them: four rows, for columns 2 t, 2 t + 1.
    """
    at = tl.arange(0, PAIRS * DOTS * 32)  # [PAIRS, DOTS, panel of 2, q of 4, t of 4]
    quad, thread = at // 4 % 4, at % 4
    panel = first_panel + at // (32 * DOTS) * 2 + at // 16 % 2
    panel = tl.minimum(panel, panels - 1).to(tl.int64)
    block = start + at // 32 % DOTS * BLOCKS
    if GROUP_BLOCKS == 0:
        groups, group = blocks * 2, block * 2
    else:
        groups, group = blocks // GROUP_BLOCKS, block // GROUP_BLOCKS
    numbers += panel * (groups * 16) + quad * 4
    COLUMNS: tl.constexpr = SPLIT * TOKENS
    SHAPE: tl.constexpr = (PAIRS, DOTS, 2, 4, 4, 4)  # pair, dot, panel, q, t, row
    EIGHTS: tl.constexpr = COLUMNS // 8
    if TOKENS == 1:
        one = _load_groups(numbers, group + 2 * thread, groups)
        two = _load_groups(numbers, group + 2 * thread + 1, groups)
        found = tl.permute(tl.reshape(tl.join(one, two), (*SHAPE, 2)), (1, 0, 5, 2, 3, 4, 6))
        found = tl.reshape(found, (DOTS, 32 * PAIRS, COLUMNS))
    elif EIGHTS > 1 and SPLIT == 2:
        one = _load_groups(numbers, group, groups)
        two = _load_groups(numbers, group + 1, groups)
        found = tl.permute(tl.reshape(tl.join(one, two), (*SHAPE, 2)), (1, 0, 5, 2, 3, 6, 4))
        found = tl.reshape(found, (DOTS, 32 * PAIRS, 2, 1, 4, 1))
        found = tl.broadcast_to(found, (DOTS, 32 * PAIRS, 2, EIGHTS // 2, 4, 2))
        found = tl.reshape(found, (DOTS, 32 * PAIRS, COLUMNS))
    else:
        one = _load_groups(numbers, group + (2 * thread // TOKENS if SPLIT > 1 else 0), groups)
        found = tl.permute(tl.reshape(one, SHAPE), (1, 0, 5, 2, 3, 4))
        found = tl.reshape(found, (DOTS, 32 * PAIRS, 1, 4, 1))
        found = tl.broadcast_to(found, (DOTS, 32 * PAIRS, EIGHTS, 4, 2))
        found = tl.reshape(found, (DOTS, 32 * PAIRS, COLUMNS))
    return found


@triton.jit
def _load_groups(numbers, group, groups):
    at = (numbers + group * 16)[:, None] + tl.arange(0, 4)[None, :]
    return tl.load(at, mask=(group < groups)[:, None], other=0.0)


@triton.jit
def _operand(
    pairs,
    E2M1: tl.constexpr,
    DTYPE: tl.constexpr,
    DOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAIRS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Bytes as an operand [DOTS, 32 PAIRS, 32 BLOCKS].

    Columns come in the order (block, j, half, i), rows in the order (pair, row of four, panel, q):
    so eight neighbours are of one thread, which is how Triton multiplies what was loaded as bytes.
    """
    if DTYPE == tl.int8:  # noqa: SIM300
        low, high = int8_codes(pairs, E2M1)
    else:
        low, high = float_codes(pairs, E2M1, DTYPE == tl.bfloat16)  # noqa: SIM300
    both = tl.reshape(tl.join(low, high), (PAIRS, BLOCKS, DOTS, 2, 4, 4, 4, 4, 2))
    if DIRECT:  # pair, block, dot, panel, quad, j, row, i, half
        both = tl.permute(both, (2, 0, 6, 3, 4, 1, 5, 8, 7))
    else:  # pair, block, dot, panel, j, quad, row, i, half
        both = tl.permute(both, (2, 0, 6, 3, 5, 1, 4, 8, 7))
    return tl.reshape(both, (DOTS, 32 * PAIRS, 32 * BLOCKS))


@triton.constexpr_function
def _sum_type(dtype):
    return tl.int32 if dtype == tl.int8 else tl.float32

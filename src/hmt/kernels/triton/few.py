"""Products of few tokens with weights in panels: every byte of the weights is read once.

The layout of panels is that of operands of tensor cores.  Of the 16 bytes at (panel, block, j, 4 q)
a thread makes the numbers that lane (4 (panel % 2) + q, j) of a warp has to hold, for four rows; so
nothing moves between threads until the last sum.  Each warp takes blocks of its own.
"""

import triton
import triton.language as tl

from hmt.kernels.triton.unpack import (
    float_codes,
    int8_codes,
    large_activations,
    scale_numbers,
)

NO_OFFSETS = tl.constexpr(0)
ZEROS = tl.constexpr(1)
MINIMA = tl.constexpr(2)


# Constants of kernels in this module:
#
# GROUP_BLOCKS   blocks of 32 inputs per group; 0 stands for groups of 16 inputs
# OFFSETS        what offsets_* are: nothing, zeros or minima
# UNIT           `code_unit`
# DEPTH          dots that a warp takes at once
# BLOCKS         blocks of 32 inputs in a dot
# PAIRS          panels of a program, in pairs
# SPLIT          groups in a dot.  Tensor cores have eight columns; where there are fewer tokens,
#                each group of inputs gets columns of its own, so that scales are applied to the
#                sums of several groups at once
# TOKENS         tokens of a program; SPLIT * TOKENS is 8, 16 or 32
# STAGES         1, or buffers in shared memory through which the inputs of following steps come
# EVEN           blocks are a multiple of WARPS * DEPTH * BLOCKS


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
    EVEN: tl.constexpr,
):
    """x [tokens, in] times up to three weights, side by side."""
    tile, column, which = _place(tl.program_id(0), rows_0, rows_1, COUNT, PAIRS)
    rows = _pick(which, rows_0, rows_1, rows_2, COUNT)
    first_token = tl.program_id(1) * TOKENS
    total = _sum_of_blocks(
        x + first_token.to(tl.int64) * x_stride,
        _pick(which, codes_0, codes_1, codes_2, COUNT),
        _pick(which, scales_0, scales_1, scales_2, COUNT),
        _pick(which, offsets_0, offsets_1, offsets_2, COUNT),
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
        EVEN,
    )
    total *= UNIT
    if factor_0 is not None:
        total *= tl.load(_pick(which, factor_0, factor_1, factor_2, COUNT))
    m = tl.arange(0, 32 * PAIRS)  # in the order of `_operand`
    row = tile * (32 * PAIRS) + m // 32 * 32 + m // 4 % 2 * 16 + m % 4 * 4 + m // 8 % 4
    token = first_token + tl.arange(0, TOKENS)
    if token_scales is not None:
        total *= tl.load(token_scales + token, mask=token < tokens, other=0.0)[None, :]
    # A bias may be missing where another weight has one.
    total = _with_bias(total, bias_0, row, (which == 0) & (row < rows))
    total = _with_bias(total, bias_1, row, (which == 1) & (row < rows))
    total = _with_bias(total, bias_2, row, (which == 2) & (row < rows))
    at = out + token.to(tl.int64)[None, :] * out_stride + (column + row)[:, None]
    mask = (row < rows)[:, None] & (token < tokens)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _place(tile, rows_0, rows_1, COUNT: tl.constexpr, PAIRS: tl.constexpr):
    """Which weight a program works on, which of its tiles, and where its result begins."""
    column, which = 0, 0
    if COUNT > 1:
        tiles = tl.cdiv(rows_0, 32 * PAIRS)
        if tile >= tiles:
            tile, column, which = tile - tiles, rows_0, 1
    if COUNT > 2:
        tiles = tl.cdiv(rows_1, 32 * PAIRS)
        if (which == 1) & (tile >= tiles):
            tile, column, which = tile - tiles, rows_0 + rows_1, 2
    return tile, column, which


@triton.jit
def _pick(which, first, second, third, COUNT: tl.constexpr):
    found = first
    if COUNT > 1 and first is not None:
        if which > 0:
            found = second
        if COUNT > 2:  # noqa: SIM102 - known when compiling, `which` when running
            if which == 2:
                found = third
    return found


@triton.jit
def _with_bias(total, bias, row, mask):
    if bias is not None:
        total += tl.load(bias + row, mask=mask, other=0.0).to(tl.float32)[:, None]
    return total


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
    EVEN: tl.constexpr,
):
    """f32 [32 * PAIRS, TOKENS]: scaled products, in units of `code_unit`."""
    DIRECT: tl.constexpr = STAGES == 1
    COLUMNS: tl.constexpr = SPLIT * TOKENS
    INT8: tl.constexpr = x.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if INT8 else tl.float32
    code_at, block = _code_addresses(
        codes, first_panel, panels, blocks, DOTS, BLOCKS, PAIRS, DIRECT
    )
    x_at, x_block, x_mask = _x_addresses(
        x, x_stride, tokens, GROUP_BLOCKS, DOTS, BLOCKS, SPLIT, TOKENS, DIRECT
    )
    total = tl.zeros((DOTS, 32 * PAIRS, COLUMNS), tl.float32)
    for start in tl.range(0, blocks, DOTS * BLOCKS, num_stages=STAGES):
        # What lies behind the last block is some code, too, and is multiplied with zeros.
        if EVEN:
            pairs = tl.load(code_at + start * 256)
        else:
            pairs = tl.load(code_at + start * 256, mask=(block + start < blocks)[:, None])
        place = first_panel, panels, start, blocks
        scale = _group_numbers(scales, place, GROUP_BLOCKS, DOTS, BLOCKS, PAIRS, SPLIT, TOKENS)
        mask = x_mask if EVEN else x_mask & (x_block + start < blocks)
        values = tl.load(x_at + start * 32, mask=mask[:, None], other=0)
        values = _x_operand(large_activations(values, E2M1), COLUMNS, DOTS, BLOCKS, DIRECT)
        weights = _operand(pairs, E2M1, x.dtype.element_ty, DOTS, BLOCKS, PAIRS, DIRECT)
        product = tl.dot(weights, values, out_dtype=SUM)
        if OFFSETS != NO_OFFSETS:
            # Sums of x, by the tensor cores too, so that they lie where they are wanted.
            sums = tl.dot(tl.full(weights.shape, 1, weights.dtype), values, out_dtype=SUM)
            added = _group_numbers(offsets, place, GROUP_BLOCKS, DOTS, BLOCKS, PAIRS, SPLIT, TOKENS)
            sums *= 16 if INT8 else 1
            if OFFSETS == ZEROS:
                product += (8 - added.to(SUM)) * sums
            else:
                product += sums * 8
                total += added.to(tl.float32) * sums.to(tl.float32)
        total += product.to(tl.float32) * scale_numbers(scale)
    if SPLIT > 1:
        total = tl.sum(tl.reshape(total, (DOTS, 32 * PAIRS, SPLIT, TOKENS)), 2)
    return tl.sum(total, 0)


@triton.jit
def _code_addresses(
    codes,
    first_panel,
    panels,
    blocks,
    DOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAIRS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Addresses [units, 16] of the first step's codes, and the block of each unit.

    Units are [PAIRS, BLOCKS, DOTS, panel of 2, q of 4, j of 4] if DIRECT: threads load what they
    compute on.  Otherwise, from shared memory, they can take anything, so neighbours load
    neighbours, and j comes before q.  Units are a list, because the order in which Triton gives
    dimensions to lanes differs between versions.
    """
    at = tl.arange(0, PAIRS * BLOCKS * DOTS * 32)
    block = at // 32 % DOTS * BLOCKS + at // (32 * DOTS) % BLOCKS
    panel = first_panel + at // (32 * DOTS * BLOCKS) * 2 + at // 16 % 2
    panel = tl.minimum(panel, panels - 1).to(tl.int64)
    in_block = at % 4 * 64 + at // 4 % 4 * 16 if DIRECT else at % 16 * 16
    code_at = (codes + panel * (blocks * 256) + block * 256 + in_block)[:, None]
    return code_at + tl.arange(0, 16)[None, :], block


@triton.jit
def _x_addresses(
    x,
    x_stride,
    tokens,
    GROUP_BLOCKS: tl.constexpr,
    DOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Addresses [units, width] of the first step's x, the block of each unit, and if it is wanted.

    Units are [columns / 8, BLOCKS, half, DOTS, column of 8, j of 4] of four inputs if DIRECT, else
    [columns, DOTS, BLOCKS, quarter of a block] of eight.
    """
    COLUMNS: tl.constexpr = SPLIT * TOKENS
    WIDTH: tl.constexpr = 4 if DIRECT else 8
    at = tl.arange(0, COLUMNS * DOTS * BLOCKS * (32 // WIDTH))
    if DIRECT:
        column = at // (64 * DOTS * BLOCKS) * 8 + at // 4 % 8
        half, in_dot = at // (32 * DOTS) % 2, at // (64 * DOTS) % BLOCKS
        block = at // 32 % DOTS * BLOCKS + in_dot
        first = block * 32 + half * 16 + at % 4 * 4
    else:
        column = at // (4 * BLOCKS * DOTS)
        half, in_dot = at // 2 % 2, at // 4 % BLOCKS
        block = at // 4 % (BLOCKS * DOTS)
        first = at % (4 * BLOCKS * DOTS) * 8
    token = column % TOKENS
    mask = token < tokens
    if SPLIT > 1:
        group = in_dot * 2 + half if GROUP_BLOCKS == 0 else in_dot // GROUP_BLOCKS
        mask &= column // TOKENS == group
    x_at = (x + token.to(tl.int64) * x_stride + first)[:, None] + tl.arange(0, WIDTH)[None, :]
    return x_at, block, mask


@triton.jit
def _x_operand(
    values,
    COLUMNS: tl.constexpr,
    DOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Activations as an operand [DOTS, 32 BLOCKS, COLUMNS], its rows as columns of `_operand`."""
    if DIRECT:
        values = tl.reshape(values, (COLUMNS // 8, BLOCKS, 2, DOTS, 8, 4, 4))
        values = tl.permute(values, (3, 1, 5, 2, 6, 0, 4))
    else:
        values = tl.reshape(values, (COLUMNS, DOTS, BLOCKS, 2, 4, 4))
        values = tl.permute(values, (1, 2, 4, 3, 5, 0))
    return tl.reshape(values, (DOTS, 32 * BLOCKS, COLUMNS))


@triton.jit
def _group_numbers(
    numbers,
    place,
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
    first_panel, panels, start, blocks = place
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
        found = tl.permute(
            tl.reshape(tl.join(one, two), (PAIRS, DOTS, 2, 4, 4, 4, 2)), (1, 0, 5, 2, 3, 4, 6)
        )
        found = tl.reshape(found, (DOTS, 32 * PAIRS, COLUMNS))
    elif EIGHTS > 1 and SPLIT == 2:
        one = _load_groups(numbers, group, groups)
        two = _load_groups(numbers, group + 1, groups)
        found = tl.permute(
            tl.reshape(tl.join(one, two), (PAIRS, DOTS, 2, 4, 4, 4, 2)), (1, 0, 5, 2, 3, 6, 4)
        )
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

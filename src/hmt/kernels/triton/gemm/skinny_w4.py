"""Products of few tokens with weights in panels: every byte of the weights is read once.

The layout of panels is that of operands of tensor cores, see `few_operands`; so nothing moves
between threads until the last sum.  Each warp takes blocks of its own.  Codes of a step are on
their way to registers while those of the step before are multiplied; those of the first are asked
for before the inputs are there.  More of them, asked for in the cache, made no step shorter.
"""

import triton
import triton.language as tl

from hmt.kernels.triton.device_math import activated, rounded
from hmt.kernels.triton.gemm.mma_fragments import (
    code_addresses,
    load_codes,
    load_groups,
    load_x,
    numbers_of_groups,
    sums_of_x,
    weight_operand,
    x_addresses,
    x_factors,
    x_operand,
)
from hmt.kernels.triton.gemm.unpack import scale_numbers
from hmt.kernels.triton.pdl import inputs_are_there, next_may_begin

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
# EVEN           blocks are a multiple of WARPS * DEPTH * BLOCKS
# ACTIVATION     "", or of a gate: weight 0 is a gate and weight 1 what goes through it, and
#                activation(x w0) (x w1) is stored; PAIRS is 2 and COUNT is 1 then
# ADD            products are added to what lies in `out`


# One variant for all numbers of tokens: a second, for multiples of 16, took 0.3 to 3 s to compile.
@triton.jit(do_not_specialize=["tokens"])
def few_tokens(
    out, x, token_scales,
    codes_0, codes_1, codes_2, scales_0, scales_1, scales_2, offsets_0, offsets_1, offsets_2,
    factor_0, factor_1, factor_2, bias_0, bias_1, bias_2, rows_0, rows_1, rows_2,
    tokens, blocks, x_stride, out_stride,
    COUNT: tl.constexpr, GROUP_BLOCKS: tl.constexpr, E2M1: tl.constexpr, OFFSETS: tl.constexpr,
    UNIT: tl.constexpr, WARPS: tl.constexpr, DEPTH: tl.constexpr, BLOCKS: tl.constexpr,
    PAIRS: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x [tokens, in] times up to three weights, side by side."""
    next_may_begin(DEPENDENT)
    GATED: tl.constexpr = ACTIVATION != ""
    HEIGHT: tl.constexpr = PAIRS // 2 if GATED else PAIRS
    tile, column, which = _place(tl.program_id(0), rows_0, rows_1, COUNT, HEIGHT)
    rows = _pick(which, rows_0, rows_1, rows_2, COUNT)
    first_token = tl.program_id(1) * TOKENS
    total = _sum_of_blocks(
        x + first_token.to(tl.int64) * x_stride,
        _pick(which, codes_0, codes_1, codes_2, COUNT),
        _pick(which, scales_0, scales_1, scales_2, COUNT),
        _pick(which, offsets_0, offsets_1, offsets_2, COUNT),
        codes_1, scales_1, offsets_1, tile * (2 * HEIGHT), tl.cdiv(rows, 16),
        tokens - first_token, blocks, x_stride, GROUP_BLOCKS, E2M1, OFFSETS, WARPS * DEPTH,
        BLOCKS, PAIRS, SPLIT, TOKENS, EVEN, GATED, DEPENDENT,
    )  # fmt: skip
    total = _over_groups(total, PAIRS, SPLIT, TOKENS) * UNIT
    m = tl.arange(0, 32 * HEIGHT)  # in the order of `weight_operand`
    row = tile * (32 * HEIGHT) + m // 32 * 32 + m // 4 % 2 * 16 + m % 4 * 4 + m // 8 % 4
    token = first_token + tl.arange(0, TOKENS)
    inside = row < rows
    if token_scales is not None:
        total *= tl.load(token_scales + token, mask=token < tokens, other=0.0)[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, 32, TOKENS)), (1, 2, 0)))
        if factor_0 is not None:
            gate *= tl.load(factor_0)
            up *= tl.load(factor_1)
        gate = rounded(_with_bias(gate, bias_0, row, inside), kind)
        up = rounded(_with_bias(up, bias_1, row, inside), kind)
        total = rounded(activated(gate, ACTIVATION), kind) * up
    else:
        if factor_0 is not None:
            total *= tl.load(_pick(which, factor_0, factor_1, factor_2, COUNT))
        # A bias may be missing where another weight has one.
        total = _with_bias(total, bias_0, row, (which == 0) & inside)
        total = _with_bias(total, bias_1, row, (which == 1) & inside)
        total = _with_bias(total, bias_2, row, (which == 2) & inside)
    at = out + token.to(tl.int64)[None, :] * out_stride + (column + row)[:, None]
    mask = inside[:, None] & (token < tokens)[None, :]
    if ADD:
        total = rounded(total, kind) + tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(kind), mask=mask)


@triton.jit
def _place(tile, rows_0, rows_1, COUNT: tl.constexpr, HEIGHT: tl.constexpr):
    """Which weight a program works on, which of its tiles, and where its result begins."""
    column, which = 0, 0
    if COUNT > 1:
        tiles = tl.cdiv(rows_0, 32 * HEIGHT)
        if tile >= tiles:
            tile, column, which = tile - tiles, rows_0, 1
    if COUNT > 2:
        tiles = tl.cdiv(rows_1, 32 * HEIGHT)
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
    x, codes, scales, offsets, more_codes, more_scales, more_offsets,
    first_panel, panels, tokens, blocks, x_stride,
    GROUP_BLOCKS: tl.constexpr, E2M1: tl.constexpr, OFFSETS: tl.constexpr, DOTS: tl.constexpr,
    BLOCKS: tl.constexpr, PAIRS: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """f32 [DOTS, 32 PAIRS, SPLIT * TOKENS]: scaled products, in units of `code_unit`."""
    STEP: tl.constexpr = DOTS * BLOCKS
    COLUMNS: tl.constexpr = SPLIT * TOKENS
    KIND: tl.constexpr = x.dtype.element_ty
    TWO: tl.constexpr = TOKENS == 1 or (SPLIT == 2 and COLUMNS > 8)
    code_at, block = code_addresses(
        codes, more_codes, first_panel, panels, blocks, DOTS, BLOCKS, PAIRS, GATED
    )
    x_at, x_block, known = x_addresses(
        x, x_stride, tokens, GROUP_BLOCKS, DOTS, BLOCKS, SPLIT, TOKENS
    )
    factors = None
    if KIND != tl.int8:  # noqa: SIM300
        factors = x_factors(KIND, E2M1, GROUP_BLOCKS, DOTS, BLOCKS, SPLIT, TOKENS)
    now = load_codes(code_at, block, 0, blocks, EVEN)
    one, two = _scales(
        scales, more_scales, first_panel, panels, 0, blocks,
        TWO, GROUP_BLOCKS, DOTS, BLOCKS, PAIRS, SPLIT, TOKENS, GATED,
    )  # fmt: skip
    inputs_are_there(DEPENDENT)
    values = load_x(x_at, x_block, known, 0, blocks, EVEN)
    total = tl.zeros((DOTS, 32 * PAIRS, COLUMNS), tl.float32)
    for start in tl.range(0, blocks, STEP, num_stages=1):
        # What lies behind the last block is some code, too, and is multiplied with zeros.
        following = start + STEP
        next_codes = load_codes(code_at, block, following, blocks, EVEN)
        next_one, next_two = _scales(
            scales, more_scales, first_panel, panels, following, blocks,
            TWO, GROUP_BLOCKS, DOTS, BLOCKS, PAIRS, SPLIT, TOKENS, GATED,
        )  # fmt: skip
        next_values = load_x(x_at, x_block, known, following, blocks, EVEN)
        inputs = x_operand(values, factors, KIND, GROUP_BLOCKS, DOTS, BLOCKS, SPLIT, TOKENS)
        weights = weight_operand(now, E2M1, KIND, DOTS, BLOCKS, PAIRS)
        added = total
        if OFFSETS != NO_OFFSETS:
            one_offset, two_offset = _scales(
                offsets, more_offsets, first_panel, panels, start, blocks,
                TWO, GROUP_BLOCKS, DOTS, BLOCKS, PAIRS, SPLIT, TOKENS, GATED,
            )  # fmt: skip
            added = numbers_of_groups(one_offset, two_offset, DOTS, PAIRS, SPLIT, TOKENS)
        product, missing, total = _products(
            now, weights, inputs, added, total, KIND, E2M1, OFFSETS, DOTS, BLOCKS, PAIRS, COLUMNS
        )
        scale = scale_numbers(numbers_of_groups(one, two, DOTS, PAIRS, SPLIT, TOKENS))
        total += product.to(tl.float32) * scale
        if KIND == tl.bfloat16 and not E2M1 and OFFSETS == NO_OFFSETS:  # noqa: SIM300
            # On its own: as one chain of the tensor cores both would take twice as long.
            total += missing * scale
        now, one, two, values = next_codes, next_one, next_two, next_values
    return total


@triton.jit
def _over_groups(total, PAIRS: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr):
    """Sums of all dots and of the groups in them: [32 PAIRS, TOKENS]."""
    if SPLIT > 1:
        total = tl.sum(tl.reshape(total, (total.shape[0], 32 * PAIRS, SPLIT, TOKENS)), 2)
    return tl.sum(total, 0)


@triton.jit
def _scales(
    numbers, more_numbers, first_panel, panels, start, blocks, TWO: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr, DOTS: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr,
    SPLIT: tl.constexpr, TOKENS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    one = load_groups(
        numbers, more_numbers, first_panel, panels, start, blocks, False,
        GROUP_BLOCKS, DOTS, BLOCKS, PAIRS, SPLIT, TOKENS, GATED,
    )  # fmt: skip
    two = one
    if TWO:
        two = load_groups(
            numbers, more_numbers, first_panel, panels, start, blocks, True,
            GROUP_BLOCKS, DOTS, BLOCKS, PAIRS, SPLIT, TOKENS, GATED,
        )  # fmt: skip
    return one, two


@triton.jit
def _products(
    codes, weights, inputs, added, total,
    KIND: tl.constexpr, E2M1: tl.constexpr, OFFSETS: tl.constexpr,
    DOTS: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Products of a step less their zeros, what they still miss, and the total with minima."""
    SUM: tl.constexpr = tl.int32 if KIND == tl.int8 else tl.float32  # noqa: SIM300
    RAISED: tl.constexpr = KIND == tl.bfloat16 and not E2M1  # noqa: SIM300 - codes not less 8
    product = tl.dot(weights, inputs, out_dtype=SUM)
    missing = product
    if RAISED and OFFSETS == NO_OFFSETS:
        missing = sums_of_x(codes, inputs, KIND, E2M1, DOTS, BLOCKS, PAIRS, COLUMNS)
    if OFFSETS != NO_OFFSETS:
        # By the tensor cores, too, so that they lie where they are wanted.
        sums = sums_of_x(codes, inputs, KIND, E2M1, DOTS, BLOCKS, PAIRS, COLUMNS)
        if RAISED:
            sums *= -0.125
        elif KIND == tl.int8:  # noqa: SIM300
            sums *= 16
        BIAS: tl.constexpr = 0 if RAISED else 8
        if OFFSETS == ZEROS:
            product += (BIAS - added.to(SUM)) * sums
        else:
            product += BIAS * sums
            total += added.to(tl.float32) * sums.to(tl.float32)
    return product, missing, total

"""Operands of tensor cores, made of 4-bit weights in panels and of few tokens.

Of the 16 bytes at (panel, block, j, 4 q) a thread makes the numbers that lane (4 (panel % 2) + q,
j) of a warp has to hold, for four rows.  What is loaded is listed in the order [.., lane, number],
so that threads load what they compute on and nothing moves between them.
"""

import triton
import triton.language as tl

from hmt.kernels.triton.gemm.unpack import ASSEMBLER, BF16_X_SCALE, WIDE, int8_codes
from hmt.kernels.triton.gemm.unpack_words import minus_eights, times, word_codes, word_pieces


@triton.jit
def code_addresses(
    codes, more_codes, first_panel, panels, blocks,
    DOTS: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Addresses [units] of 16 bytes of the first step's codes, and the block of each.

    Units are [PAIRS, BLOCKS, DOTS, panel of 2, q of 4, j of 4].
    """
    at = tl.arange(0, PAIRS * BLOCKS * DOTS * 32)
    block = at // 32 % DOTS * BLOCKS + at // (32 * DOTS) % BLOCKS
    pair = at // (32 * DOTS * BLOCKS)
    panel = _panel(first_panel, panels, pair, at // 16 % 2, GATED)
    place = panel * (blocks * 256) + block * 256 + at % 4 * 64 + at // 4 % 4 * 16
    if GATED:
        place += pair % 2 * _distance(codes, more_codes)
    return codes + place, block


@triton.jit
def _panel(first_panel, panels, pair, of_two, GATED: tl.constexpr):
    """The panel of a pair, int64; those that are not there are the last one."""
    panel = first_panel + (pair // 2 if GATED else pair) * 2 + of_two
    return tl.minimum(panel, panels - 1).to(tl.int64)


@triton.jit
def _distance(first, second):
    """From one tensor to another, in numbers."""
    SIZE: tl.constexpr = first.dtype.element_ty.primitive_bitwidth // 8
    # Said twice: what is known of a quotient by 1 is forgotten with the quotient.
    distance = tl.multiple_of(second.to(tl.int64) - first.to(tl.int64), 16)
    return tl.multiple_of(distance // SIZE, 16 // SIZE)


@triton.jit
def load_codes(at, block, start, blocks, EVEN: tl.constexpr):
    """Codes of a step, words [units, 4]; any behind the last."""
    words = tl.multiple_of((at + start * 256).to(tl.pointer_type(tl.int32)), 16)
    last = tl.zeros_like(block) if EVEN else block
    place = words[:, None] + tl.arange(0, 4)[None, :]
    return tl.load(place, mask=(last + start < blocks)[:, None])


@triton.jit
def x_addresses(
    x, x_stride, tokens,
    GROUP_BLOCKS: tl.constexpr, DOTS: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Addresses [units] of four inputs of the first step, the block of each, and if it is wanted.

    Units are [columns / 8, blocks, halves, DOTS, column of 8, j of 4].  A column has inputs of its
    group only, where there is more than one group in a dot: one block, and one half of it where
    groups are of 16 inputs.  Others are zeros: of int8 as loaded, else made by `x_factors`.
    """
    OWN: tl.constexpr = SPLIT > 1 and x.dtype.element_ty != tl.int8
    HALVES: tl.constexpr = 1 if OWN and GROUP_BLOCKS == 0 else 2
    DEEP: tl.constexpr = 1 if OWN else BLOCKS
    at = tl.arange(0, SPLIT * TOKENS * DOTS * DEEP * HALVES * 4)
    column = at // (32 * DOTS * HALVES * DEEP) * 8 + at // 4 % 8
    half, in_dot = at // (32 * DOTS) % HALVES, at // (32 * DOTS * HALVES) % DEEP
    token = column % TOKENS
    known = token < tokens
    if OWN:
        group = column // TOKENS
        if GROUP_BLOCKS == 0:
            half, in_dot = group % 2, group // 2
        else:
            in_dot = group
    elif SPLIT > 1:
        known &= column // TOKENS == (in_dot * 2 + half if GROUP_BLOCKS == 0 else in_dot)
    block = at // 32 % DOTS * BLOCKS + in_dot
    place = token.to(tl.int64) * x_stride + block * 32 + half * 16 + at % 4 * 4
    return x + place, block, known


@triton.jit
def load_x(at, block, known, start, blocks, EVEN: tl.constexpr):
    """Four inputs of each unit of a step: [units, 4], or words [units, 1] of int8."""
    last = tl.zeros_like(block) if EVEN else block
    mask = known & (last + start < blocks)
    here = at + start * 32
    if at.dtype.element_ty == tl.int8:
        place = tl.multiple_of(here.to(tl.pointer_type(tl.int32)), 4)[:, None]
    else:
        place = here[:, None] + tl.arange(0, 4)[None, :]
    return tl.load(place, mask=mask[:, None], other=0)


@triton.jit
def x_factors(
    KIND: tl.constexpr, E2M1: tl.constexpr, GROUP_BLOCKS: tl.constexpr, DOTS: tl.constexpr,
    BLOCKS: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What x is multiplied with: 0 in columns of other groups, and what `word_codes` asks for."""
    EIGHTS: tl.constexpr = SPLIT * TOKENS // 8
    at = tl.arange(0, EIGHTS * BLOCKS * 2 * DOTS * 32)
    column = at // (64 * DOTS * BLOCKS) * 8 + at // 4 % 8
    half, in_dot = at // (32 * DOTS) % 2, at // (64 * DOTS) % BLOCKS
    group = in_dot * 2 + half if GROUP_BLOCKS == 0 else in_dot
    if KIND == tl.bfloat16 and not E2M1:  # noqa: SIM300
        factor = tl.where(half == 0, BF16_X_SCALE, BF16_X_SCALE / 16).to(KIND)
    elif KIND == tl.bfloat16:  # noqa: SIM300
        factor = tl.full(at.shape, BF16_X_SCALE, KIND)
    else:
        factor = tl.full(at.shape, 1, KIND)
    if SPLIT > 1:
        factor = tl.where(column // TOKENS == group, factor, 0)
    factor = tl.reshape(factor.to(KIND), (EIGHTS, BLOCKS, 2, DOTS, 8, 4, 1))
    return tl.broadcast_to(factor, (EIGHTS, BLOCKS, 2, DOTS, 8, 4, 2))


@triton.jit
def x_operand(
    values, factors, KIND: tl.constexpr, GROUP_BLOCKS: tl.constexpr,
    DOTS: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Activations as an operand [DOTS, 32 BLOCKS, columns], its rows as columns of the weights'."""
    EIGHTS: tl.constexpr = SPLIT * TOKENS // 8
    OWN: tl.constexpr = SPLIT > 1 and KIND != tl.int8  # noqa: SIM300
    HALVES: tl.constexpr = 1 if OWN and GROUP_BLOCKS == 0 else 2
    if KIND == tl.int8:  # noqa: SIM300
        values = word_pieces(values).to(tl.int8)
        values = tl.reshape(values, (EIGHTS, BLOCKS, 2, DOTS, 8, 4, 4))
        values = tl.permute(values, (3, 1, 5, 2, 6, 0, 4) if WIDE else (3, 1, 2, 5, 6, 0, 4))
    else:
        # Apart, so that what becomes neighbours in a register are before they are multiplied.
        values = tl.reshape(values, (EIGHTS, 1 if OWN else BLOCKS, HALVES, DOTS, 8, 4, 2, 2))
        even, odd = tl.split(values)
        if OWN or KIND == tl.bfloat16:  # noqa: SIM300
            even = times(tl.broadcast_to(even, factors.shape), factors, KIND)
            odd = times(tl.broadcast_to(odd, factors.shape), factors, KIND)
        values = tl.join(even, odd)
        values = tl.permute(values, (3, 1, 2, 5, 7, 6, 0, 4) if WIDE else (3, 1, 2, 7, 5, 6, 0, 4))
    return tl.reshape(values, (DOTS, 32 * BLOCKS, SPLIT * TOKENS))


@triton.jit
def weight_operand(
    codes, E2M1: tl.constexpr, KIND: tl.constexpr,
    DOTS: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Codes of a step as an operand [DOTS, 32 PAIRS, 32 BLOCKS].

    Rows come in the order (pair, row of four, panel, q).  Columns come in the order in which a
    thread's numbers lie in its registers, see `WIDE`: (block, j, half, i) or (block, half, j, i)
    of int8; else (block, half, j, odd i, i >= 2) or (block, half, odd i, j, i >= 2).
    """
    if KIND == tl.int8:  # noqa: SIM300
        low, high = int8_codes(word_pieces(codes).to(tl.uint8), E2M1)
        both = tl.reshape(tl.join(low, high), (PAIRS, BLOCKS, DOTS, 2, 4, 4, 4, 4, 2))
        # pair, block, dot, panel, q, j, row, i, half
        both = tl.permute(
            both, (2, 0, 6, 3, 4, 1, 5, 8, 7) if WIDE else (2, 0, 6, 3, 4, 1, 8, 5, 7)
        )
    else:
        numbers = word_codes(codes, E2M1, KIND == tl.bfloat16)  # noqa: SIM300
        both = _joined(numbers, DOTS, BLOCKS, PAIRS, 4)
    return tl.reshape(both, (DOTS, 32 * PAIRS, 32 * BLOCKS))


@triton.jit
def _joined(numbers, DOTS, BLOCKS, PAIRS, ROWS: tl.constexpr):
    """Of `word_codes`, of words [units, ROWS]: as dimensions of an operand."""
    l0, l2, l1, l3, h0, h2, h1, h3 = numbers
    low = tl.join(tl.join(l0, l2), tl.join(l1, l3))  # [.., i >= 2, odd i]
    high = tl.join(tl.join(h0, h2), tl.join(h1, h3))
    both = tl.reshape(tl.join(low, high), (PAIRS, BLOCKS, DOTS, 2, 4, 4, ROWS, 2, 2, 2))
    # pair, block, dot, panel, q, j, row, i >= 2, odd i, half
    return tl.permute(
        both, (2, 0, 6, 3, 4, 1, 9, 5, 8, 7) if WIDE else (2, 0, 6, 3, 4, 1, 9, 8, 5, 7)
    )


@triton.jit
def sums_of_x(
    codes, values, KIND: tl.constexpr, E2M1: tl.constexpr,
    DOTS: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of an operand's columns, as products have them: [DOTS, 32 PAIRS, COLUMNS].

    Of codes that are not less 8 already (int4 in bf16), times -8: what is missing.
    """
    if KIND == tl.bfloat16 and not E2M1 and ASSEMBLER:  # noqa: SIM300
        # Made of words, so that they are made where the tensor cores want them.
        words = codes
        for _ in tl.static_range(2 if PAIRS == 4 else PAIRS - 1):
            words = tl.reshape(words, (2, words.shape[0] // 2, 4))
            words, _unused = tl.split(tl.permute(words, (1, 2, 0)))
        words, _unused = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
        ones = _joined(minus_eights(words), DOTS, BLOCKS, 1, 2)
        ones = tl.reshape(ones, (DOTS, 16, 32 * BLOCKS))
    else:
        ones = tl.full((DOTS, 16, 32 * BLOCKS), 1, KIND)
    SUM: tl.constexpr = tl.int32 if KIND == tl.int8 else tl.float32  # noqa: SIM300
    sums = tl.reshape(tl.dot(ones, values, out_dtype=SUM), (DOTS, 1, 16, COLUMNS))
    sums = tl.broadcast_to(sums, (DOTS, 2 * PAIRS, 16, COLUMNS))
    return tl.reshape(sums, (DOTS, 32 * PAIRS, COLUMNS))


@triton.jit
def load_groups(
    numbers, more_numbers, first_panel, panels, start, blocks, SECOND: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr, DOTS: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr,
    SPLIT: tl.constexpr, TOKENS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Numbers of groups of four rows: [units, 4], units [PAIRS, DOTS, panel of 2, q of 4, t of 4].

    A thread of the tensor cores' result has columns 2 t and 2 t + 1: where they are of two groups,
    those of the SECOND are loaded by a call of their own.
    """
    at = tl.arange(0, PAIRS * DOTS * 32)
    pair, quad, thread = at // (32 * DOTS), at // 4 % 4, at % 4
    panel = _panel(first_panel, panels, pair, at // 16 % 2, GATED)
    block = start + at // 32 % DOTS * BLOCKS
    if GROUP_BLOCKS == 0:
        groups, group = blocks * 2, block * 2
    else:
        groups, group = blocks // GROUP_BLOCKS, block // GROUP_BLOCKS
    if TOKENS == 1:
        group += 2 * thread + (1 if SECOND else 0)
    elif SECOND:
        group += 1
    elif SPLIT > 1 and SPLIT * TOKENS == 8:
        group += 2 * thread // TOKENS
    place = panel * (groups * 16) + quad * 4 + group * 16
    if GATED:
        place += pair % 2 * _distance(numbers, more_numbers)
    at = (numbers + place)[:, None] + tl.arange(0, 4)[None, :]
    return tl.load(at, mask=(group < groups)[:, None], other=0.0)


@triton.jit
def numbers_of_groups(
    one, two, DOTS: tl.constexpr, PAIRS: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr
):
    """What `load_groups` found, for each element of a product: [DOTS, 32 PAIRS, columns]."""
    COLUMNS: tl.constexpr = SPLIT * TOKENS
    EIGHTS: tl.constexpr = COLUMNS // 8
    if TOKENS == 1 or (EIGHTS > 1 and SPLIT == 2):
        both = tl.reshape(tl.join(one, two), (PAIRS, DOTS, 2, 4, 4, 4, 2))
        if TOKENS == 1:  # pair, dot, panel, q, t, row, which
            found = tl.permute(both, (1, 0, 5, 2, 3, 4, 6))
        else:
            found = tl.permute(both, (1, 0, 5, 2, 3, 6, 4))
            found = tl.reshape(found, (DOTS, 32 * PAIRS, 2, 1, 4, 1))
            found = tl.broadcast_to(found, (DOTS, 32 * PAIRS, 2, EIGHTS // 2, 4, 2))
    else:
        found = tl.permute(tl.reshape(one, (PAIRS, DOTS, 2, 4, 4, 4)), (1, 0, 5, 2, 3, 4))
        found = tl.reshape(found, (DOTS, 32 * PAIRS, 1, 4, 1))
        found = tl.broadcast_to(found, (DOTS, 32 * PAIRS, EIGHTS, 4, 2))
    return tl.reshape(found, (DOTS, 32 * PAIRS, COLUMNS))

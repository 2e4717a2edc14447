"""Products of few tokens with 8-bit weights in rows: every byte of the weights is read once.

As in `few.py`, a thread loads the numbers that its lane of a warp holds for the tensor cores: 16
bytes of a row, or 8 where groups are no longer than 32 inputs.
"""

import triton
import triton.language as tl

from hmt.kernels.triton.gemm.unpack import BF16_X_SCALE, WIDE, byte_numbers
from hmt.kernels.triton.gemm.unpack_words import minus_128s, times, word_bytes
from hmt.kernels.triton.pdl import ask_cache_for_rows, inputs_are_there, next_may_begin

# Scales are f32 [out / TILE_ROWS, in / GROUP]; GROUP 0 stands for one scale per row.  Others:
#
# CHUNK_ROWS  0; or rows of each of several weights (the last may have fewer), whose addresses are
#             in `codes`, int64, those of scales in `scales`; GROUP is 0 and codes are int8 then
# WORDS       int8 codes are loaded as words, a step ahead, and brought to bf16 by their bits
# DEPTH       dots that a warp takes at once
# CHUNKS      inputs of a dot, over 32: 1 or 2; GROUP is a multiple
# EIGHTS      rows of a program, over 8
# TOKENS      tokens of a program: 8, 16 or 32
# AHEAD       steps that the cache is asked for before they are loaded
# EVEN        columns are a multiple of 32 * WARPS * DEPTH * CHUNKS


# One variant for all numbers of tokens: a second, for multiples of 16, took 0.3 to 3 s to compile.
@triton.jit(do_not_specialize=["tokens"])
def few_tokens_rows(
    out,
    x,
    token_scales,
    codes,
    scales,
    bias,
    rows,
    columns,
    tokens,
    x_stride,
    out_stride,
    scale_columns,
    CHUNK_ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    EIGHTS: tl.constexpr,
    TOKENS: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x [tokens, in] times codes [out, in], int8 or e4m3."""
    next_may_begin(DEPENDENT)
    first_row = tl.program_id(0) * (8 * EIGHTS)
    first_token = tl.program_id(1) * TOKENS
    row = first_row + tl.arange(0, 8 * EIGHTS)
    inside = row < rows
    if CHUNK_ROWS > 0:
        which = first_row // CHUNK_ROWS
        code_rows, scale_rows = _addresses(codes, scales, which)
        before = which * CHUNK_ROWS
    else:
        code_rows, scale_rows, before = codes, scales, 0
    total = _sum_of_steps(
        x, code_rows, scale_rows, first_row - before, rows - before, columns, first_token, tokens,
        x_stride, scale_columns, WORDS, TILE_ROWS, GROUP, WARPS * DEPTH, CHUNKS, EIGHTS,
        TOKENS, AHEAD, EVEN, DEPENDENT,
    )  # fmt: skip
    result = tl.sum(total, 0).to(tl.float32)
    token = first_token + tl.arange(0, TOKENS)
    if WORDS:
        result *= 2.0**69
    if GROUP == 0:
        result *= tl.load(scale_rows + (row - before), mask=inside, other=0.0)[:, None]
    if token_scales is not None:
        result *= tl.load(token_scales + token, mask=token < tokens, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    out_at = out + token.to(tl.int64)[None, :] * out_stride + row[:, None]
    mask = inside[:, None] & (token < tokens)[None, :]
    if ADD:
        result = result.to(out.dtype.element_ty).to(tl.float32)
        result += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _addresses(codes, scales, which):
    """Pointers to one of several weights, from tensors of addresses."""
    its_codes = tl.load(codes + which).to(tl.pointer_type(tl.int8))
    its_scales = tl.load(scales + which).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(its_codes, 16), tl.multiple_of(its_scales, 16)


@triton.jit
def _sum_of_steps(
    x, codes, scales, first_row, rows, columns, first_token, tokens, x_stride, scale_columns,
    WORDS: tl.constexpr, TILE_ROWS: tl.constexpr, GROUP: tl.constexpr, DOTS: tl.constexpr,
    CHUNKS: tl.constexpr, EIGHTS: tl.constexpr, TOKENS: tl.constexpr, AHEAD: tl.constexpr,
    EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Products [DOTS, 8 EIGHTS, TOKENS], times their scales where these are of groups."""
    KIND: tl.constexpr = x.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if KIND == tl.int8 else tl.float32  # noqa: SIM300
    STEP: tl.constexpr = DOTS * 32 * CHUNKS
    SIZE: tl.constexpr = codes.dtype.element_ty.primitive_bitwidth // 8
    first = codes + first_row.to(tl.int64) * columns
    count = tl.minimum(8 * EIGHTS, rows - first_row)
    if AHEAD > 0:
        size = tl.minimum(AHEAD * STEP, columns) * SIZE
        ask_cache_for_rows(first, columns * SIZE, count, size, DEPENDENT)
    # Lanes first: [EIGHTS, DOTS, row of 8, part of 4], each with 8 * CHUNKS inputs.
    at = tl.arange(0, EIGHTS * DOTS * 32)
    row = first_row + at // (32 * DOTS) * 8 + at // 4 % 8
    row = tl.minimum(row, rows - 1)
    begin = (at // 32 % DOTS) * (32 * CHUNKS) + at % 4 * (8 * CHUNKS)
    code_at = codes + row.to(tl.int64) * columns + begin
    scale_at = scales + (row // TILE_ROWS).to(tl.int64) * scale_columns
    # [TOKENS / 8, CHUNKS, DOTS, token of 8, part of 4], each with 8 inputs.
    xs = tl.arange(0, TOKENS * 4 * CHUNKS * DOTS)
    token = first_token + xs // (32 * DOTS * CHUNKS) * 8 + xs // 4 % 8
    x_begin = xs // 32 % DOTS * (32 * CHUNKS) + xs % 4 * (8 * CHUNKS)
    x_begin += xs // (32 * DOTS) % CHUNKS * 8
    x_at = x + token.to(tl.int64) * x_stride + x_begin
    known = token < tokens
    if WORDS:
        now = _load_codes(code_at, begin, 0, columns, CHUNKS, True, EVEN)
    inputs_are_there(DEPENDENT)
    total = tl.zeros((DOTS, 8 * EIGHTS, TOKENS), SUM if GROUP == 0 else tl.float32)
    for start in tl.range(0, columns, STEP, num_stages=1):
        if WORDS:
            following = _load_codes(code_at, begin, start + STEP, columns, CHUNKS, True, EVEN)
        else:
            now = _load_codes(code_at, begin, start, columns, CHUNKS, False, EVEN)
        values = _load_x(x_at, x_begin, known, start, columns, EVEN)
        inputs = _x_operand(values, KIND, WORDS, DOTS, CHUNKS, TOKENS)
        weights = _weight_operand(now, KIND, WORDS, DOTS, CHUNKS, EIGHTS)
        product = tl.dot(weights, inputs, out_dtype=SUM)
        if WORDS:
            product += _sums_of_x(now, inputs, DOTS, CHUNKS, EIGHTS, TOKENS)
            now = following
        if GROUP == 0:
            total += product
        else:
            group = start + at // 32 % DOTS * (32 * CHUNKS)
            scale = tl.load(scale_at + group // GROUP, mask=group < columns, other=0.0)
            total += product.to(tl.float32) * _over_tokens(scale, EIGHTS, DOTS, TOKENS)
    return total


@triton.jit
def _load_codes(
    at, begin, start, columns, CHUNKS: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr
):
    """Codes of a step: [units, 8 CHUNKS], or as words [units, 2 CHUNKS]; zeros behind the last."""
    here = at + start
    if WORDS:
        words = here.to(tl.pointer_type(tl.int32))
        if EVEN:  # rows of other weights begin at any byte
            words = tl.multiple_of(words, 8 * CHUNKS)
        inner = tl.arange(0, 2 * CHUNKS)[None, :]
        place, column = words[:, None] + inner, (begin + start)[:, None] + inner * 4
    else:
        inner = tl.arange(0, 8 * CHUNKS)[None, :]
        place, column = here[:, None] + inner, (begin + start)[:, None] + inner
    if EVEN and WORDS:  # of a step ahead
        codes = tl.load(place, mask=tl.zeros_like(column) + start < columns, other=0.0)
    elif EVEN:
        codes = tl.load(place)
    else:
        codes = tl.load(place, mask=column < columns, other=0.0)
    return codes


@triton.jit
def _load_x(at, begin, known, start, columns, EVEN: tl.constexpr):
    inner = tl.arange(0, 8)[None, :]
    mask = known[:, None]
    if not EVEN:
        mask &= (begin + start)[:, None] + inner < columns
    return tl.load((at + start)[:, None] + inner, mask=mask, other=0.0)


@triton.jit
def _weight_operand(
    codes, KIND: tl.constexpr, WORDS: tl.constexpr,
    DOTS: tl.constexpr, CHUNKS: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """Codes as an operand [DOTS, rows, inputs].

    Inputs come in the order (chunk, half of eight, part, i): so Triton multiplies loaded bytes.
    """
    if WORDS:
        weights = _joined(word_bytes(codes), DOTS, CHUNKS, EIGHTS)
    else:
        weights = byte_numbers(codes, KIND)
        weights = tl.reshape(weights, (EIGHTS, DOTS, 8, 4, CHUNKS, 2, 4))
        weights = tl.permute(weights, (1, 0, 2, 4, 5, 3, 6))
    return tl.reshape(weights, (DOTS, 8 * EIGHTS, 32 * CHUNKS))


@triton.jit
def _joined(numbers, DOTS: tl.constexpr, CHUNKS: tl.constexpr, EIGHTS: tl.constexpr):
    """Numbers of bytes 0 to 3 of words as dimensions of an operand."""
    zero, one, two, three = numbers
    both = tl.join(tl.join(zero, one), tl.join(two, three))  # [.., odd, i >= 2]
    both = tl.reshape(both, (EIGHTS, DOTS, 8, 4, CHUNKS, 2, 2, 2))
    return tl.permute(both, (1, 0, 2, 4, 5, 3, 7, 6) if WIDE else (1, 0, 2, 4, 5, 7, 3, 6))


@triton.jit
def _x_operand(
    values, KIND: tl.constexpr, WORDS: tl.constexpr,
    DOTS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Activations as an operand [DOTS, inputs, tokens]."""
    if WORDS:
        values = times(values, tl.full(values.shape, BF16_X_SCALE, KIND), KIND)
    if WORDS and not WIDE:
        values = tl.reshape(values, (TOKENS // 8, CHUNKS, DOTS, 8, 4, 2, 2, 2))
        values = tl.permute(values, (2, 1, 5, 6, 4, 7, 0, 3))
    else:
        values = tl.reshape(values, (TOKENS // 8, CHUNKS, DOTS, 8, 4, 2, 4))
        values = tl.permute(values, (2, 1, 5, 4, 6, 0, 3))
    return tl.reshape(values, (DOTS, 32 * CHUNKS, TOKENS))


@triton.jit
def _sums_of_x(
    codes, values,
    DOTS: tl.constexpr, CHUNKS: tl.constexpr, EIGHTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """-128 times sums of an operand's columns: [DOTS, 8 EIGHTS, TOKENS]."""
    words = codes  # of 16 rows
    HALVINGS: tl.constexpr = EIGHTS // 4
    for _ in tl.static_range(HALVINGS):
        words = tl.reshape(words, (2, words.shape[0] // 2, 2 * CHUNKS))
        words, _unused = tl.split(tl.permute(words, (1, 2, 0)))
    numbers = _joined(minus_128s(words), DOTS, CHUNKS, 2)
    numbers = tl.reshape(numbers, (DOTS, 16, 32 * CHUNKS))
    sums = tl.reshape(tl.dot(numbers, values), (DOTS, 1, 16, TOKENS))
    sums = tl.broadcast_to(sums, (DOTS, EIGHTS // 2, 16, TOKENS))
    return tl.reshape(sums, (DOTS, 8 * EIGHTS, TOKENS))


@triton.jit
def _over_tokens(scale, EIGHTS: tl.constexpr, DOTS: tl.constexpr, TOKENS: tl.constexpr):
    """Scales of rows, one for each thread, for all tokens: [DOTS, rows, TOKENS]."""
    scale = tl.permute(tl.reshape(scale, (EIGHTS, DOTS, 8, 4)), (1, 0, 2, 3))
    scale = tl.reshape(scale, (DOTS, 8 * EIGHTS, 1, 4, 1))
    scale = tl.broadcast_to(scale, (DOTS, 8 * EIGHTS, TOKENS // 8, 4, 2))
    return tl.reshape(scale, (DOTS, 8 * EIGHTS, TOKENS))

"""What attention kernels are made of: tiles of keys and values, and a step of sums over them.

A tile is [tokens, dim], 16 bytes a thread, out of pages of plain rows or out of a plain tensor.  In
loops it comes through asynchronous copies, some tiles ahead of the one that is computed.
"""

import triton
import triton.language as tl

from hmt.kernels.triton.gemm.unpack import ASSEMBLER, byte_numbers, byte_of_words, int8_bf16

F32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
F16 = tl.constexpr(2)
INT8 = tl.constexpr(3)
FP8 = tl.constexpr(5)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def tile_rows(at, held, FIRST: tl.constexpr, DIM: tl.constexpr, COUNT: tl.constexpr,
              MASKED: tl.constexpr):
    """Numbers FIRST .. FIRST + COUNT of rows that begin `at`, zeros beyond DIM."""
    dim = FIRST + tl.arange(0, COUNT)[None, :]
    if FIRST + COUNT <= DIM:
        if MASKED:
            found = tl.load(at[:, None] + dim, held[:, None], 0)
        else:
            found = tl.load(at[:, None] + dim)
    elif MASKED:
        found = tl.load(at[:, None] + dim, held[:, None] & (dim < DIM), 0)
    else:
        found = tl.load(at[:, None] + dim, dim < DIM, 0)
    return found


@triton.jit
def numbers_of(found, ENCODING: tl.constexpr, DTYPE: tl.constexpr):
    """What was found in pages as numbers of DTYPE, before INT8's scales."""
    if ENCODING == FP8:
        numbers = byte_numbers(found.to(tl.float8e4nv, bitcast=True), DTYPE)
    elif ASSEMBLER and ENCODING == INT8 and DTYPE == tl.bfloat16:  # noqa: SIM300
        numbers = int8_bf16(found)
    else:
        numbers = found.to(DTYPE)
    return numbers


@triton.jit
def plane_of(words, PLANE: tl.constexpr, ENCODING: tl.constexpr, DTYPE: tl.constexpr):
    """Byte PLANE of words that were found in pages, as `numbers_of`."""
    if ASSEMBLER:
        numbers = byte_of_words(words, PLANE, ENCODING == FP8)
    elif ENCODING == FP8:
        numbers = numbers_of((words >> (8 * PLANE)).to(tl.uint8), ENCODING, DTYPE)
    else:
        numbers = numbers_of((words >> (8 * PLANE)).to(tl.int8), ENCODING, DTYPE)
    return numbers


@triton.jit
def code_unit(ENCODING: tl.constexpr, DTYPE: tl.constexpr):
    """What `numbers_of` are to be multiplied by."""
    UNIT: tl.constexpr = 64.0 if ASSEMBLER and ENCODING == INT8 and DTYPE == tl.bfloat16 else 1.0  # noqa: SIM300
    return UNIT


@triton.jit
def planes_as_rows(mixed, WORDS: tl.constexpr):
    """Sums of four planes side by side again, as rows."""
    if WORDS:
        zero, one, two, three = mixed
        both = tl.join(tl.join(zero, two), tl.join(one, three))
        rows = tl.reshape(both, (zero.shape[0], 4 * zero.shape[1]))
    else:
        rows = mixed
    return rows


@triton.jit
def bounded(scores, softcap):
    """softcap * tanh(scores / softcap), of any size of scores."""
    power = tl.minimum(scores * (2 * LOG2_E / softcap), 64.0)
    return softcap * (1 - 2 / (tl.exp2(power) + 1))


@triton.jit
def advance(
    sums, query, tile, first, rows, numbers, ENCODING: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, KEY_BACK: tl.constexpr, LATENT: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, WORDS: tl.constexpr,
):
    """One tile more: mixed [rows, dim] and total are sums over exp2(score - top).

    tile     the front of keys, what remains of them, values, and INT8's scales; rows of tokens that
             nobody sees are zeros
    rows     position of each row, and the first and the end of what any of them sees
    MASKED   some row does not see some token
    WORDS    values are words of four bytes, and `mixed` are sums of each byte by itself
    """
    mixed, top, total = sums
    at, lowest, end = rows
    scale, window, softcap = numbers
    query_front, query_back = query
    front, back, value, key_scales, value_scales = tile
    key = numbers_of(front, ENCODING, DTYPE)
    scores = tl.dot(query_front, tl.trans(key), input_precision=PRECISION)
    if KEY_BACK:
        rest = tl.trans(numbers_of(back, ENCODING, DTYPE))
        scores = tl.dot(query_back, rest, scores, input_precision=PRECISION)
    if ENCODING == INT8:
        scores *= (key_scales * code_unit(ENCODING, DTYPE))[None, :]
    unit = scale * LOG2_E  # not negative: the largest score is the largest in any unit
    if SOFTCAP:
        scores = bounded(scores * scale, softcap)
        unit = LOG2_E
    if MASKED:
        position = first + tl.arange(0, TILE)
        held = (position >= lowest) & (position < end)
        seen = held[None, :] & (position[None, :] <= at[:, None])
        if WINDOW:
            seen &= position[None, :] > at[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))

    above = tl.maximum(top, tl.max(scores, 1) * unit)
    finite = tl.where(above == float("-inf"), 0.0, above)  # of rows that have seen nothing
    weights = tl.exp2(scores * unit - finite[:, None])
    fading = tl.exp2(top - finite)
    total = total * fading + tl.sum(weights, 1)
    if ENCODING == INT8:
        weights *= (value_scales * code_unit(ENCODING, DTYPE))[None, :]
    weights = weights.to(DTYPE)
    if WORDS:
        zero, one, two, three = mixed
        zero = tl.dot(weights, plane_of(value, 0, ENCODING, DTYPE), zero * fading[:, None])
        one = tl.dot(weights, plane_of(value, 1, ENCODING, DTYPE), one * fading[:, None])
        two = tl.dot(weights, plane_of(value, 2, ENCODING, DTYPE), two * fading[:, None])
        three = tl.dot(weights, plane_of(value, 3, ENCODING, DTYPE), three * fading[:, None])
        mixed = (zero, one, two, three)
    else:
        mixed = mixed * fading[:, None]
        values = key if LATENT else numbers_of(value, ENCODING, DTYPE)
        mixed = tl.dot(weights, values, mixed, input_precision=PRECISION)
    return mixed, above, total


@triton.jit
def log_of(top, total):
    """log2 of total * 2^top; -inf for nothing."""
    some = tl.where(total == 0, 1.0, total)
    return tl.where(total == 0, float("-inf"), top + tl.log2(some))

"""What attention kernels are made of: tiles of keys and values out of pages, and a step of sums.

Pages are read as words of four bytes, as they lie (`hmt.kernels.reference.pages`): a tile of keys
is [words, tokens], a tile of values [groups of tokens, dim], both with 16 bytes a thread side by
side.  Numbers are taken out of words in registers, on the way to shared memory.
"""

import triton
import triton.language as tl

F32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
F16 = tl.constexpr(2)
INT8 = tl.constexpr(3)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def key_words(
    place, first, FIRST: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Words FIRST .. FIRST + COUNT of keys of tokens first .. first + TILE: [COUNT, TILE]."""
    memory, table, page_stride, offset = place[0], place[1], place[2], place[3]
    token = tl.arange(0, TILE)
    word = FIRST + tl.arange(0, COUNT)
    page = tl.max_constancy(tl.load(table + first // 16 + token // 16), 16)
    at = (page.to(tl.int64) * page_stride)[None, :] + (token % 16)[None, :]
    at += (offset + word * 16)[:, None]
    if FIRST + COUNT <= WORDS:
        return tl.load(memory + at)
    else:
        return tl.load(memory + at, (word < WORDS)[:, None], 0)


@triton.jit
def value_words(
    place, first, DIM: tl.constexpr, PADDED: tl.constexpr, PER_WORD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Words of values of tokens first .. first + TILE: [TILE / PER_WORD, PADDED]."""
    memory, table, page_stride, offset = place[0], place[1], place[2], place[4]
    PER_PAGE: tl.constexpr = 16 // PER_WORD
    row = tl.arange(0, TILE // PER_WORD)
    dim = tl.arange(0, PADDED)
    page = tl.load(table + first // 16 + row // PER_PAGE)
    at = (page.to(tl.int64) * page_stride + offset + (row % PER_PAGE) * DIM)[:, None] + dim[None, :]
    if PADDED == DIM:
        return tl.load(memory + at)
    else:
        return tl.load(memory + at, (dim < DIM)[None, :], 0)


@triton.jit
def token_scales(place, first, offset, TILE: tl.constexpr):
    """f32 scales of tokens first .. first + TILE: [TILE]."""
    memory, table, page_stride = place[0], place[1], place[2]
    token = tl.arange(0, TILE)
    page = tl.max_constancy(tl.load(table + first // 16 + token // 16), 16)
    words = tl.load(memory + page.to(tl.int64) * page_stride + offset + token % 16)
    return words.to(tl.float32, bitcast=True)


@triton.jit
def number(words, PLACE: tl.constexpr, ENCODING: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers at one place of each word, in DTYPE."""
    if ENCODING == F32:
        found = words.to(tl.float32, bitcast=True).to(DTYPE)
    elif ENCODING == BF16:
        if tl.float32 == DTYPE:
            high = (words << 16) if PLACE == 0 else (words & -65536)
            found = high.to(tl.float32, bitcast=True)
        else:
            found = (words >> (16 * PLACE)).to(tl.int16).to(tl.bfloat16, bitcast=True).to(DTYPE)
    elif ENCODING == F16:
        found = (words >> (16 * PLACE)).to(tl.int16).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        found = (words >> (8 * PLACE)).to(tl.int8).to(DTYPE)
    return found


@triton.jit
def unpacked(words, ENCODING: tl.constexpr, DTYPE: tl.constexpr):
    """Words [rows, columns] as numbers [rows * u, columns]: those of a word below one another."""
    ROWS: tl.constexpr = words.shape[0]
    COLUMNS: tl.constexpr = words.shape[1]
    if ENCODING == F32:
        found = number(words, 0, ENCODING, DTYPE)
    elif ENCODING == INT8:
        low = tl.join(number(words, 0, ENCODING, DTYPE), number(words, 1, ENCODING, DTYPE))
        high = tl.join(number(words, 2, ENCODING, DTYPE), number(words, 3, ENCODING, DTYPE))
        found = tl.permute(tl.join(low, high), (0, 3, 2, 1)).reshape(4 * ROWS, COLUMNS)
    else:
        both = tl.join(number(words, 0, ENCODING, DTYPE), number(words, 1, ENCODING, DTYPE))
        found = tl.permute(both, (0, 2, 1)).reshape(2 * ROWS, COLUMNS)
    return found


@triton.jit
def tile_words(
    place, first, ENCODING: tl.constexpr, KEY_WORDS: tl.constexpr, KEY_FRONT: tl.constexpr,
    KEY_BACK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    PER_WORD: tl.constexpr, TILE: tl.constexpr,
):
    """The words of a tile: the front of keys, what remains of them, values, and INT8's scales.

    Numbers of dots come in powers of two: 576 are a front of 512 and 64 that remain.  Where nothing
    remains, or values are the front of keys, that part is some scalar instead.

    place   memory, the run's table, words from page to page, and where in a page keys, values,
            scales of keys and scales of values of one head begin
    """
    front = key_words(place, first, 0, KEY_FRONT, KEY_WORDS, TILE)
    back = first
    if KEY_BACK:
        back = key_words(place, first, KEY_FRONT, KEY_BACK, KEY_WORDS, TILE)
    value = first
    if VALUE_PADDED:
        value = value_words(place, first, VALUE_DIM, VALUE_PADDED, PER_WORD, TILE)
    key_scales = first
    value_scales = first
    if ENCODING == INT8:
        key_scales = token_scales(place, first, place[5], TILE)
        value_scales = token_scales(place, first, place[6], TILE)
    return front, back, value, key_scales, value_scales


@triton.jit
def bounded(scores, softcap):
    """softcap * tanh(scores / softcap), of any size of scores."""
    power = tl.minimum(scores * (2 * LOG2_E / softcap), 64.0)
    return softcap * (1 - 2 / (tl.exp2(power) + 1))


@triton.jit
def advance(
    mixed, top, total, query, words, first, rows, numbers, ENCODING: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, KEY_BACK: tl.constexpr, LATENT: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):
    """One tile more: mixed [rows, dim] and total are sums over exp2(score - top).

    rows     position of each row, and the first and the end of what any of them sees
    MASKED   some row does not see some token, or pages hold fewer than the tile has
    """
    at, lowest, end = rows
    scale, window, softcap = numbers
    query_front, query_back = query
    front, back, value, key_scales, value_scales = words
    position = first + tl.arange(0, TILE)
    held = (position >= lowest) & (position < end)
    key = unpacked(front, ENCODING, DTYPE)  # [key_dim, TILE]
    if MASKED and LATENT:
        key = tl.where(held[None, :], key, tl.zeros_like(key))
    scores = tl.dot(query_front, key, input_precision=PRECISION)
    if KEY_BACK:
        rest = unpacked(back, ENCODING, DTYPE)
        scores = tl.dot(query_back, rest, scores, input_precision=PRECISION)
    if ENCODING == INT8:
        scores *= key_scales[None, :]
    if SOFTCAP:
        scores = bounded(scores * scale, softcap) * LOG2_E
    else:
        scores *= scale * LOG2_E
    if MASKED:
        seen = held[None, :] & (position[None, :] <= at[:, None])
        if WINDOW:
            seen &= position[None, :] > at[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))

    above = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(above == float("-inf"), 0.0, above)  # of rows that have seen nothing
    weights = tl.exp2(scores - finite[:, None])
    fading = tl.exp2(top - finite)
    total = total * fading + tl.sum(weights, 1)
    mixed = mixed * fading[:, None]
    if ENCODING == INT8:
        scales = value_scales
        if MASKED:
            scales = tl.where(held, scales, 0.0)
        weights *= scales[None, :]
    if LATENT:
        values = tl.trans(key)
    else:
        values = unpacked(value, ENCODING, DTYPE)  # [TILE, value_dim]
        if MASKED:
            values = tl.where(held[:, None], values, tl.zeros_like(values))
    mixed = tl.dot(weights.to(DTYPE), values, mixed, input_precision=PRECISION)
    return mixed, above, total


@triton.jit
def log_of(top, total):
    """log2 of total * 2^top; -inf for nothing."""
    some = tl.where(total == 0, 1.0, total)
    return tl.where(total == 0, float("-inf"), top + tl.log2(some))

"""Kernels of attention over pages: sums over a part of the context, and the parts as one.

Flash attention (arXiv 2205.14135) with the context split over programs (flash-decoding).
"""

import triton
import triton.language as tl

from hmt.kernels.triton.tiles import LN_2, LOG2_E, advance, log_of, tile_words


@triton.jit
def first_tile(start, window, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Where the tile begins that holds the first token which a run sees."""
    first = start * 0
    if WINDOW:
        first = tl.maximum(start - window + 1, 0) // TILE * TILE
    return first


@triton.jit
def part_tokens(context, parts, least):
    """Tokens in each part of a context: a multiple of `least`, the same whatever else is there."""
    return tl.maximum((context + parts * least - 1) // (parts * least), 1) * least


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def sweep(
    sums, query, place, rows, numbers, low, high,
    ENCODING: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, LATENT: tl.constexpr,
    KEY_WORDS: tl.constexpr, KEY_FRONT: tl.constexpr, KEY_BACK: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, PER_WORD: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, AHEAD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The sums with the tiles from low to high: (mixed, top, total).

    AHEAD   the words of the next tile are on their way while one is computed
    """
    mixed, top, total = sums
    if AHEAD:
        nearest = tl.minimum(low, rows[2] - 1) // TILE * TILE
        words = tile_words(
            place, nearest, ENCODING, KEY_WORDS, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED,
            PER_WORD, TILE,
        )
        front, back, value, key_scales, value_scales = words
    for first in tl.range(low, high, TILE, num_stages=1):
        if AHEAD:
            now = (front, back, value, key_scales, value_scales)
            after = tl.minimum(first + TILE, high - TILE)
            front, back, value, key_scales, value_scales = tile_words(
                place, after, ENCODING, KEY_WORDS, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED,
                PER_WORD, TILE,
            )
        else:
            now = tile_words(
                place, first, ENCODING, KEY_WORDS, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED,
                PER_WORD, TILE,
            )
        mixed, top, total = advance(
            mixed, top, total, query, now, first, rows, numbers, ENCODING, DTYPE, PRECISION,
            KEY_BACK, LATENT, TILE, WINDOW, SOFTCAP, MASKED,
        )
    return mixed, top, total


@triton.jit
def query_rows(at, real, DIM: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
               DTYPE: tl.constexpr):
    """Numbers FIRST .. FIRST + COUNT of rows of queries that begin `at`, zeros beyond DIM."""
    dim = FIRST + tl.arange(0, COUNT)[None, :]
    return tl.load(at[:, None] + dim, real[:, None] & (dim < DIM), 0.0).to(DTYPE)


@triton.jit
def store_rows(
    sums, out, lse, sinks, result, q_head, real, VALUE_DIM: tl.constexpr, MIXED: tl.constexpr,
    SPLIT: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):
    """Divide sums and write them to rows `result`."""
    mixed, top, total = sums
    if SINKS and not SPLIT:
        sink = tl.load(sinks + q_head) * LOG2_E
        above = tl.maximum(top, sink)
        finite = tl.where(above == float("-inf"), 0.0, above)
        fading = tl.exp2(top - finite)
        mixed *= fading[:, None]
        total = total * fading + tl.exp2(sink - finite)
        top = above
    mixed /= tl.where(total == 0, 1.0, total)[:, None]
    log = log_of(top, total)
    if SPLIT:
        tl.store(lse + result, log, real)
    elif LSE:
        tl.store(lse + result, log * LN_2, real)
    dim = tl.arange(0, MIXED)[None, :]
    at = out + result[:, None] * VALUE_DIM + dim
    tl.store(at, mixed.to(out.dtype.element_ty), real[:, None] & (dim < VALUE_DIM))


@triton.jit
def place_of(
    memory, tables, run, table_width, page_stride, layer_offset, head, HEADS: tl.constexpr,
    KEY_WORDS: tl.constexpr, VALUE_WORDS: tl.constexpr, LATENT: tl.constexpr,
):
    """Where words of one head are, in pages: keys, values, scales of keys, scales of values."""
    keys = layer_offset + head * KEY_WORDS
    values = layer_offset + HEADS * KEY_WORDS + head * VALUE_WORDS
    key_scales = layer_offset + HEADS * (KEY_WORDS + VALUE_WORDS) + head * 16
    value_scales = key_scales
    if not LATENT:
        value_scales += HEADS * 16
    table = tables + run.to(tl.int64) * table_width
    return memory, table, page_stride, keys, values, key_scales, value_scales


@triton.jit
def sums_of(
    query, place, numbers, at, first_at, last_at, begin, size,
    ENCODING: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, LATENT: tl.constexpr,
    KEY_WORDS: tl.constexpr, KEY_FRONT: tl.constexpr, KEY_BACK: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, PER_WORD: tl.constexpr,
    MIXED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, AHEAD: tl.constexpr,
):
    """Sums of rows at positions `at`, from first_at to last_at, over `size` tokens from `begin`."""
    sums = (
        tl.zeros((ROWS, MIXED), tl.float32),
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
    )
    lowest = begin
    if WINDOW:
        lowest = tl.maximum(first_at - numbers[1] + 1, begin)
    end = tl.minimum(last_at + 1, begin + size)
    rows = (at, lowest, end)
    # Every row sees the tiles between `whole` and `ragged`; others are seen in part by some.
    left = lowest // TILE * TILE
    whole = left
    if WINDOW:
        whole = tl.maximum(tl.cdiv(tl.maximum(last_at - numbers[1] + 1, 0), TILE) * TILE, left)
        sums = sweep(
            sums, query, place, rows, numbers, left, tl.minimum(whole, end), ENCODING,
            DTYPE, PRECISION, LATENT, KEY_WORDS, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED,
            PER_WORD, TILE, WINDOW, SOFTCAP, False, True,
        )
    ragged = tl.maximum(tl.minimum(first_at + 1, end) // TILE * TILE, whole)
    sums = sweep(
        sums, query, place, rows, numbers, whole, ragged, ENCODING, DTYPE, PRECISION,
        LATENT, KEY_WORDS, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED, PER_WORD, TILE, WINDOW,
        SOFTCAP, AHEAD, False,
    )
    sums = sweep(
        sums, query, place, rows, numbers, ragged, end, ENCODING, DTYPE, PRECISION, LATENT,
        KEY_WORDS, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED, PER_WORD, TILE, WINDOW, SOFTCAP,
        False, True,
    )
    return sums


# Numbers that change from step to step: a kernel for each kind of them would be compiled.
@triton.jit(do_not_specialize=["tokens", "table_width", "runs", "blocks", "parts", "window"])
def attend_kernel(
    query, out, lse, memory, spans, tables, sinks, tokens, query_stride, head_stride, page_stride,
    layer_offset, table_width, runs, blocks, parts, scale, window, softcap,
    SPLIT: tl.constexpr, LEAST: tl.constexpr, ENCODING: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, LATENT: tl.constexpr, PER_WORD: tl.constexpr,
    KEY_FRONT: tl.constexpr, KEY_BACK: tl.constexpr, VALUE_PADDED: tl.constexpr,
    MIXED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, AHEAD: tl.constexpr,
):
    """Attention of ROWS rows, which are pairs of token and query head, to a part of their context.

    Program (row block + blocks * part, KV head, run).  Parts are cut from the run's own context.
    Without SPLIT, out and lse are the result.  Otherwise out f32 [parts, tokens, q_heads, dim] and
    lse [parts, tokens, q_heads], in powers of 2, go to `merge_kernel`.
    """
    run, head = tl.program_id(2), tl.program_id(1)
    # The last rows see most: they begin first.
    block, part = blocks - 1 - tl.program_id(0) % blocks, tl.program_id(0) // blocks
    offset, length = tl.load(spans + run), tl.load(spans + runs + run)
    start = tl.load(spans + 2 * runs + run)
    if block * ROWS >= length * GROUP:
        return
    begin = first_tile(start, window, WINDOW, TILE)
    size = start + length - begin
    if SPLIT:
        size = part_tokens(size, parts, LEAST)
    begin += part * size
    if begin >= start + length:
        return

    row = block * ROWS + tl.arange(0, ROWS)
    first_at = start + block * ROWS // GROUP
    last_at = start + tl.minimum((block * ROWS + ROWS - 1) // GROUP, length - 1)
    real = row // GROUP < length
    token = tl.where(real, row // GROUP, 0) + offset
    q_head = head * GROUP + row % GROUP
    at = query + token.to(tl.int64) * query_stride + q_head * head_stride
    front = query_rows(at, real, KEY_DIM, 0, KEY_FRONT * PER_WORD, DTYPE)
    back = front
    if KEY_BACK:
        back = query_rows(at, real, KEY_DIM, KEY_FRONT * PER_WORD, KEY_BACK * PER_WORD, DTYPE)
    KEY_WORDS: tl.constexpr = KEY_DIM // PER_WORD
    VALUE_WORDS: tl.constexpr = 0 if LATENT else VALUE_DIM * (16 // PER_WORD)
    place = place_of(
        memory, tables, run, table_width, page_stride, layer_offset, head, HEADS, KEY_WORDS * 16,
        VALUE_WORDS, LATENT,
    )

    sums = sums_of(
        (front, back), place, (scale, window, softcap), start + row // GROUP, first_at, last_at,
        begin, size, ENCODING, DTYPE, PRECISION, LATENT, KEY_WORDS, KEY_FRONT, KEY_BACK, VALUE_DIM,
        VALUE_PADDED, PER_WORD, MIXED, ROWS, TILE, WINDOW, SOFTCAP, AHEAD,
    )
    result = token.to(tl.int64) * (HEADS * GROUP) + q_head
    if SPLIT:
        result += part.to(tl.int64) * tokens * (HEADS * GROUP)
    store_rows(sums, out, lse, sinks, result, q_head, real, VALUE_DIM, MIXED, SPLIT, SINKS, LSE)


@triton.jit(do_not_specialize=["tokens", "runs", "parts", "window"])
def merge_kernel(
    out, lse, parts_out, parts_lse, spans, sinks, tokens, runs, parts, window,
    HEADS: tl.constexpr, CHUNKS: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr, PADDED_PARTS: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):
    """The parts of one row as one, in their order.

    Program (chunk of numbers + CHUNKS * token of the run, query head, run).
    """
    run, head = tl.program_id(2), tl.program_id(1)
    index, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    offset, length = tl.load(spans + run), tl.load(spans + runs + run)
    start = tl.load(spans + 2 * runs + run)
    if index >= length:
        return
    size = start + length - first_tile(start, window, WINDOW, TILE)
    count = tl.cdiv(size, part_tokens(size, parts, LEAST))
    row = (offset + index).to(tl.int64) * HEADS + head
    part = tl.arange(0, PADDED_PARTS).to(tl.int64)
    at = row + part * (tokens * HEADS)

    logs = tl.load(parts_lse + at, part < count, float("-inf"))
    top = tl.max(logs, 0)
    if SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        top = tl.maximum(top, sink)
    finite = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(logs - finite)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - finite)

    dim = chunk * CHUNK + tl.arange(0, CHUNK)
    some = tl.load(
        parts_out + at[:, None] * VALUE_DIM + dim[None, :],
        (weights != 0)[:, None] & (dim < VALUE_DIM)[None, :],
        0.0,
    )
    mixed = tl.sum(some * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + row * VALUE_DIM + dim, mixed.to(out.dtype.element_ty), dim < VALUE_DIM)
    if LSE and chunk == 0:
        tl.store(lse + row, log_of(finite, total) * LN_2)

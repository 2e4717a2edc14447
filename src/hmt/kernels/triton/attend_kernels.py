"""Kernels of attention over pages: sums over a part of the context, and the parts as one.

Flash attention (arXiv 2205.14135) with the context split over programs (flash-decoding).
"""

import triton
import triton.language as tl

from hmt.kernels.triton.tiles import (
    INT8,
    LN_2,
    LOG2_E,
    advance,
    log_of,
    tile_words,
    token_scales,
)


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


# Numbers that change from step to step: a kernel for each kind of them would be compiled.
@triton.jit(do_not_specialize=["tokens", "table_width", "runs", "blocks", "window"])
def attend_kernel(
    query,
    out,
    lse,
    memory,
    spans,
    tables,
    sinks,
    tokens,
    query_stride,
    head_stride,
    page_stride,
    layer_offset,
    table_width,
    runs,
    blocks,
    scale,
    window,
    softcap,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    ENCODING: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    PER_WORD: tl.constexpr,
    KEY_FRONT: tl.constexpr,
    KEY_BACK: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    MIXED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of ROWS rows, which are pairs of token and query head, to a part of their context.

    Program (row block + blocks * part, KV head, run).  Parts are cut from the run's own context.
    With one part, out and lse are the result.  Otherwise out f32 [parts, tokens, q_heads, dim] and
    lse [parts, tokens, q_heads], in powers of 2, go to `merge_kernel`.
    """
    run = tl.program_id(2)
    head = tl.program_id(1)
    # The last rows see most: they begin first.
    block = blocks - 1 - tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks
    offset = tl.load(spans + run)
    length = tl.load(spans + runs + run)
    start = tl.load(spans + 2 * runs + run)
    if block * ROWS >= length * GROUP:
        return
    begin = first_tile(start, window, WINDOW, TILE)
    size = start + length - begin
    if PARTS > 1:
        size = part_tokens(size, PARTS, LEAST)
    begin += part * size
    if begin >= start + length:
        return

    row = block * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    at = start + token
    first_at = start + block * ROWS // GROUP
    last_at = start + tl.minimum((block * ROWS + ROWS - 1) // GROUP, length - 1)
    q_head = head * GROUP + row % GROUP
    real = token < length
    token = tl.where(real, token, 0) + offset

    U: tl.constexpr = PER_WORD
    query_row = (query + token.to(tl.int64) * query_stride + q_head * head_stride)[:, None]
    dim = tl.arange(0, KEY_FRONT * U)[None, :]
    query_front = tl.load(query_row + dim, real[:, None] & (dim < KEY_DIM), 0.0).to(DTYPE)
    query_back = 0
    if KEY_BACK:
        dim = KEY_FRONT * U + tl.arange(0, KEY_BACK * U)[None, :]
        query_back = tl.load(query_row + dim, real[:, None] & (dim < KEY_DIM), 0.0).to(DTYPE)

    # What a page holds of this layer: keys, values, scales of keys, scales of values.
    KEY_WORDS: tl.constexpr = KEY_DIM // U
    VALUE_WORDS: tl.constexpr = 0 if LATENT else VALUE_DIM * (16 // U)
    key_offset = layer_offset + head * (KEY_WORDS * 16)
    value_offset = layer_offset + HEADS * (KEY_WORDS * 16) + head * VALUE_WORDS
    key_scale_offset = layer_offset + HEADS * (KEY_WORDS * 16 + VALUE_WORDS) + head * 16
    value_scale_offset = key_scale_offset
    if not LATENT:
        value_scale_offset += HEADS * 16
    table = tables + run.to(tl.int64) * table_width

    mixed = tl.zeros((ROWS, MIXED), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    lowest = begin
    if WINDOW:
        lowest = tl.maximum(first_at - window + 1, begin)
    end = tl.minimum(last_at + 1, begin + size)
    # Tiles that every row sees whole lie between `whole` and `ragged`.
    left = lowest // TILE * TILE
    whole = left
    if WINDOW:
        whole = tl.maximum(tl.cdiv(tl.maximum(last_at - window + 1, 0), TILE) * TILE, left)
    ragged = tl.maximum(tl.minimum(first_at + 1, end) // TILE * TILE, whole)
    for phase in tl.static_range(3 if WINDOW else 2):
        # Tiles that some row sees in part lie on the left of a window, and at the end.
        if phase == 0:
            low, high = (left, tl.minimum(whole, end)) if WINDOW else (ragged, end)
        elif phase == 1:
            low, high = whole, ragged
        else:
            low, high = ragged, end
        for first in tl.range(low, high, TILE, num_stages=STAGES if phase == 1 else 1):
            front, back, value = tile_words(
                memory,
                table,
                first,
                page_stride,
                key_offset,
                value_offset,
                KEY_WORDS,
                KEY_FRONT,
                KEY_BACK,
                VALUE_DIM,
                VALUE_PADDED,
                U,
                TILE,
            )
            key_scales = 0.0
            value_scales = 0.0
            if ENCODING == INT8:
                key_scales = token_scales(
                    memory, table, first, page_stride, key_scale_offset, TILE
                )
                value_scales = token_scales(
                    memory, table, first, page_stride, value_scale_offset, TILE
                )
            mixed, top, total = advance(
                mixed,
                top,
                total,
                query_front,
                query_back,
                front,
                back,
                value,
                key_scales,
                value_scales,
                first,
                at,
                lowest,
                end,
                scale,
                window,
                softcap,
                ENCODING,
                DTYPE,
                PRECISION,
                KEY_BACK,
                LATENT,
                TILE,
                WINDOW,
                SOFTCAP,
                phase != 1,
            )

    if PARTS == 1 and SINKS:
        sink = tl.load(sinks + q_head) * LOG2_E
        above = tl.maximum(top, sink)
        finite = tl.where(above == float("-inf"), 0.0, above)
        fading = tl.exp2(top - finite)
        mixed *= fading[:, None]
        total = total * fading + tl.exp2(sink - finite)
        top = above
    mixed /= tl.where(total == 0, 1.0, total)[:, None]
    log = log_of(top, total)
    result = token.to(tl.int64) * (HEADS * GROUP) + q_head
    if PARTS > 1:
        result += part.to(tl.int64) * tokens * (HEADS * GROUP)
        tl.store(lse + result, log, real)
    elif LSE:
        tl.store(lse + result, log * LN_2, real)
    dim = tl.arange(0, MIXED)[None, :]
    at_out = out + result[:, None] * VALUE_DIM + dim
    tl.store(at_out, mixed.to(out.dtype.element_ty), real[:, None] & (dim < VALUE_DIM))


@triton.jit(do_not_specialize=["tokens", "runs", "window"])
def merge_kernel(
    out,
    lse,
    parts_out,
    parts_lse,
    spans,
    sinks,
    tokens,
    runs,
    window,
    heads: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """The parts of one row as one, in their order.  Program (token of the run, query head, run)."""
    run = tl.program_id(2)
    head = tl.program_id(1)
    index = tl.program_id(0)
    offset = tl.load(spans + run)
    length = tl.load(spans + runs + run)
    start = tl.load(spans + 2 * runs + run)
    if index >= length:
        return
    size = start + length - first_tile(start, window, WINDOW, TILE)
    count = tl.cdiv(size, part_tokens(size, PARTS, LEAST))
    row = (offset + index).to(tl.int64) * heads + head
    stride = tokens * heads

    part = tl.arange(0, PADDED_PARTS)
    logs = tl.load(parts_lse + row + part.to(tl.int64) * stride, part < count, float("-inf"))
    top = tl.max(logs, 0)
    if SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        top = tl.maximum(top, sink)
    finite = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(logs - finite), 0)
    if SINKS:
        total += tl.exp2(sink - finite)

    dim = tl.arange(0, PADDED)
    mixed = tl.zeros((PADDED,), tl.float32)
    for first in range(0, count, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        logs = tl.load(parts_lse + row + part.to(tl.int64) * stride, part < count, float("-inf"))
        weights = tl.exp2(logs - finite)
        some = tl.load(
            parts_out + (row + part.to(tl.int64) * stride)[:, None] * VALUE_DIM + dim[None, :],
            (part < count)[:, None] & (weights != 0)[:, None] & (dim < VALUE_DIM)[None, :],
            0.0,
        )
        mixed += tl.sum(some * weights[:, None], 0)
    mixed /= tl.where(total == 0, 1.0, total)
    tl.store(out + row * VALUE_DIM + dim, mixed.to(out.dtype.element_ty), dim < VALUE_DIM)
    if LSE:
        tl.store(lse + row, log_of(finite, total) * LN_2)

"""The kernel of attention: sums over a part of the context, and the parts as one.

Flash attention (arXiv 2205.14135) with the context split over programs (flash-decoding).
"""

import triton
import triton.language as tl

from hmt.kernels.triton.attention.combine import count_parts, group_rows, store_part, store_result
from hmt.kernels.triton.attention.kv_addressing import (
    ask_for_part,
    places_of,
    tile_pages,
    token_offsets,
    write_new,
)
from hmt.kernels.triton.attention.kv_tiles import INT8, advance, planes_as_rows, tile_rows
from hmt.kernels.triton.pdl import inputs_are_there, next_may_begin


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def sweep(
    sums, query, places, rows, numbers, low, high, page,
    ENCODING: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, LATENT: tl.constexpr,
    PAGED: tl.constexpr, NEW: tl.constexpr, KEY_DIM: tl.constexpr, KEY_FRONT: tl.constexpr,
    KEY_BACK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, WORDS: tl.constexpr,
):
    """The sums with the tiles from low to high, and the page numbers that follow.

    page     of the tokens of the first tile: page numbers come one tile before what lies there
    places   see `places_of`
    rows     position of each row, the first and the end of what any of them sees, and the first
             token that is new
    """
    mixed, top, total = sums
    at, lowest, end, start = rows
    keys, values, table, key_place, value_place, scales, _new = places
    token = tl.arange(0, TILE)
    for first in tl.range(low, high, TILE, num_stages=STAGES):
        position = first + token
        held = (position >= lowest) & (position < end)
        key_at = keys + token_offsets(key_place, page, position, start, KEY_DIM, PAGED, NEW)
        front = tile_rows(key_at, held, 0, KEY_DIM, KEY_FRONT, MASKED)
        back = first
        if KEY_BACK:
            back = tile_rows(key_at, held, KEY_FRONT, KEY_DIM, KEY_BACK, MASKED)
        value = first
        if not LATENT:
            value_at = values + token_offsets(
                value_place, page, position, start, VALUE_DIM, PAGED, NEW
            )
            if WORDS:
                value_at = tl.multiple_of(value_at.to(tl.pointer_type(tl.int32)), 16)
                value = tile_rows(value_at, held, 0, VALUE_DIM // 4, VALUE_PADDED // 4, MASKED)
            else:
                value = tile_rows(value_at, held, 0, VALUE_DIM, VALUE_PADDED, MASKED)
        key_scales = first
        value_scales = first
        if ENCODING == INT8:
            memory, page_stride, key_scale, value_scale = scales
            scale_at = memory + page.to(tl.int64) * page_stride + position % 16
            key_scales = tl.load(scale_at + key_scale, held, 0.0)
            value_scales = tl.load(scale_at + value_scale, held, 0.0)
        if PAGED:
            page = tile_pages(table, first + TILE, end, TILE)
        mixed, top, total = advance(
            (mixed, top, total), query, (front, back, value, key_scales, value_scales), first,
            (at, lowest, end), numbers, ENCODING, DTYPE, PRECISION, KEY_BACK, LATENT,
            TILE, WINDOW, SOFTCAP, MASKED, WORDS,
        )
    return (mixed, top, total), page


@triton.jit
def query_rows(
    at, real, DIM: tl.constexpr, FRONT: tl.constexpr, BACK: tl.constexpr, DTYPE: tl.constexpr,
):
    """Rows of queries that begin `at`, in two parts, with zeros beyond DIM."""
    dim = tl.arange(0, FRONT)[None, :]
    front = tl.load(at[:, None] + dim, real[:, None] & (dim < DIM), 0.0).to(DTYPE)
    back = front
    if BACK:
        rest = FRONT + tl.arange(0, BACK)[None, :]
        back = tl.load(at[:, None] + rest, real[:, None] & (rest < DIM), 0.0).to(DTYPE)
    return front, back


@triton.jit
def sums_of(
    query, places, numbers, at, first_at, last_at, lowest, begin, size, start, limit, page,
    ENCODING: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, LATENT: tl.constexpr,
    PAGED: tl.constexpr, NEW: tl.constexpr, KEY_DIM: tl.constexpr, KEY_FRONT: tl.constexpr,
    KEY_BACK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    MIXED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr, ONE_SWEEP: tl.constexpr, WORDS: tl.constexpr,
):
    """Sums of rows at positions `at`, from first_at to last_at, over `size` tokens from `begin`.

    ONE_SWEEP   all tiles are taken as if some row did not see some of their tokens
    """
    if WORDS:
        quarter = tl.zeros((ROWS, MIXED // 4), tl.float32)
        mixed = (quarter, quarter, quarter, quarter)
    else:
        mixed = tl.zeros((ROWS, MIXED), tl.float32)
    sums = (
        mixed,
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
    )
    end = tl.minimum(tl.minimum(last_at + 1, limit), begin + size)
    rows = (at, lowest, end, start)
    # Every row sees the tiles between `whole` and `ragged`; others are seen in part by some.
    ragged = lowest // TILE * TILE
    if not ONE_SWEEP:
        whole = ragged
        if WINDOW:
            above = tl.cdiv(tl.maximum(last_at - numbers[1] + 1, 0), TILE) * TILE
            whole = tl.minimum(tl.maximum(above, ragged), end)
            sums, page = sweep(
                sums, query, places, rows, numbers, ragged, whole, page, ENCODING, DTYPE,
                PRECISION, LATENT, PAGED, NEW, KEY_DIM, KEY_FRONT, KEY_BACK, VALUE_DIM,
                VALUE_PADDED, TILE, WINDOW, SOFTCAP, STAGES, True, WORDS,
            )
        ragged = tl.maximum(tl.minimum(first_at + 1, end) // TILE * TILE, whole)
        sums, page = sweep(
            sums, query, places, rows, numbers, whole, ragged, page, ENCODING, DTYPE, PRECISION,
            LATENT, PAGED, NEW, KEY_DIM, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED, TILE,
            WINDOW, SOFTCAP, STAGES, False, WORDS,
        )
    sums, page = sweep(
        sums, query, places, rows, numbers, ragged, end, page, ENCODING, DTYPE, PRECISION, LATENT,
        PAGED, NEW, KEY_DIM, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED, TILE, WINDOW, SOFTCAP,
        STAGES, True, WORDS,
    )
    return planes_as_rows(sums[0], WORDS), sums[1], sums[2]


# Parts are cut from the run's own context.  A context of one part is finished here.  Others go to
# parts_out f32 [slots, ROWS, VALUE_DIM] and parts_lse [slots, ROWS], in powers of 2, for
# `merge_kernel`.  (Added by the program that is last to arrive, 16 parts took 1.5 us more on an
# H200.)
#
# PAGED       keys and values are in pages; else key and value [limit, HEADS, dim] are one run's
# NEW         pages do not hold the run's own tokens: they are in key and value, and the first
#             program that has no part, or else the last one, writes them to their pages
# OWN_PARTS   as many as keep `parts` programs busy with the run alone
# WORDS       values of one byte come as words of four numbers: the tensor cores want tokens side by
#             side, and by themselves bytes are loaded from shared memory one at a time
# ASKED       tiles that the cache is asked for before the kernels ahead have ended
#
# Not specialized are numbers that change from step to step: a kernel for each kind of them would be
# compiled.
@triton.jit(do_not_specialize=[
    "tokens", "given_start", "limit", "table_width", "runs", "blocks", "launched", "few", "parts",
    "window",
])
def attend_kernel(
    query, out, lse, parts_out, parts_lse, memory, key, value, spans, tables, sinks,
    tokens, given_start, limit, query_stride, head_stride, key_stride, key_head_stride,
    value_stride, value_head_stride, page_stride, layer_offset, table_width, runs, blocks,
    launched, few, parts, scale, window, softcap,
    SPLIT: tl.constexpr, OWN_PARTS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    ENCODING: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    PAGED: tl.constexpr, NEW: tl.constexpr, NEW_ROWS: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, LATENT: tl.constexpr,
    KEY_FRONT: tl.constexpr, KEY_BACK: tl.constexpr, VALUE_PADDED: tl.constexpr,
    MIXED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
    ONE_SWEEP: tl.constexpr, ASKED: tl.constexpr, WORDS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Attention of ROWS rows, which are pairs of token and query head, to a part of their context.

    Program (row block + blocks * part, KV head, run).
    """
    next_may_begin(DEPENDENT)
    run, head = tl.program_id(2), tl.program_id(1)
    # The last rows see most: they begin first.
    block, part = blocks - 1 - tl.program_id(0) % blocks, tl.program_id(0) // blocks
    if PAGED:
        offset, length = tl.load(spans + run), tl.load(spans + runs + run)
        start = tl.load(spans + 2 * runs + run)
        limit = start + length
    else:
        offset, length, start = run * 0, tokens, given_start
    first, size, count = count_parts(
        start, length, few, parts, window, OWN_PARTS, LEAST, MOST, HEADS, GROUP, ROWS, TILE, WINDOW
    )
    if not SPLIT:
        size = tl.maximum(tl.minimum(start + length, limit) - first, 1)
        count = 1
    begin = first + part * size
    idle = (block * ROWS >= length * GROUP) | (part >= count)
    VALUE_ROW: tl.constexpr = 0 if LATENT else VALUE_DIM
    strides = (key_stride, key_head_stride, value_stride, value_head_stride)
    places = places_of(
        memory, key, value, tables, strides, page_stride, layer_offset, table_width, run, head,
        offset, ENCODING, PAGED, NEW, HEADS, KEY_DIM, VALUE_ROW,
    )
    row = block * ROWS + tl.arange(0, ROWS)
    first_at = start + block * ROWS // GROUP
    last_at = start + tl.minimum((block * ROWS + ROWS - 1) // GROUP, length - 1)
    lowest = begin
    if WINDOW:
        lowest = tl.maximum(first_at - window + 1, begin)
    page = tl.arange(0, TILE)
    if PAGED:
        page = tile_pages(places[2], tl.minimum(lowest, limit) // TILE * TILE, limit, TILE)
    if DEPENDENT and ASKED:
        asked = tl.where(idle, 0, tl.minimum(begin + tl.minimum(size, ASKED * TILE), limit))
        ask_for_part(places, begin, asked, limit, KEY_DIM, VALUE_ROW, TILE, DEPENDENT)
    inputs_are_there(DEPENDENT)
    span = (offset, start, limit)
    if idle:
        if NEW:
            write_new((block == 0) & (part == count), places, span, KEY_DIM, VALUE_ROW, NEW_ROWS)
        return
    token, q_head, real = group_rows(row, offset, length, head, GROUP)
    at = query + token.to(tl.int64) * query_stride + q_head * head_stride
    sums = sums_of(
        query_rows(at, real, KEY_DIM, KEY_FRONT, KEY_BACK, DTYPE), places,
        (scale, window, softcap), start + row // GROUP, first_at, last_at, lowest, begin, size,
        start, limit, page, ENCODING, DTYPE, PRECISION, LATENT, PAGED, NEW, KEY_DIM, KEY_FRONT,
        KEY_BACK, VALUE_DIM, VALUE_PADDED, MIXED, ROWS, TILE, WINDOW, SOFTCAP, STAGES,
        ONE_SWEEP, WORDS,
    )
    if NEW:  # where another program has nothing else to do, it writes them
        here = (block == 0) & (part == launched - 1)
        write_new(here, places, span, KEY_DIM, VALUE_ROW, NEW_ROWS)
    dim = tl.arange(0, MIXED)
    if count == 1:
        store_result(
            out, lse, sinks, sums, token, q_head, real, dim, HEADS * GROUP, VALUE_DIM, SINKS, LSE,
        )
    elif SPLIT:
        slot = ((run * HEADS + head) * blocks + block).to(tl.int64) * launched + part
        store_part(parts_out, parts_lse, sums, slot, real, dim, VALUE_DIM, ROWS)

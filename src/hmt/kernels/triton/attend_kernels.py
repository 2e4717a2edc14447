"""The kernel of attention: sums over a part of the context, and the parts as one.

Flash attention (arXiv 2205.14135) with the context split over programs (flash-decoding).
"""

import triton
import triton.language as tl

from hmt.kernels.triton.dependent import ask_cache, inputs_are_there, next_may_begin
from hmt.kernels.triton.merging import count_parts, group_rows, store_result
from hmt.kernels.triton.tiles import INT8, advance, log_of, tile_rows


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def token_offsets(
    place, page, position, start, SIZE: tl.constexpr, PAGED: tl.constexpr, NEW: tl.constexpr,
):
    """Numbers from the beginning of memory to the rows of tokens.

    place   numbers from page to page (in a plain tensor: from row to row), from the beginning of a
            page to this head's rows, from the beginning of memory to the first new row, and from
            one new row to the next
    NEW     tokens from `start` on are not in pages yet: numbers in 16 bytes, which all these are
            multiples of, or 0
    """
    page_stride, offset, new, new_stride = place
    if PAGED:
        at = page.to(tl.int64) * page_stride + (offset + position % 16 * SIZE)
        if NEW:
            at = tl.where(position >= start, new + (position - start) * new_stride, at)
            at = tl.multiple_of(at, NEW)
    else:
        at = position.to(tl.int64) * page_stride + offset
    return at


@triton.jit
def tile_pages(table, first, end, TILE: tl.constexpr):
    """Page numbers of tokens first .. first + TILE; those of the last one for later ones."""
    position = tl.minimum(first + tl.arange(0, TILE), end - 1)
    return tl.load(table + tl.maximum(position, 0) // 16)


@triton.jit
def sweep(
    sums, query, places, rows, numbers, low, high, page,
    ENCODING: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, LATENT: tl.constexpr,
    PAGED: tl.constexpr, NEW: tl.constexpr, KEY_DIM: tl.constexpr, KEY_FRONT: tl.constexpr,
    KEY_BACK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The sums with the tiles from low to high, and the page numbers that follow.

    page     of the tokens of the first tile: page numbers come one tile before what lies there
    places   keys and values in memory, the run's table, and where rows of keys, of values, and
             their scales lie
    rows     position of each row, the first and the end of what any of them sees, and the first
             token that is new
    """
    mixed, top, total = sums
    at, lowest, end, start = rows
    keys, values, table, key_place, value_place, scales = places
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
            TILE, WINDOW, SOFTCAP, MASKED,
        )
    return (mixed, top, total), page


@triton.jit
def query_rows(at, real, DIM: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
               DTYPE: tl.constexpr):
    """Numbers FIRST .. FIRST + COUNT of rows of queries that begin `at`, zeros beyond DIM."""
    dim = FIRST + tl.arange(0, COUNT)[None, :]
    return tl.load(at[:, None] + dim, real[:, None] & (dim < DIM), 0.0).to(DTYPE)


@triton.jit
def sums_of(
    query, places, numbers, at, first_at, last_at, lowest, begin, size, start, limit, page,
    ENCODING: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, LATENT: tl.constexpr,
    PAGED: tl.constexpr, NEW: tl.constexpr, KEY_DIM: tl.constexpr, KEY_FRONT: tl.constexpr,
    KEY_BACK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    MIXED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr, ONE_SWEEP: tl.constexpr,
):
    """Sums of rows at positions `at`, from first_at to last_at, over `size` tokens from `begin`.

    ONE_SWEEP   all tiles are taken as if some row did not see some of their tokens
    """
    sums = (
        tl.zeros((ROWS, MIXED), tl.float32),
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
                VALUE_PADDED, TILE, WINDOW, SOFTCAP, STAGES, True,
            )
        ragged = tl.maximum(tl.minimum(first_at + 1, end) // TILE * TILE, whole)
        sums, page = sweep(
            sums, query, places, rows, numbers, whole, ragged, page, ENCODING, DTYPE, PRECISION,
            LATENT, PAGED, NEW, KEY_DIM, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED, TILE,
            WINDOW, SOFTCAP, STAGES, False,
        )
    sums, page = sweep(
        sums, query, places, rows, numbers, ragged, end, page, ENCODING, DTYPE, PRECISION, LATENT,
        PAGED, NEW, KEY_DIM, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED, TILE, WINDOW, SOFTCAP,
        STAGES, True,
    )
    return sums


@triton.jit
def ask_for_rows(
    at, place, table, low, end, SIZE: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Let the L2 cache fetch rows of a tile.

    A hint to that cache changes no result, whoever writes there meanwhile: all read through it.
    """
    LINE: tl.constexpr = 1024 // at.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(SIZE, LINE))
    position = tl.maximum(tl.minimum(low + tl.arange(0, TILE), end - 1), 0)
    page = tl.load(table + position // 16)
    rows = at + token_offsets(place, page, position, 0, SIZE, True, 0)
    line = tl.minimum(tl.arange(0, LINES) * LINE, SIZE - 1)
    ask_cache(rows[:, None] + line[None, :], DEPENDENT)


@triton.jit
def write_rows(
    memory, place, table, new, span, stride, SIZE: tl.constexpr, COUNT: tl.constexpr,
):
    """Rows of SIZE numbers of new tokens into their pages."""
    offset, start, end = span
    PADDED: tl.constexpr = triton.next_power_of_2(SIZE)
    index = tl.arange(0, COUNT)
    dim = tl.arange(0, PADDED)[None, :]
    position = start + index
    valid = position < end
    mask = valid[:, None] & (dim < SIZE)
    rows = tl.load(new + (offset + index).to(tl.int64)[:, None] * stride + dim, mask, 0)
    page = tl.load(table + position // 16, valid, 0)
    at = memory + token_offsets(place, page, position, 0, SIZE, True, 0)
    tl.store(at[:, None] + dim, rows, mask)


@triton.jit
def write_new(
    here, memory, table, span, places, new, strides, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, COUNT: tl.constexpr,
):
    """New keys and values of one head into their pages, if `here`.

    span   of the run: its offset among new tokens, its start and its end
    """
    if here:
        write_rows(memory, places[0], table, new[0], span, strides[0], KEY_DIM, COUNT)
        if VALUE_DIM:
            write_rows(memory, places[1], table, new[1], span, strides[1], VALUE_DIM, COUNT)


# Numbers that change from step to step: a kernel for each kind of them would be compiled.
@triton.jit(do_not_specialize=[
    "tokens", "given_start", "limit", "table_width", "runs", "blocks", "launched", "few", "parts",
    "window",
])
def attend_kernel(
    query, out, lse, parts_out, parts_lse, memory, key, value, spans, tables, sinks,
    tokens, given_start, limit, query_stride, head_stride, key_stride, key_head_stride,
    value_stride, value_head_stride, page_stride, layer_offset, table_width, runs, blocks,
    launched, few, parts, scale, window, softcap,
    SPLIT: tl.constexpr, OWN_PARTS: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, ENCODING: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    PAGED: tl.constexpr, NEW: tl.constexpr, NEW_ROWS: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, LATENT: tl.constexpr,
    KEY_FRONT: tl.constexpr, KEY_BACK: tl.constexpr, VALUE_PADDED: tl.constexpr,
    MIXED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
    ONE_SWEEP: tl.constexpr, ASKED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Attention of ROWS rows, which are pairs of token and query head, to a part of their context.

    Program (row block + blocks * part, KV head, run).  Parts are cut from the run's own context.
    A context of one part is finished here.  Others go to parts_out f32 [slots, ROWS, VALUE_DIM] and
    parts_lse [slots, ROWS], in powers of 2, for `merge_kernel`.  (Added by the program that is last
    to arrive, 16 parts took 1.5 us more on an H200.)

    PAGED       keys and values are in pages; else key and value [limit, HEADS, dim] are one run's
    NEW         pages do not hold the run's own tokens: they are in key and value, and the first
                program that has no part, or else the last one, writes them to their pages
    OWN_PARTS   as many as keep `parts` programs busy with the run alone
    ASKED       tiles that the cache is asked for before the kernels ahead have ended
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
    table = tables
    new_keys, new_values = key, value
    if PAGED:
        table += run.to(tl.int64) * table_width
        key_offset = layer_offset + head * (16 * KEY_DIM)
        value_offset = layer_offset + HEADS * (16 * KEY_DIM) + head * (16 * VALUE_ROW)
        new_keys += head * key_head_stride
        new_values += head * value_head_stride
        keys, values = memory, memory
        key_row, value_row = page_stride, page_stride
    else:
        key_offset, value_offset = head * key_head_stride, head * value_head_stride
        keys, values = key, value
        key_row, value_row = key_stride, value_stride
    key_new, value_new = start.to(tl.int64) * 0, start.to(tl.int64) * 0
    if NEW:
        SIZE: tl.constexpr = memory.dtype.element_ty.primitive_bitwidth // 8
        base = memory.to(tl.int64)
        key_new = (new_keys.to(tl.int64) - base) // SIZE + offset.to(tl.int64) * key_stride
        value_new = (new_values.to(tl.int64) - base) // SIZE + offset.to(tl.int64) * value_stride
    key_place = (key_row, key_offset, key_new, key_stride)
    value_place = (value_row, value_offset, value_new, value_stride)
    scales = memory
    scale_place = start
    if ENCODING == INT8:
        scales = memory.to(tl.pointer_type(tl.float32))
        scale_place = (layer_offset + HEADS * 16 * (KEY_DIM + VALUE_ROW)) // 4 + head * 16
    value_scale = scale_place
    if not LATENT:
        value_scale += HEADS * 16
    places = (
        keys, values, table, key_place, value_place,
        (scales, page_stride // 4, scale_place, value_scale),
    )
    row = block * ROWS + tl.arange(0, ROWS)
    first_at = start + block * ROWS // GROUP
    last_at = start + tl.minimum((block * ROWS + ROWS - 1) // GROUP, length - 1)
    lowest = begin
    if WINDOW:
        lowest = tl.maximum(first_at - window + 1, begin)
    page = tl.arange(0, TILE)
    if PAGED:
        page = tile_pages(table, tl.minimum(lowest, limit) // TILE * TILE, limit, TILE)
    if DEPENDENT and ASKED:
        asked = tl.minimum(begin + tl.minimum(size, ASKED * TILE), limit)
        for low in range(begin, tl.where(idle, begin, asked), TILE):
            ask_for_rows(keys, key_place, table, low, limit, KEY_DIM, TILE, DEPENDENT)
            if not LATENT:
                ask_for_rows(values, value_place, table, low, limit, VALUE_DIM, TILE, DEPENDENT)
    inputs_are_there(DEPENDENT)
    if idle:
        if NEW:
            write_new(
                (block == 0) & (part == count), memory, table, (offset, start, limit),
                (key_place, value_place), (new_keys, new_values), (key_stride, value_stride),
                KEY_DIM, VALUE_ROW, NEW_ROWS,
            )
        return

    token, q_head, real = group_rows(row, offset, length, head, GROUP)
    at = query + token.to(tl.int64) * query_stride + q_head * head_stride
    front = query_rows(at, real, KEY_DIM, 0, KEY_FRONT, DTYPE)
    back = front
    if KEY_BACK:
        back = query_rows(at, real, KEY_DIM, KEY_FRONT, KEY_BACK, DTYPE)
    mixed, top, total = sums_of(
        (front, back), places, (scale, window, softcap), start + row // GROUP, first_at, last_at,
        lowest, begin, size, start, limit, page, ENCODING, DTYPE, PRECISION, LATENT, PAGED, NEW,
        KEY_DIM, KEY_FRONT, KEY_BACK, VALUE_DIM, VALUE_PADDED, MIXED, ROWS, TILE, WINDOW, SOFTCAP,
        STAGES, ONE_SWEEP,
    )
    if NEW:  # where another program has nothing else to do, it writes them
        write_new(
            (block == 0) & (part == launched - 1), memory, table, (offset, start, limit),
            (key_place, value_place), (new_keys, new_values), (key_stride, value_stride),
            KEY_DIM, VALUE_ROW, NEW_ROWS,
        )

    dim = tl.arange(0, MIXED)
    if count == 1:
        store_result(
            out, lse, sinks, (mixed, top, total), token, q_head, real, dim, HEADS * GROUP,
            VALUE_DIM, SINKS, LSE,
        )
    elif SPLIT:
        group = (run * HEADS + head) * blocks + block
        result = (group.to(tl.int64) * launched + part) * ROWS + tl.arange(0, ROWS)
        tl.store(parts_lse + result, log_of(top, total), real)
        mixed /= tl.where(total == 0, 1.0, total)[:, None]
        there = parts_out + result[:, None] * VALUE_DIM + dim[None, :]
        tl.store(there, mixed, real[:, None] & (dim < VALUE_DIM)[None, :])

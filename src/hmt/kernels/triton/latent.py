"""Attention of many heads to latent keys of 576 numbers, on Hopper's tensor cores.

All heads share a key, whose first 512 numbers are its value, so this is work for tensor cores even
for one token: 64 rows of queries and two tiles of keys fill a multiprocessor's shared memory.  In
Gluon, as Triton copies the second tile only when it has computed the first (128 heads, 128K
positions, on an H200: 157 us).  Two groups of four warps share each product by its columns.

Within a step of the loop, scores of a tile become weights, values are mixed with them, and scores
of the next tile are computed right behind, while the one after is copied.  No product is under way
from one step to the next: the assembler would then run all of them one by one.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hmt.kernels.triton import dependent, merging

# Triton 3.9 has other names for them than 3.6.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

KEY_DIM = tl.constexpr(576)
FRONT = tl.constexpr(512)
BACK = tl.constexpr(64)
ROWS = tl.constexpr(64)
TILE = tl.constexpr(64)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

_count_parts = gluon.jit(merging.count_parts.fn)
_next_may_begin = gluon.jit(dependent.next_may_begin.fn)
_inputs_are_there = gluon.jit(dependent.inputs_are_there.fn)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_MIXED = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_FRONT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_BACK = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@gluon.jit
def _tile_pages(table, first, end, LAYOUT: gl.constexpr):
    position = gl.minimum(first + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT)), end - 1)
    return gl.load(table + position // 16)


@gluon.jit
def _fetch(
    shared, memory, page, first, end, page_stride, FIRST: gl.constexpr, COUNT: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Begin to copy numbers FIRST .. FIRST + COUNT of a tile's keys; the last key for later ones.

    Nothing of a tile that begins after the end.
    """
    position = gl.minimum(first + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT)), end - 1)
    rows = page.to(gl.int64) * page_stride + position % 16 * KEY_DIM + FIRST
    dim = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    at = memory + rows[:, None] + dim[None, :]
    _copy(shared, at, mask=gl.full([TILE, COUNT], first, gl.int32, layout=LAYOUT) < end)


@gluon.jit
def _fetch_tile(front, back, keys, pages, first, end, page_stride):
    """Begin to copy a tile."""
    _fetch(front, keys, pages[0], first, end, page_stride, 0, FRONT, _FRONT)
    _fetch(back, keys, pages[1], first, end, page_stride, FRONT, BACK, _BACK)
    async_copy.commit_group()


@gluon.jit
def _pages(table, first, end):
    return _tile_pages(table, first, end, _FRONT), _tile_pages(table, first, end, _BACK)


@gluon.jit
def _products(query_front, query_back, front, back, products):
    """Begin to multiply queries with a tile of keys; what `products` holds does not matter."""
    found = warpgroup_mma(
        query_front, front.permute((1, 0)), products, use_acc=False, is_async=True
    )
    return warpgroup_mma(query_back, back.permute((1, 0)), found, is_async=True)


@gluon.jit
def _keep_queries(
    shared, query, block, offset, length, query_stride, head_stride, GROUP: gl.constexpr,
    FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr,
):
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    real = row // GROUP < length
    token = gl.where(real, row // GROUP, 0) + offset
    at = query + token.to(gl.int64) * query_stride + row % GROUP * head_stride + FIRST
    dim = gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    shared.store(gl.load(at[:, None] + dim[None, :], mask=real[:, None], other=0.0))


@gluon.jit
def _sums(
    kept, tiles, pages, start, block, begin, end, last, unit, GROUP: gl.constexpr,
):
    """Sums of a row block over positions begin .. end: (mixed, top, total).

    kept    queries in shared memory, and room for the weights of a tile
    tiles   shared memory for two, of which the first is under way; keys, table, and page_stride
    pages   numbers of the second tile's
    """
    query_front, query_back, weighed = kept
    front, back, keys, table, page_stride = tiles
    at = start + (block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _SCORES))) // GROUP
    first_at = start + block * ROWS // GROUP
    token = gl.arange(0, TILE, layout=gl.SliceLayout(0, _SCORES))
    mixed = gl.zeros([ROWS, FRONT], gl.float32, layout=_MIXED)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, _SCORES))
    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, _SCORES))
    products = gl.zeros([ROWS, TILE], gl.float32, layout=_SCORES)
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()
    products = _products(query_front, query_back, front.index(0), back.index(0), products)
    _fetch_tile(front.index(1), back.index(1), keys, pages, begin + TILE, last, page_stride)
    pages = _pages(table, begin + 2 * TILE, last)
    products = warpgroup_mma_wait(0, deps=(products,))
    slot = 0
    for first in range(begin, end, TILE):
        scores = products
        if first + TILE > gl.minimum(first_at + 1, end):
            position = first + token
            seen = (position < end)[None, :] & (position[None, :] <= at[:, None])
            scores = gl.where(seen, scores, float("-inf"))
        above = gl.maximum(top, gl.max(scores, 1) * unit)
        finite = gl.where(above == float("-inf"), 0.0, above)
        weights = gl.exp2(scores * unit - finite[:, None])
        fading = gl.exp2(top - finite)
        total = total * fading + gl.sum(weights, 1)
        top = above
        weighed.store(weights.to(weighed.dtype))
        mixed = mixed * gl.convert_layout(fading, gl.SliceLayout(1, _MIXED))[:, None]
        fence_async_shared()
        _barrier()  # all weights are there
        mixing = warpgroup_mma(weighed, front.index(slot), mixed, is_async=True)
        other = 1 - slot
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()  # the next tile is there
        scoring = _products(
            query_front, query_back, front.index(other), back.index(other), products
        )
        mixed = warpgroup_mma_wait(2, deps=(mixing,))
        _barrier()  # nobody reads this tile any more, nor its weights
        _fetch_tile(
            front.index(slot), back.index(slot), keys, pages, first + 2 * TILE, last, page_stride
        )
        pages = _pages(table, first + 3 * TILE, last)
        products, mixed = warpgroup_mma_wait(0, deps=(scoring, mixed))
        slot = other
    async_copy.wait_group(0)
    return mixed, top, total


@gluon.jit
def _store(
    results, sums, block, offset, length, count, slots, GROUP: gl.constexpr, SPLIT: gl.constexpr,
    LSE: gl.constexpr,
):
    """Divide sums, and write them to the result, or to the slots of a part."""
    out, lse, parts_out, parts_lse = results
    mixed, top, total = sums
    divisor = gl.where(total == 0, 1.0, total)
    log = gl.where(total == 0, float("-inf"), top + gl.log2(divisor))
    mixed = mixed / gl.convert_layout(divisor, gl.SliceLayout(1, _MIXED))[:, None]
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _SCORES))
    local_mixed = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _MIXED))
    dim = gl.arange(0, FRONT, layout=gl.SliceLayout(0, _MIXED))[None, :]
    real = (block * ROWS + local) // GROUP < length
    real_mixed = ((block * ROWS + local_mixed) // GROUP < length)[:, None]
    if count == 1:
        begin = offset.to(gl.int64) * GROUP + block * ROWS
        if LSE:
            gl.store(lse + begin + local, log * LN_2, mask=real)
        rows = out + (begin + local_mixed)[:, None] * FRONT + dim
        gl.store(rows, mixed.to(out.dtype.element_ty), mask=real_mixed)
    elif SPLIT:
        gl.store(parts_lse + slots + local, log, mask=real)
        there = parts_out + (slots + local_mixed)[:, None] * FRONT + dim
        gl.store(there, mixed, mask=real_mixed)


@gluon.jit(do_not_specialize=["table_width", "runs", "blocks", "launched", "few", "parts"])
def latent_kernel(
    query, out, lse, parts_out, parts_lse, memory, spans, tables, query_stride, head_stride,
    page_stride, layer_offset, table_width, runs, blocks, launched, few, parts, scale,
    SPLIT: gl.constexpr, OWN_PARTS: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr,
    GROUP: gl.constexpr, LSE: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """`attend_kernel` for latent keys of 576 numbers in 16 bits: see there."""
    _next_may_begin(DEPENDENT)
    run = gl.program_id(2)
    block, part = blocks - 1 - gl.program_id(0) % blocks, gl.program_id(0) // blocks
    offset, length = gl.load(spans + run), gl.load(spans + runs + run)
    start = gl.load(spans + 2 * runs + run)
    size, count = start + length, 1
    if SPLIT:
        _first, size, count = _count_parts(
            start, length, few, parts, 0, OWN_PARTS, LEAST, MOST, 1, GROUP, ROWS, TILE, False
        )
    begin = part * size
    last_at = start + gl.minimum((block * ROWS + ROWS - 1) // GROUP, length - 1)
    end = gl.minimum(last_at + 1, begin + size)
    table = tables + run.to(gl.int64) * table_width
    keys = memory + layer_offset
    idle = (block * ROWS >= length * GROUP) | (part >= count)
    _inputs_are_there(DEPENDENT)
    if idle:
        return

    KIND: gl.constexpr = memory.dtype.element_ty
    query_front = gl.allocate_shared_memory(KIND, [ROWS, FRONT], _SHARED)
    query_back = gl.allocate_shared_memory(KIND, [ROWS, BACK], _SHARED)
    front = gl.allocate_shared_memory(KIND, [2, TILE, FRONT], _SHARED)
    back = gl.allocate_shared_memory(KIND, [2, TILE, BACK], _SHARED)
    weighed = gl.allocate_shared_memory(KIND, [ROWS, TILE], _SHARED)

    # Of a part that no row sees, one key is read and none counts.
    last = gl.maximum(end, begin + 1)
    _fetch_tile(
        front.index(0), back.index(0), keys, _pages(table, begin, last), begin, last, page_stride
    )
    pages = _pages(table, begin + TILE, last)
    _keep_queries(
        query_front, query, block, offset, length, query_stride, head_stride, GROUP, 0, FRONT,
        _FRONT,
    )
    _keep_queries(
        query_back, query, block, offset, length, query_stride, head_stride, GROUP, FRONT, BACK,
        _BACK,
    )
    fence_async_shared()

    tiles = (front, back, keys, table, page_stride)
    kept = (query_front, query_back, weighed)
    mixed, top, total = _sums(
        kept, tiles, pages, start, block, begin, end, last, scale * LOG2_E, GROUP
    )
    _store(
        (out, lse, parts_out, parts_lse), (mixed, top, total), block, offset, length, count,
        ((run * blocks + block).to(gl.int64) * launched + part) * ROWS, GROUP, SPLIT, LSE,
    )

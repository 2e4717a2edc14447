"""Attention of many heads to latent keys of 576 numbers, on Hopper's tensor cores.

All heads share a key, whose first 512 numbers are its value, so this is work for tensor cores even
for one token: 64 rows of queries and two tiles of keys fill a multiprocessor's shared memory.  In
Gluon, as Triton copies the second tile only when it has computed the first.

Three groups of four warps work side by side.  One copies keys, piece by piece, wherever both others
are done.  These compute the scores of every other tile each, make weights of them, and add values
by the weights of all tiles to their own half of the numbers: while one makes weights, tensor cores
work for the other.  A tile's last 64 numbers are needed for scores alone; its weights take their
place.  (After FlashMLA, https://github.com/deepseek-ai/FlashMLA.)

128 heads on an H200 with products at 790 TFLOP/s, parts added: one run of 131072 positions takes
78 us, four of 65536 134 us, 16 of 32768 261 us, which is 59, 69 and 71 % of that rate.  Without the
copies these take 1.5, without half of the scores 10, without the values 15 % less.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hmt.kernels.triton import pdl
from hmt.kernels.triton.attention import combine
from hmt.kernels.triton.gemm.wgmma_weights import e4m3_pairs, pair_of

# Triton 3.9 has other names for them than 3.6.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

KEY_DIM = tl.constexpr(576)
FRONT = tl.constexpr(512)
BACK = tl.constexpr(64)
HALF = tl.constexpr(256)
ROWS = tl.constexpr(64)
TILE = tl.constexpr(64)
PIECES = tl.constexpr(4)  # of a key's front, each with a barrier of its own
PIECE = tl.constexpr(128)
PANEL = tl.constexpr(64)  # numbers side by side in shared memory
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

_count_parts = gluon.jit(combine.count_parts.fn)
_next_may_begin = gluon.jit(pdl.next_may_begin.fn)
_inputs_are_there = gluon.jit(pdl.inputs_are_there.fn)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_MIXED = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_NUMBERS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PANEL = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_CODES = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
_BACK_CODES = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
_LINES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
_LINE = tl.constexpr(128)  # bytes


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@gluon.jit
def _copy_panels(shared, rows, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Begin to copy panels FIRST .. FIRST + COUNT of rows that begin at `rows`."""
    dim = gl.arange(0, PANEL, layout=gl.SliceLayout(0, _PANEL))
    at = rows[:, None] + dim[None, :]
    for panel in gl.static_range(FIRST, FIRST + COUNT):
        _copy(shared.slice(panel * PANEL, PANEL, dim=1), at + panel * PANEL)


@gluon.jit
def _copy_back(shared, rows):
    dim = FRONT + gl.arange(0, PANEL, layout=gl.SliceLayout(0, _PANEL))
    _copy(shared, rows[:, None] + dim[None, :])


@gluon.jit
def _tile_rows(keys, table, first, last, page_stride):
    """Where the keys of a tile begin; the last key for later ones."""
    position = gl.minimum(first + gl.arange(0, TILE, layout=gl.SliceLayout(1, _PANEL)), last - 1)
    page = gl.load(table + position // 16)
    return keys + (page.to(gl.int64) * page_stride + position % 16 * KEY_DIM)


@gluon.jit
def _bring_numbers(
    shared, bars, asked, place, begin, last, pairs, GROUP: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Copy queries, and tiles of keys as there is room.

    asked   query, its strides, and the row block, offset and length of the run
    place   keys, table, and page_stride
    """
    query_front, query_back, front, back, _tops, _totals = shared
    full, free, _top_there, _weights_there, _total_there = bars
    query, query_stride, head_stride, block, offset, length = asked
    keys, table, page_stride = place
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _PANEL))
    row = gl.where(row // GROUP < length, row, 0)
    token = (row // GROUP + offset).to(gl.int64)
    queries = query + (token * query_stride + row % GROUP * head_stride)
    rows = _tile_rows(keys, table, begin, last, page_stride)
    _inputs_are_there(DEPENDENT)  # and so for the others, who wait for what is copied
    # A barrier opens when all that has been asked for before it is there: queries, too.
    for tile in range(2 * pairs):
        slot = tile % 2
        before = (tile // 2 + 1) & 1
        after = _tile_rows(keys, table, begin + (tile + 1) * TILE, last, page_stride)
        room = front.index(slot)
        for piece in gl.static_range(PIECES):
            if piece == 0:
                mbarrier.wait(free.index(2 * slot), before)
            if piece == PIECES // 2:
                mbarrier.wait(free.index(2 * slot + 1), before)
            if tile == 0:
                _copy_panels(query_front.index(0), queries, 2 * piece, 2)
                if piece == PIECES - 1:
                    _copy_back(query_back.index(0), queries)
            _copy_panels(room, rows, 2 * piece, 2)
            if piece == PIECES - 1:
                _copy_back(back.index(slot), rows)
            async_copy.mbarrier_arrive(full.index(slot * PIECES + piece), increment_count=False)
        rows = after


@gluon.jit
def _copy_queries(
    query_front, query_back, query, query_stride, head_stride, block, offset, length,
    GROUP: gl.constexpr,
):
    """Copy queries, and wait for them."""
    row = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _PANEL))
    row = gl.where(row // GROUP < length, row, 0)
    token = (row // GROUP + offset).to(gl.int64)
    queries = query + (token * query_stride + row % GROUP * head_stride)
    _copy_panels(query_front.index(0), queries, 0, FRONT // PANEL)
    _copy_back(query_back.index(0), queries)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _code_rows(keys, table, first, last, page_stride):
    """As `_tile_rows`, of codes."""
    position = gl.minimum(first + gl.arange(0, TILE, layout=gl.SliceLayout(1, _CODES)), last - 1)
    page = gl.load(table + position // 16)
    return keys + (page.to(gl.int64) * page_stride + position % 16 * KEY_DIM)


@gluon.jit
def _codes(rows, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Codes FIRST .. FIRST + COUNT of rows as words: bytes that wait would be unpacked."""
    rows = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    word = FIRST // 4 + gl.arange(0, COUNT // 4, layout=gl.SliceLayout(0, LAYOUT))
    at = gl.multiple_of(rows.to(gl.pointer_type(gl.int32)), 16)
    return gl.load(at[:, None] + word[None, :])


@gluon.jit
def _numbers(words, COUNT: gl.constexpr):
    """Codes of words in bf16: [TILE, COUNT]."""
    a, b = e4m3_pairs(words)
    both = gl.permute(gl.join(pair_of(a), pair_of(b)), (0, 1, 3, 2))
    return gl.reshape(both, (TILE, COUNT))


@gluon.jit
def _ask_for_rows(rows):
    """Let the L2 cache fetch rows of codes."""
    rows = gl.convert_layout(rows, gl.SliceLayout(1, _LINES), assert_trivial=True)
    line = gl.minimum(gl.arange(0, 8, layout=gl.SliceLayout(0, _LINES)) * _LINE, KEY_DIM - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [rows[:, None] + line[None, :]],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _bring_codes(
    shared, bars, asked, place, begin, last, pairs, GROUP: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """As `_bring_numbers`, of e4m3 that become bf16 on their way, loaded a piece ahead."""
    query_front, query_back, front, back, _tops, _totals = shared
    full, free, _top_there, _weights_there, _total_there = bars
    query, query_stride, head_stride, block, offset, length = asked
    keys, table, page_stride = place
    rows = _code_rows(keys, table, begin, last, page_stride)
    _inputs_are_there(DEPENDENT)
    _copy_queries(
        query_front, query_back, query, query_stride, head_stride, block, offset, length, GROUP
    )
    held = _codes(rows, 0, PIECE, _CODES)
    for tile in range(2 * pairs):
        slot = tile % 2
        before = (tile // 2 + 1) & 1
        after = _code_rows(keys, table, begin + (tile + 1) * TILE, last, page_stride)
        _ask_for_rows(after)
        room = front.index(slot)
        for piece in gl.static_range(PIECES):
            now = held
            if piece < PIECES - 1:
                held = _codes(rows, (piece + 1) * PIECE, PIECE, _CODES)
            else:
                behind = _codes(rows, FRONT, BACK, _BACK_CODES)
                held = _codes(after, 0, PIECE, _CODES)
            if piece == 0:
                mbarrier.wait(free.index(2 * slot), before)
            if piece == PIECES // 2:
                mbarrier.wait(free.index(2 * slot + 1), before)
            room.slice(piece * PIECE, PIECE, dim=1).store(_numbers(now, PIECE))
            if piece == PIECES - 1:
                back.index(slot).store(_numbers(behind, BACK))
            fence_async_shared()
            _barrier()
            mbarrier.arrive(full.index(slot * PIECES + piece))
        rows = after


@gluon.jit
def _bring(
    shared, bars, asked, place, begin, last, pairs, GROUP: gl.constexpr, DEPENDENT: gl.constexpr,
):
    if place[0].dtype.element_ty == gl.uint8:
        _bring_codes(shared, bars, asked, place, begin, last, pairs, GROUP, DEPENDENT)
    else:
        _bring_numbers(shared, bars, asked, place, begin, last, pairs, GROUP, DEPENDENT)


@gluon.jit
def _finite(top):
    """Of rows that have seen nothing: 0."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def _faded(mixed, before, after):
    """Sums over exp2(score - before) as such over exp2(score - after)."""
    fading = gl.exp2(before - _finite(after))
    return mixed * gl.convert_layout(fading, gl.SliceLayout(1, _MIXED))[:, None]


@gluon.jit
def _scores(
    query, keys, full, phase, scores, SLOT: gl.constexpr, FIRST: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Begin to multiply pieces FIRST .. FIRST + COUNT of queries and of the keys in a slot."""
    for piece in gl.static_range(FIRST, FIRST + COUNT):
        mbarrier.wait(full.index(SLOT * PIECES + piece), phase)
        scores = warpgroup_mma(
            query.slice(piece * PIECE, PIECE, dim=1),
            keys.slice(piece * PIECE, PIECE, dim=1).permute((1, 0)),
            scores, use_acc=piece > 0, is_async=True,
        )
    return scores


@gluon.jit
def _seen(scores, first, at, end):
    """Scores of a tile, -inf where a row at `at` does not see a position, or there is none."""
    position = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, _SCORES))
    seen = (position < end)[None, :] & (position[None, :] <= at[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _attend(
    shared, bars, span, results, unit, SIDE: gl.constexpr, GROUP: gl.constexpr,
    SPLIT: gl.constexpr, LSE: gl.constexpr,
):
    """Scores and weights of every other tile, from SIDE on, and half of the sums over all."""
    OTHER: gl.constexpr = 1 - SIDE
    query_front, query_back, front, back, tops, totals = shared
    full, free, top_there, weights_there, total_there = bars
    start, block, begin, end, pairs, offset, length, count, slots = span
    at = start + (block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _SCORES))) // GROUP
    first_at = start + block * ROWS // GROUP
    mixed = gl.zeros([ROWS, HALF], gl.float32, layout=_MIXED)
    own_top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, _SCORES))
    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, _SCORES))
    nothing = gl.zeros([ROWS, TILE], gl.float32, layout=_SCORES)
    for pair in range(pairs):
        phase = pair & 1
        # The other's tile before this one; the first has none, and what it adds is not kept.
        real = (pair > 0) | (SIDE == 1)
        # 0, which the compiler does not know: it would keep the addresses of all operands.
        none = pair >> 24
        asked, keys = query_front.index(none), front.index(SIDE + none)
        # Half of the products before the other's weights are expected, half behind them.
        scoring = _scores(asked, keys, full, phase, nothing, SIDE, 0, PIECES // 2)
        mbarrier.wait(top_there.index(OTHER), (pair + OTHER) & 1)
        top = gl.where(real, tops.index(OTHER).load(gl.SliceLayout(1, _SCORES)), float("-inf"))
        mixed = _faded(mixed, own_top, top)
        mbarrier.wait(weights_there.index(OTHER), (pair + OTHER) & 1)
        values = front.index(OTHER + none).slice(SIDE * HALF, HALF, dim=1)
        mixing = warpgroup_mma(back.index(OTHER + none), values, mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=(mixing,))
        _barrier()
        mbarrier.arrive(free.index(2 * OTHER + SIDE), pred=real)
        scoring = _scores(asked, keys, full, phase, scoring, SIDE, PIECES // 2, PIECES // 2)
        scoring = warpgroup_mma(
            query_back.index(none), back.index(SIDE + none).permute((1, 0)), scoring, is_async=True
        )
        scores, mixed = warpgroup_mma_wait(0, deps=(scoring, mixed))

        first = begin + (2 * pair + SIDE) * TILE
        if first + TILE > gl.minimum(first_at + 1, end):
            scores = _seen(scores, first, at, end)
        above = gl.maximum(top, gl.max(scores, 1) * unit)
        tops.index(SIDE).store(above)
        _barrier()
        mbarrier.arrive(top_there.index(SIDE))
        finite = _finite(above)
        weights = gl.exp2(scores * unit - finite[:, None])
        back.index(SIDE).store(weights.to(back.dtype))
        fence_async_shared()
        _barrier()
        mbarrier.arrive(weights_there.index(SIDE))
        total = total * gl.exp2(own_top - finite) + gl.sum(weights, 1)
        mixed = _faded(mixed, top, above)
        values = front.index(SIDE + none).slice(SIDE * HALF, HALF, dim=1)
        mixing = warpgroup_mma(back.index(SIDE + none), values, mixed, use_acc=real, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=(mixing,))
        _barrier()
        mbarrier.arrive(free.index(2 * SIDE + SIDE))
        own_top = above
    top = own_top
    if SIDE == 0:
        mbarrier.wait(top_there.index(OTHER), (pairs + 1) & 1)
        top = tops.index(OTHER).load(gl.SliceLayout(1, _SCORES))
        mixed = _faded(mixed, own_top, top)
        mbarrier.wait(weights_there.index(OTHER), (pairs + 1) & 1)
        values = front.index(OTHER).slice(SIDE * HALF, HALF, dim=1)
        mixing = warpgroup_mma(back.index(OTHER), values, mixed, is_async=True)
        total = total * gl.exp2(own_top - _finite(top))
        mixed = warpgroup_mma_wait(0, deps=(mixing,))
    totals.index(SIDE).store(total)
    _barrier()
    mbarrier.arrive(total_there.index(SIDE))
    mbarrier.wait(total_there.index(OTHER), 0)
    total += totals.index(OTHER).load(gl.SliceLayout(1, _SCORES))
    _store(
        results, (mixed, top, total), block, offset, length, count, slots, SIDE, GROUP, SPLIT, LSE
    )


@gluon.jit
def _store(
    results, sums, block, offset, length, count, slots, SIDE: gl.constexpr, GROUP: gl.constexpr,
    SPLIT: gl.constexpr, LSE: gl.constexpr,
):
    """Divide half of the sums, and write them to the result, or to the slots of a part."""
    out, lse, parts_out, parts_lse = results
    mixed, top, total = sums
    divisor = gl.where(total == 0, 1.0, total)
    log = gl.where(total == 0, float("-inf"), top + gl.log2(divisor))
    mixed = mixed * gl.convert_layout(1 / divisor, gl.SliceLayout(1, _MIXED))[:, None]
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _SCORES))
    local_mixed = gl.arange(0, ROWS, layout=gl.SliceLayout(1, _MIXED))
    dim = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, _MIXED))[None, :]
    real = (block * ROWS + local) // GROUP < length
    real_mixed = ((block * ROWS + local_mixed) // GROUP < length)[:, None]
    if count == 1:
        begin = offset.to(gl.int64) * GROUP + block * ROWS
        if LSE and SIDE == 0:
            gl.store(lse + begin + local, log * LN_2, mask=real)
        rows = out + (begin + local_mixed)[:, None] * FRONT + dim
        gl.store(rows, mixed.to(out.dtype.element_ty), mask=real_mixed)
    elif SPLIT:
        if SIDE == 0:
            gl.store(parts_lse + slots + local, log, mask=real)
        there = parts_out + (slots + local_mixed)[:, None] * FRONT + dim
        gl.store(there, mixed, mask=real_mixed)


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that open when COUNT threads have arrived."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUMBER):
        mbarrier.init(made.index(index), count=COUNT)
    return made


@gluon.jit(do_not_specialize=["table_width", "runs", "blocks", "launched", "few", "parts"])
def latent_kernel(
    query, out, lse, parts_out, parts_lse, memory, spans, tables, query_stride, head_stride,
    page_stride, layer_offset, table_width, runs, blocks, launched, few, parts, scale,
    SPLIT: gl.constexpr, OWN_PARTS: gl.constexpr, LEAST: gl.constexpr, MOST: gl.constexpr,
    GROUP: gl.constexpr, LSE: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """`attend_kernel` for latent keys of 576 numbers in 16 bits, in four warps: see there."""
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
    if (block * ROWS >= length * GROUP) | (part >= count):
        _inputs_are_there(DEPENDENT)
        return

    KIND: gl.constexpr = query.dtype.element_ty
    CODES: gl.constexpr = memory.dtype.element_ty == gl.uint8
    query_front = gl.allocate_shared_memory(KIND, [1, ROWS, FRONT], _SHARED)
    query_back = gl.allocate_shared_memory(KIND, [1, ROWS, BACK], _SHARED)
    front = gl.allocate_shared_memory(KIND, [2, TILE, FRONT], _SHARED)
    back = gl.allocate_shared_memory(KIND, [2, TILE, BACK], _SHARED)
    tops = gl.allocate_shared_memory(gl.float32, [2, ROWS], _NUMBERS)
    totals = gl.allocate_shared_memory(gl.float32, [2, ROWS], _NUMBERS)
    full = _barriers(2 * PIECES, 1 if CODES else 128)
    free, top_there, weights_there, total_there = (
        _barriers(4, 1), _barriers(2, 1), _barriers(2, 1), _barriers(2, 1)
    )
    fence_async_shared()

    # Of a part that no row sees, one key is read and none counts.
    last = gl.maximum(end, begin + 1)
    pairs = gl.cdiv(last - begin, 2 * TILE)
    slots = ((run * blocks + block).to(gl.int64) * launched + part) * ROWS
    span = (start, block, begin, end, pairs, offset, length, count, slots)
    shared = (query_front, query_back, front, back, tops, totals)
    bars = (full, free, top_there, weights_there, total_there)
    results = (out, lse, parts_out, parts_lse)
    asked = (query, query_stride, head_stride, block, offset, length)
    place = (memory + layer_offset, tables + run.to(gl.int64) * table_width, page_stride)
    unit = scale * LOG2_E
    gl.warp_specialize(
        [
            (_bring, (shared, bars, asked, place, begin, last, pairs, GROUP, DEPENDENT)),
            (_attend, (shared, bars, span, results, unit, 0, GROUP, SPLIT, LSE)),
            (_attend, (shared, bars, span, results, unit, 1, GROUP, SPLIT, LSE)),
        ],
        [4, 4], [216, 216],
    )

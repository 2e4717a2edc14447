"""Results of attention: sums divided and written, and the parts of a context as one."""

import triton
import triton.language as tl

from hmt.kernels.triton.dependent import inputs_are_there, next_may_begin
from hmt.kernels.triton.tiles import LN_2, LOG2_E, log_of


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def count_parts(
    start, length, few, parts, window, OWN_PARTS: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr,
):
    """Where the tile begins that holds the first token a run sees, tokens in a part, and parts.

    A function of the run alone.  `plans.Plan` says what the sizes mean.
    """
    first = start * 0
    if WINDOW:
        first = tl.maximum(start - window + 1, 0) // TILE * TILE
    seen = start + length - first
    if OWN_PARTS:
        parts = tl.maximum(parts // (tl.cdiv(length * GROUP, ROWS) * HEADS), 1)
        few = parts
    small = tl.minimum(tl.cdiv(seen, few * LEAST) * LEAST, MOST)
    size = tl.maximum(tl.maximum(small, tl.cdiv(seen, parts * LEAST) * LEAST), LEAST)
    return first, size, tl.maximum(tl.cdiv(seen, size), 1)


@triton.jit
def group_rows(row, offset, length, head, GROUP: tl.constexpr):
    """Rows of a KV head as token of the step, query head, and whether there is such a row."""
    real = row // GROUP < length
    return tl.where(real, row // GROUP, 0) + offset, head * GROUP + row % GROUP, real


@triton.jit
def store_rows(
    out, lse, mixed, log, token, q_head, real, dim, Q_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, LSE: tl.constexpr,
):
    """Write rows, and their log-sum-exp, given in powers of 2."""
    result = token.to(tl.int64) * Q_HEADS + q_head
    if LSE:
        tl.store(lse + result, log * LN_2, real)
    at = out + result[:, None] * VALUE_DIM + dim[None, :]
    mask = real[:, None] & (dim < VALUE_DIM)[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask)


@triton.jit
def store_result(
    out, lse, sinks, sums, token, q_head, real, dim, Q_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):
    """Divide the sums of a context that is one part, and write them."""
    mixed, top, total = sums
    if SINKS:
        sink = tl.load(sinks + q_head) * LOG2_E
        above = tl.maximum(top, sink)
        finite = tl.where(above == float("-inf"), 0.0, above)
        fading = tl.exp2(top - finite)
        mixed *= fading[:, None]
        total = total * fading + tl.exp2(sink - finite)
        top = above
    mixed /= tl.where(total == 0, 1.0, total)[:, None]
    store_rows(
        out, lse, mixed, log_of(top, total), token, q_head, real, dim, Q_HEADS, VALUE_DIM, LSE
    )


@triton.jit
def merged(
    out, lse, parts_out, parts_lse, sinks, slot, count, local, token, q_head, real, dim,
    Q_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, PADDED_PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Add `count` parts, from `slot` on, of rows `local` of a row block, and write them.

    In their order, AT_ONCE on their way.  (All parts as one tensor took 2 us more on an H200.)
    """
    NEAR: tl.constexpr = local.shape[0]
    CHUNK: tl.constexpr = dim.shape[0]
    every = tl.arange(0, PADDED_PARTS)[None, :]
    logs = parts_lse + (slot + every) * ROWS + local[:, None]
    known = real[:, None] & (every < count)
    top = tl.max(tl.load(logs, known, float("-inf"), cache_modifier=".cg"), 1)
    if SINKS:
        sink = tl.load(sinks + q_head) * LOG2_E
        top = tl.maximum(top, sink)
    finite = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((NEAR,), tl.float32)
    mixed = tl.zeros((NEAR, CHUNK), tl.float32)
    for part in range(0, count, AT_ONCE):
        for near in tl.static_range(AT_ONCE):
            at = (slot + part + near) * ROWS + local
            valid = real & (local * 0 + part + near < count)
            log = tl.load(parts_lse + at, valid, float("-inf"), cache_modifier=".cg")
            mask = valid[:, None] & (dim < VALUE_DIM)[None, :]
            there = parts_out + at[:, None] * VALUE_DIM + dim[None, :]
            some = tl.load(there, mask, 0.0, cache_modifier=".cg")
            weight = tl.exp2(log - finite)
            total += weight
            mixed += some * weight[:, None]
    if SINKS:
        total += tl.exp2(sink - finite)
    mixed /= tl.where(total == 0, 1.0, total)[:, None]
    store_rows(
        out, lse, mixed, log_of(finite, total), token, q_head, real, dim, Q_HEADS, VALUE_DIM, LSE
    )


@triton.jit
def merged_by_last(
    out, lse, parts_out, parts_lse, sinks, arrived, group, launched, count, local, token, q_head,
    real, dim, Q_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """`merged`, by the program of row block `group` that is last to arrive here.

    Up to 16 parts; more are left to `merge_kernel`.  The count of programs becomes zero again.
    """
    if count <= 16:
        tl.debug_barrier()  # the count is of programs all of whose threads have written
        before = tl.atomic_add(arrived + group, 1, sem="acq_rel", scope="gpu")
        if before == count - 1:
            tl.store(arrived + group, 0)
            merged(
                out, lse, parts_out, parts_lse, sinks, group.to(tl.int64) * launched, count, local,
                token, q_head, real, dim, Q_HEADS, VALUE_DIM, ROWS, SINKS, LSE, 16, AT_ONCE,
            )


@triton.jit(do_not_specialize=["runs", "blocks", "launched", "few", "parts", "window"])
def merge_kernel(
    out, lse, parts_out, parts_lse, spans, sinks, runs, blocks, launched, few, parts, window,
    OWN_PARTS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    NEAR: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED_PARTS: tl.constexpr,
    DONE: tl.constexpr, AT_ONCE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """The parts of NEAR rows as one, CHUNK numbers of them; runs of up to DONE parts are ready.

    Program (chunk + CHUNKS * rows, row block + blocks * KV head, run).
    """
    next_may_begin(DEPENDENT)
    run = tl.program_id(2)
    head, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    chunk, local = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS * NEAR
    offset, length = tl.load(spans + run), tl.load(spans + runs + run)
    start = tl.load(spans + 2 * runs + run)
    count = count_parts(
        start, length, few, parts, window, OWN_PARTS, LEAST, MOST, HEADS, GROUP, ROWS, TILE, WINDOW
    )[2]
    inputs_are_there(DEPENDENT)
    if (block * ROWS + local >= length * GROUP) | (count <= DONE):
        return
    rows = local + tl.arange(0, NEAR)
    token, q_head, real = group_rows(block * ROWS + rows, offset, length, head, GROUP)
    group = (run * HEADS + head) * blocks + block
    merged(
        out, lse, parts_out, parts_lse, sinks, group.to(tl.int64) * launched, count, rows, token,
        q_head, real, chunk * CHUNK + tl.arange(0, CHUNK), HEADS * GROUP, VALUE_DIM, ROWS, SINKS,
        LSE, PADDED_PARTS, AT_ONCE,
    )

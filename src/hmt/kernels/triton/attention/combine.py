"""Results of attention: sums divided and written, and the parts of a context as one."""

import triton
import triton.language as tl

from hmt.kernels.triton.attention.kv_tiles import LN_2, LOG2_E, log_of
from hmt.kernels.triton.pdl import inputs_are_there, next_may_begin


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
    result = token.to(tl.int64) * Q_HEADS + q_head
    if LSE:
        tl.store(lse + result, log_of(top, total) * LN_2, real)
    at = out + result[:, None] * VALUE_DIM + dim[None, :]
    mask = real[:, None] & (dim < VALUE_DIM)[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask)


@triton.jit
def store_part(
    parts_out, parts_lse, sums, slot, real, dim, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
):
    """Divide the sums of a part, and write them to its slot."""
    mixed, top, total = sums
    result = slot * ROWS + tl.arange(0, ROWS)
    tl.store(parts_lse + result, log_of(top, total), real)
    mixed /= tl.where(total == 0, 1.0, total)[:, None]
    at = parts_out + result[:, None] * VALUE_DIM + dim[None, :]
    tl.store(at, mixed, real[:, None] & (dim < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["runs", "blocks", "launched", "few", "parts", "window"])
def merge_kernel(
    out, lse, parts_out, parts_lse, spans, sinks, runs, blocks, launched, few, parts, window,
    OWN_PARTS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED_PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """The parts of one row as one, CHUNK numbers of them; contexts of one part are ready.

    Program (chunk + CHUNKS * row of a block, row block + blocks * KV head, run).  Parts are added
    in their order, AT_ONCE being read at once.
    """
    next_may_begin(DEPENDENT)
    run = tl.program_id(2)
    head, block = tl.program_id(1) // blocks, tl.program_id(1) % blocks
    chunk, local = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    offset, length = tl.load(spans + run), tl.load(spans + runs + run)
    start = tl.load(spans + 2 * runs + run)
    count = count_parts(
        start, length, few, parts, window, OWN_PARTS, LEAST, MOST, HEADS, GROUP, ROWS, TILE, WINDOW
    )[2]
    row = block * ROWS + local
    inputs_are_there(DEPENDENT)
    if (row >= length * GROUP) | (count == 1):
        return
    q_head = head * GROUP + row % GROUP
    slot = ((run * HEADS + head) * blocks + block).to(tl.int64) * launched
    every = tl.arange(0, PADDED_PARTS)
    logs = parts_lse + (slot + every) * ROWS + local
    top = tl.max(tl.load(logs, every < count, float("-inf")), 0)
    if SINKS:
        sink = tl.load(sinks + q_head) * LOG2_E
        top = tl.maximum(top, sink)
    finite = tl.where(top == float("-inf"), 0.0, top)
    dim = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    total = finite * 0
    mixed = tl.zeros((1, CHUNK), tl.float32)
    for part in range(0, count, AT_ONCE):
        near = part + tl.arange(0, AT_ONCE)[:, None]
        at = (slot + near) * ROWS + local
        log = tl.load(parts_lse + at, near < count, float("-inf"))
        mask = (near < count) & (dim < VALUE_DIM)
        some = tl.load(parts_out + at * VALUE_DIM + dim, mask, 0.0)
        weight = tl.exp2(log - finite)
        total += tl.sum(tl.sum(weight, 1), 0)
        mixed += tl.sum(some * weight, 0)[None, :]
    if SINKS:
        total += tl.exp2(sink - finite)
    mixed /= tl.where(total == 0, 1.0, total)
    result = (offset + row // GROUP).to(tl.int64) * (HEADS * GROUP) + q_head
    tl.store(out + result * VALUE_DIM + dim, mixed.to(out.dtype.element_ty), dim < VALUE_DIM)
    if LSE and chunk == 0:
        tl.store(lse + result, log_of(finite, total) * LN_2)

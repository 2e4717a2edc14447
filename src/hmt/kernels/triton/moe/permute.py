"""Tokens sorted by expert on the device, and outputs of pairs added up by token again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.kernels.triton.moe.weight_table import ExpertTable

_NOBODY = tl.constexpr(1 << 40)  # above every expert


# One variant for all numbers of tokens: a second, for multiples of 16, took 0.3 to 3 s to compile.
@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(chosen, order, begins, counts, pairs, CHUNK: tl.constexpr):
    """Axis 0: experts.  Each looks for its pairs by itself, so they stay in order of tokens."""
    expert = tl.program_id(0)
    before = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        value = tl.load(chosen + pair, mask=pair < pairs, other=_NOBODY)
        before += ((value >= 0) & (value < expert)).to(tl.int32)
    begin = tl.sum(before, axis=0)
    found = begin * 0
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        mine = tl.load(chosen + pair, mask=pair < pairs, other=_NOBODY) == expert
        place = tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(order + begin + found + place, pair, mask=mine)
        found += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(begins + expert, begin)
    tl.store(counts + expert, found)


# What `sort_pairs` gives.
SortedPairs = tuple[Tensor, Tensor, Tensor]


def sort_pairs(chosen: Tensor, experts: int) -> SortedPairs:
    """Pairs of chosen [tokens, top_k], contiguous, by expert: (order, begins, counts), all int32.

    order [pairs] holds pair numbers token * top_k + slot; those of expert e are
    order[begins[e] : begins[e] + counts[e]], ascending.  Experts that are none have no place.
    """
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    begins, counts = (
        torch.empty(experts, dtype=torch.int32, device=chosen.device) for _ in range(2)
    )
    chunk = min(2048, max(16, triton.next_power_of_2(chosen.numel())))
    _sort_kernel[(experts,)](
        chosen, order, begins, counts, chosen.numel(), CHUNK=chunk, num_warps=4
    )
    return order, begins, counts


@triton.jit
def _tiles_kernel(
    table, counts, tiles, experts, most,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Axis 0: TILES tiles."""
    each = tl.arange(0, EXPERTS)
    count = tl.load(counts + each, mask=each < experts, other=0)
    here = tl.load(table + each, mask=each < experts, other=0) != 0
    wanted = tl.where(here, tl.cdiv(count, TOKENS), 0)
    ends = tl.cumsum(wanted, axis=0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    past = ends[None, :] <= tile[:, None]
    expert = tl.sum(past.to(tl.int32), axis=1)
    before = tl.max(tl.where(past, ends[None, :], 0), axis=1)
    found = expert < experts
    tl.store(tiles + tile * 2, tl.where(found, expert, -1), mask=tile < most)
    tl.store(tiles + tile * 2 + 1, (tile - before) * TOKENS, mask=tile < most)


def tiles_of(counts: Tensor, table: ExpertTable, pairs: int, together: int) -> Tensor:
    """Which tiles of `together` sorted pairs there are: int32 [most, 2].

    Each is an expert that is here, or -1 behind the last, and the first of its pairs.  Experts
    follow each other; the table's first row of addresses says which are here.
    """
    most = pairs // together + min(pairs, table.experts)
    tiles = torch.empty(most, 2, dtype=torch.int32, device=counts.device)
    at_once = 32
    _tiles_kernel[(triton.cdiv(most, at_once),)](
        table.addresses, counts, tiles, table.experts, most,
        EXPERTS=triton.next_power_of_2(table.experts), TOKENS=together, TILES=at_once, num_warps=4,
    )  # fmt: skip
    return tiles


@triton.jit
def _combine_kernel(
    y, chosen, scales, table, experts, total, out, width,
    TOP: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    ADD: tl.constexpr, KEEP: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Axis 0: tokens; axis 1: COLUMNS columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    slot = tl.arange(0, LANES)
    expert = tl.load(chosen + token * TOP + slot, mask=slot < TOP, other=_NOBODY)
    known = (expert >= 0) & (expert < experts)
    here = known & (tl.load(table + tl.where(known, expert, 0)) != 0)
    by = tl.load(scales + token * TOP + slot, mask=slot < TOP, other=0.0)
    some = tl.sum(here.to(tl.int32), axis=0) > 0
    if some | (not ADD) | LAST:  # else the total stays as it is
        left = tl.where(here, expert, _NOBODY)
        whole = tl.zeros((COLUMNS,), tl.float32)
        if ADD:
            whole = tl.load(total + token * width + column, mask=inside, other=0.0)
        for _ in tl.static_range(TOP):
            least = tl.min(left, axis=0)
            first = (left == least) & (least != _NOBODY)
            exists = tl.sum(first.to(tl.int32), axis=0) > 0
            place = tl.sum(tl.where(first, slot, 0), axis=0)
            scale = tl.sum(tl.where(first, by, 0.0), axis=0)
            row = y + (token * TOP + place) * width + column
            # After the last expert that is here: the row of the first slot again, which is cached.
            value = tl.load(row, mask=inside, other=0.0).to(tl.float32)
            whole += tl.where(exists, value * scale, 0.0)
            left = tl.where(left == least, _NOBODY, left)
        if KEEP:
            tl.store(total + token * width + column, whole, mask=inside)
        if LAST:
            tl.store(out + token * width + column, whole.to(out.dtype.element_ty), mask=inside)


def combine(
    y: Tensor,
    table: ExpertTable,
    chosen: Tensor,
    scales: Tensor,
    total: Tensor | None,
    out: Tensor,
    *,
    last: bool,
) -> None:
    """Rows of y [pairs, width] times scales, added by token in ascending order of experts.

    The sum starts at `total` f32 [tokens, width] and is written there; in the dtype of `out` to
    `out` if this is the last call.  Without `total` and before the last call, `out` is f32.
    """
    tokens, top = chosen.shape
    width = y.shape[1]
    columns = 1024 if tokens >= 64 else 256
    whole = out if total is None else total
    _combine_kernel[(tokens, triton.cdiv(width, columns))](
        y, chosen, scales, table.addresses, table.experts, whole, out, width,
        TOP=top, LANES=triton.next_power_of_2(top), COLUMNS=columns,
        ADD=total is not None, KEEP=total is not None or not last, LAST=last,
        num_warps=4 if columns == 1024 else 2,
    )  # fmt: skip

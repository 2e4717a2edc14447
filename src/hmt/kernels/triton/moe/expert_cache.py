"""`reference.expert_cache` on the GPU: one program divides, and many copy over the link.

Nothing of it waits for the host, so a step with it can be captured.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.kernels.reference.expert_cache import (
    SCORE_DECAY,
    WORTH_BRINGING,
    Cuts,
    ExpertShares,
    ExpertSlots,
)
from hmt.kernels.triton.device_math import key_index, keys
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin
from hmt.kernels.triton.weight_codes import pointers

_NO_KEY = tl.constexpr(-(1 << 63))  # below every key
_PAIRS = 16  # of a token and an expert, looked at together
# Of one expert.  Enough to have more on its way than the link holds: 64 programs of 128 threads
# with eight loads of 16 bytes are 1 MiB, and 55 GB/s for 2 us are 110 KB.
_COPYING_PROGRAMS = 64
_WORDS = 4096  # int32, of a program at a time


@triton.jit
def _any_of(one, chosen, pairs, PAIRS: tl.constexpr):
    """int32 [n]: 1 where `one` [n] is among the `chosen`."""
    found = tl.zeros(one.shape, tl.int32)
    for start in range(0, pairs, PAIRS):
        at = start + tl.arange(0, PAIRS)
        some = tl.load(chosen + at, mask=at < pairs, other=-2)
        equal = (one[:, None] == some[None, :]).to(tl.int32)
        found = tl.maximum(found, tl.max(equal, axis=1))
    return found


@triton.jit
def _shared_out(exact, most, pays, PIECES: tl.constexpr):
    """Of `exact` experts those that are brought whole, and the pieces of one more.

    One at least where that `pays`.
    """
    if PIECES > 0:
        quota = tl.floor(exact)
        part = tl.floor((exact - quota) * PIECES).to(tl.int32)
        quota = quota.to(tl.int32)
    else:
        quota = tl.floor(exact + 0.5).to(tl.int32)
        part = quota * 0
    more = pays & (quota == 0)
    quota = tl.where(more, 1, quota)
    part = tl.where(more | (quota >= most), 0, part)
    return tl.minimum(quota, most), part


@triton.jit
def _gain(fetch_key, score, expert, slot_key, worth, slot):
    """By how much the best of what is missing has been wanted more than the least of what goes."""
    best, lowest = tl.max(fetch_key, axis=0), tl.max(slot_key, axis=0)
    its_score = tl.sum(tl.where(expert == key_index(best), score, 0.0), axis=0)
    its_worth = tl.sum(tl.where(slot == key_index(lowest), worth, 0.0), axis=0)
    none = (best == _NO_KEY) | (lowest == _NO_KEY)
    return tl.where(none, -1.0, its_score - its_worth)


@triton.jit
def _leave(here, chosen, pairs, halved, on_host, PAIRS: tl.constexpr):
    """Those of the `chosen` that the host computes, or a part of which it does."""
    for start in range(0, pairs, PAIRS):
        at = start + tl.arange(0, PAIRS)
        one = tl.load(chosen + at, mask=at < pairs, other=0)
        away = (tl.load(here + one, mask=at < pairs, other=0) == 0) | (one == halved)
        tl.store(on_host + at, tl.where(away, one, -1), mask=at < pairs)


@triton.jit
def _count(counts, found, brought, left, pieces):
    tl.store(counts, tl.load(counts) + found)
    tl.store(counts + 1, tl.load(counts + 1) + brought)
    tl.store(counts + 2, tl.load(counts + 2) + left)
    tl.store(counts + 3, tl.load(counts + 3) + pieces)


@triton.jit
def _divide_kernel(
    table, addresses, holders, scores, staging, counts, chosen, share,
    here, sources, targets, on_host, left, cut, pairs, experts, slots, most, decay,
    worth_bringing,
    LANES: tl.constexpr, SLOTS: tl.constexpr, PAIRS: tl.constexpr, FETCHED: tl.constexpr,
    PIECES: tl.constexpr, PIECE_ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program.  LANES, SLOTS and FETCHED are powers of two that hold all.

    PIECES   of an expert that may be cut; 0: none may
    """
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    expert = tl.arange(0, LANES)
    exists = expert < experts
    needed = _any_of(expert.to(tl.int64), chosen, pairs, PAIRS) * exists.to(tl.int32)
    where = tl.load(table + expert, mask=exists, other=0)
    score = tl.load(scores + expert, mask=exists, other=0.0) * decay + needed.to(tl.float32)
    missing = (needed > 0) & (where == 0)
    count = tl.sum(missing.to(tl.int32), axis=0)

    slot = tl.arange(0, SLOTS)
    holder = tl.load(holders + slot, mask=slot < slots, other=-1)
    wanted = _any_of(tl.where(holder < 0, -1, holder), chosen, pairs, PAIRS)
    # One that is held and not wanted now has its old score, a little decayed.
    worth = tl.load(scores + holder, mask=holder >= 0, other=0.0) * decay
    worth = tl.where(holder < 0, -1.0, worth)
    free = (slot < slots) & ((holder < 0) | (wanted == 0))
    tl.debug_barrier()  # all have read the old scores
    tl.store(scores + expert, score, mask=exists)
    fetch_key = tl.where(missing, keys(score, expert), _NO_KEY)
    slot_key = tl.where(free, keys(-worth, slot), _NO_KEY)
    pays = _gain(fetch_key, score, expert, slot_key, worth, slot) >= worth_bringing
    portion = tl.load(share)
    exact = portion * count.to(tl.float32)
    quota, part = _shared_out(exact, most, pays & (portion > 0), PIECES)

    number = tl.arange(0, FETCHED)
    tl.store(sources + number, tl.full((FETCHED,), -1, tl.int64), mask=number < most)
    tl.store(targets + number, tl.zeros((FETCHED,), tl.int64), mask=number < most)
    tl.debug_barrier()
    now = where
    for i in range(0, quota):
        best = tl.max(fetch_key, axis=0)
        fetch_key = tl.where(fetch_key == best, _NO_KEY, fetch_key)
        brought = key_index(best)
        its_score = tl.sum(tl.where(expert == brought, score, 0.0), axis=0)
        lowest = tl.max(slot_key, axis=0)
        slot_key = tl.where(slot_key == lowest, _NO_KEY, slot_key)
        victim = key_index(lowest)
        its_worth = tl.sum(tl.where(slot == victim, worth, 0.0), axis=0)
        stays = (lowest != _NO_KEY) & (its_score > its_worth)
        target = tl.load(staging + i)
        if stays:
            target = tl.load(addresses + victim)
            old = tl.sum(tl.where(slot == victim, holder, 0), axis=0)
            where = tl.where(expert == old, 0, where)
            where = tl.where(expert == brought, target, where)
            holder = tl.where(slot == victim, brought, holder)
        now = tl.where(expert == brought, target, now)
        tl.store(sources + i, brought.to(tl.int64))
        tl.store(targets + i, target)
    halved = count * 0 - 1
    if PIECES > 0:  # noqa: SIM102 - the one is for the compiler, the other for the card
        if part > 0:  # it goes to a place of its own, and does not stay
            halved = key_index(tl.max(fetch_key, axis=0)).to(tl.int32)
            its_place = tl.load(staging + quota)
            now = tl.where(expert == halved, its_place, now)
            tl.store(sources + quota, halved.to(tl.int64))
            tl.store(targets + quota, its_place)
    tl.store(cut, halved)
    tl.store(cut + 1, part * PIECE_ROWS)
    tl.store(table + expert, where, mask=exists)
    tl.store(holders + slot, holder, mask=slot < slots)
    tl.store(here + expert, now, mask=exists)
    tl.store(left, count - quota)
    tl.debug_barrier()  # `here` is read below
    _leave(here, chosen, pairs, halved, on_host, PAIRS)
    _count(counts, tl.sum(needed, axis=0) - count, quota, count - quota, part)


@triton.jit
def _fetch_kernel(
    origins, sources, targets, cut, regions, words, WORDS: tl.constexpr, PROGRAMS: tl.constexpr,
    REGIONS: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: programs of one expert; axis 1: experts to bring.

    Of the one that is cut, into PIECES of ROWS inner numbers, only what `regions` have of its own.
    """
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    expert = tl.load(sources + tl.program_id(1))
    halved = tl.load(cut)
    kept = tl.load(cut + 1) // ROWS
    if expert >= 0:
        # As blocks of one pointer each: a single one cannot be said to be aligned.
        one = tl.zeros((1,), tl.int64)
        start = pointers(tl.load(origins + expert) + one, tl.int32)
        to = pointers(tl.load(targets + tl.program_id(1)) + one, tl.int32)
        for first in range(tl.program_id(0) * WORDS, words, PROGRAMS * WORDS):
            # What is copied is decided for 16 bytes at once, so that they stay one load.
            four = first + tl.arange(0, WORDS // 4) * 4
            inside = four < words
            if REGIONS > 0:  # noqa: SIM102 - the one is for the compiler, the other for the card
                if expert == halved:
                    for region in tl.static_range(REGIONS):
                        begin = tl.load(regions + region * 3)
                        count = tl.load(regions + region * 3 + 1)
                        period = tl.load(regions + region * 3 + 2)
                        own = (four >= begin) & (four < begin + count)
                        inside &= (own == 0) | ((four - begin) % period < period // PIECES * kept)
            at = four[:, None] + tl.arange(0, 4)[None, :]
            mask = inside[:, None]
            some = tl.load(start[:, None] + at, mask=mask, other=0)
            tl.store(to[:, None] + at, some, mask=mask)


def divide_experts(
    slots: ExpertSlots, chosen: Tensor, share: Tensor, cuts: Cuts | None = None
) -> ExpertShares:
    """See `reference.divide_experts`."""
    experts, most = len(slots.table), len(slots.staging)
    chosen = chosen.contiguous()
    shares = ExpertShares(
        torch.empty_like(slots.table),
        torch.empty_like(slots.staging),
        torch.empty_like(slots.staging),
        torch.empty_like(chosen),
        torch.empty(1, dtype=torch.int32, device=chosen.device),
        torch.empty(2, dtype=torch.int32, device=chosen.device),
    )
    _divide_kernel[(1,)](
        slots.table, slots.addresses, slots.holders, slots.scores, slots.staging, slots.counts,
        chosen, share, shares.here, shares.sources, shares.targets, shares.on_host, shares.left,
        shares.cut, chosen.numel(), experts, len(slots.addresses), most, SCORE_DECAY,
        WORTH_BRINGING,
        LANES=triton.next_power_of_2(experts),
        SLOTS=triton.next_power_of_2(max(1, len(slots.addresses))), PAIRS=_PAIRS,
        FETCHED=triton.next_power_of_2(max(1, most)), PIECES=0 if cuts is None else cuts.pieces,
        PIECE_ROWS=0 if cuts is None else cuts.rows, num_warps=8,
        **dependent(chosen.device),
        enable_fp_fusion=False,  # scores are rounded as the reference rounds them
    )  # fmt: skip
    return shares


def fetch_experts(
    slots: ExpertSlots, shares: ExpertShares, nbytes: int, cuts: Cuts | None = None
) -> None:
    """See `reference.fetch_experts`; reads host memory where it is.  `nbytes`: a multiple of 16."""
    assert nbytes % 16 == 0
    if len(slots.staging):
        _fetch_kernel[(_COPYING_PROGRAMS, len(slots.staging))](
            slots.origins, shares.sources, shares.targets, shares.cut,
            shares.cut if cuts is None else cuts.regions, nbytes // 4,
            WORDS=_WORDS, PROGRAMS=_COPYING_PROGRAMS,
            REGIONS=0 if cuts is None else len(cuts.regions),
            PIECES=1 if cuts is None else cuts.pieces, ROWS=1 if cuts is None else cuts.rows,
            num_warps=4, **dependent(shares.sources.device),
        )  # fmt: skip

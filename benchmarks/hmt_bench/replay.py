"""Replays of traces of experts: with guesses, and with the best choices there are."""

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from hmt.bench.replay import Cache, Hits, Sizes
from hmt.bench.replay import replay as replayed
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.engine.experts.predictor import PredictionSource, Trust, candidates
from hmt.engine.experts.trace import Routed
from hmt.weights.eviction import EvictionPolicy


def replay(
    trace: Sequence[Routed],
    sizes: Sizes,
    capacity_bytes: int,
    make_policy: Callable[[Callable[[], float]], EvictionPolicy],
    *,
    guesses: bool = False,
    skip: int = 0,
) -> Hits:
    """Run `trace` through a cache; `make_policy(pressure)` makes the policy.

    With `guesses`, what the trace predicted for a layer, and is as probable as the engine wants it,
    is read before its router chooses, as if the disk always had the time.  It never makes a block
    go that was wanted in the layer before.  The first `skip` records are not counted.
    """
    cache: Cache
    cache = Cache(make_policy(lambda: cache.pressure()), sizes, capacity_bytes)
    return replayed(trace, cache, skip=skip, read_ahead=_Ahead(guesses))


class _Ahead:
    """What happens before a router chooses: guesses are read, and the policy is told of it."""

    def __init__(self, guesses: bool) -> None:
        self._guesses = guesses
        self._before: Sequence[BlockId] = ()
        self._trust = Trust()

    def __call__(self, cache: Cache, record: Routed) -> int:
        read = 0
        if self._guesses and record.guess is not None:
            read = _guess(cache, record, self._before, self._trust)
        self._before = record.blocks()
        if routed := getattr(cache.policy, "routed", None):
            routed(record.layer, torch.tensor(record.experts), torch.tensor(record.scales))
        return read


def _guess(cache: Cache, record: Routed, before: Sequence[BlockId], trust: Trust) -> int:
    """Read what was predicted, is probable and is not cached; the bytes."""
    assert record.guess is not None
    absent = [
        (expert, kind)
        for expert, kind in candidates(record.guess, PredictionSource.ROUTER)
        if _block(record, expert) not in cache.blocks
    ]
    blocks = [_block(record, expert) for expert, kind in absent if trust.probable(kind)]
    keep = (*before, *(_block(record, e) for token in record.guess for e in token))
    trust.learn(absent, {expert for token in record.experts for expert in token})
    return sum(cache.size(block) for block in blocks if cache.admit(block, keep))


def _block(record: Routed, expert: int) -> BlockId:
    return BlockId(record.layer, BlockKind.EXPERT, expert)


def best(trace: Sequence[Routed], sizes: Sizes, capacity_bytes: int, *, skip: int = 0) -> Hits:
    """Belady's MIN: the block goes that is needed last (IBM Systems Journal 5(2), 1966).

    Each block is cut into its bytes, which may go one by one, so with blocks of different sizes
    this is a bound in bytes that no policy beats; with equal sizes and room for a whole number of
    them it is what the best policy does.  Reading earlier saves no read, so misses and guesses
    together are never fewer either.
    """
    accesses = [(number, block) for number, r in enumerate(trace) for block in r.blocks()]
    places: dict[BlockId, list[int]] = defaultdict(list)
    for at, (_, block) in enumerate(accesses):
        places[block].append(at)
    cached: dict[BlockId, int] = {}
    farthest: list[tuple[int, BlockId]] = []
    used = 0
    hits = Hits()
    for at, (number, block) in enumerate(accesses):
        nbytes = sizes[block]
        have = cached.pop(block, 0)
        used -= have
        if number >= skip:
            hits.reads += 1
            hits.needed_bytes += nbytes
            hits.missed_bytes += nbytes - have
        if nbytes > capacity_bytes:
            continue
        used += nbytes
        while used > capacity_bytes:
            victim = farthest[0][1]
            if cached.get(victim, 0) == 0 or -farthest[0][0] != _next(places[victim], at):
                heapq.heappop(farthest)  # gone, or used since
                continue
            part = min(cached[victim], used - capacity_bytes)
            cached[victim] -= part
            used -= part
        cached[block] = nbytes
        heapq.heappush(farthest, (-_next(places[block], at), block))
    return hits


def _next(places: list[int], after: int) -> int:
    """The first place behind `after`; beyond all of them when there is none."""
    index = bisect_right(places, after)
    return places[index] if index < len(places) else 1 << 60

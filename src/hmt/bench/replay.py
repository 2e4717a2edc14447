"""Replaying a trace of experts through cache policies, and through the best choices there are."""

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.engine.experts.predictor import PredictionSource, Trust, candidates
from hmt.engine.experts.trace import Routed
from hmt.weights.eviction import EvictionPolicy

Sizes = Mapping[BlockId, int]


@dataclass(slots=True)
class Hits:
    """What a cache made of a trace.

    reads           experts that were needed, once per layer and step
    needed_bytes    of all of them
    missed_bytes    of those that were not cached when the router chose them
    guessed_bytes   read because they were foreseen
    """

    reads: int = 0
    needed_bytes: int = 0
    missed_bytes: int = 0
    guessed_bytes: int = 0

    @property
    def rate(self) -> float:
        """Share of what was needed that was served from memory, by bytes."""
        return 1.0 - self.missed_bytes / self.needed_bytes if self.needed_bytes else 0.0


class Cache:
    """Blocks in `capacity_bytes` by a policy, as the store keeps them: what is wanted now stays."""

    def __init__(self, policy: EvictionPolicy, sizes: Sizes, capacity_bytes: int) -> None:
        self.policy = policy
        self.blocks: set[BlockId] = set()
        self.used_bytes = 0
        self._sizes = sizes
        self._capacity = capacity_bytes

    def pressure(self) -> float:
        """Share of the capacity that is in use."""
        return self.used_bytes / self._capacity if self._capacity else 1.0

    def size(self, block: BlockId) -> int:
        """Bytes of `block`."""
        return self._sizes[block]

    def admit(self, block: BlockId, keep: Iterable[BlockId]) -> bool:
        """Cache `block`; blocks of `keep` make room last.  False where it can never fit."""
        nbytes = self._sizes[block]
        if nbytes > self._capacity:
            return False
        if self.used_bytes + nbytes > self._capacity:
            self._make_room(nbytes, set(keep))
        self.blocks.add(block)
        self.used_bytes += nbytes
        self.policy.cached(block)
        return True

    def _make_room(self, nbytes: int, keep: set[BlockId]) -> None:
        free = self._capacity - self.used_bytes
        victims, last = [], []
        for block in self.policy.eviction_order():
            if free >= nbytes:
                break
            if block in keep:
                last.append(block)
            else:
                victims.append(block)
                free += self._sizes[block]
        for block in last:
            if free >= nbytes:
                break
            victims.append(block)
            free += self._sizes[block]
        for victim in victims:
            self.policy.removed(victim)
            self.blocks.remove(victim)
            self.used_bytes -= self._sizes[victim]


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

    With `guesses`, what the trace foresaw for a layer, and is as probable as the engine wants it,
    is read before its router chooses, as if the disk always had the time.  It never makes a block
    go that was wanted in the layer before.  The first `skip` records are not counted.
    """
    cache: Cache
    policy = make_policy(lambda: cache.pressure())
    cache = Cache(policy, sizes, capacity_bytes)
    hits = Hits()
    before: Sequence[BlockId] = ()
    trust = Trust()
    for number, record in enumerate(trace):
        counted = number >= skip
        blocks = record.blocks()
        if guesses and record.guess is not None:
            read = _guess(cache, record, before, trust)
            if counted:
                hits.guessed_bytes += read
        policy.routed(record.layer, torch.tensor(record.experts), torch.tensor(record.scales))
        for block in blocks:
            if counted:
                hits.reads += 1
                hits.needed_bytes += sizes[block]
            if block not in cache.blocks:
                if counted:
                    hits.missed_bytes += sizes[block]
                if not cache.admit(block, blocks):
                    continue
            policy.used(block)
        before = blocks
    return hits


def _guess(cache: Cache, record: Routed, before: Sequence[BlockId], trust: Trust) -> int:
    """Read what was foreseen, is probable and is not cached; the bytes."""
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

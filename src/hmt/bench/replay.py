"""Replaying a trace of experts through a cache policy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hmt.contracts.blocks import BlockId
from hmt.engine.experts.trace import Routed
from hmt.weights.eviction import EvictionPolicy

Sizes = Mapping[BlockId, int]


@dataclass(slots=True)
class Hits:
    """What a cache made of a trace.

    reads           experts that were needed, once per layer and step
    needed_bytes    of all of them
    missed_bytes    of those that were not cached when the router chose them
    guessed_bytes   read ahead
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


ReadAhead = Callable[[Cache, Routed], int]


def replay(
    trace: Sequence[Routed], cache: Cache, *, skip: int = 0, read_ahead: ReadAhead | None = None
) -> Hits:
    """Run `trace` through a cache.

    skip         records at the beginning that are not counted
    read_ahead   read_ahead(cache, record) runs before the router of `record` chooses, and returns
                 how many bytes it read
    """
    hits = Hits()
    for number, record in enumerate(trace):
        counted = number >= skip
        ahead = read_ahead(cache, record) if read_ahead is not None else 0
        hits.guessed_bytes += ahead if counted else 0
        blocks = record.blocks()
        for block in blocks:
            absent = block not in cache.blocks
            if counted:
                hits.reads += 1
                hits.needed_bytes += cache.size(block)
                hits.missed_bytes += cache.size(block) if absent else 0
            if not absent or cache.admit(block, blocks):
                cache.policy.used(block)
    return hits

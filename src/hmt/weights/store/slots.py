"""Places for blocks in a tier: of any size while there is memory, or of each size so many."""

from collections import Counter
from collections.abc import Mapping

from hmt.contracts.blocks import BlockKind
from hmt.memory import HostBuffer, HostPool
from hmt.weights.layout import BlockLayout


class SlotPool:
    """A pool's buffers, by the counts of a plan.  Guarded by the store's lock.

    With counts a block takes the place of one of its own size, always, or of the next one where
    its own has none, and the pool's memory is never cut up.  Without them it takes that of any
    others, as many as it needs.
    """

    def __init__(self, pool: HostPool, counts: Mapping[int, int] | None = None) -> None:
        """`counts` slots by size in bytes, for which `pool` has room; larger ones share."""
        self.pool = pool
        self._counts = counts or {}
        self._sizes: dict[int, int] = {}  # of slots, by bytes: asked for every block in memory
        self._taken: Counter[int] = Counter()

    def take(self, nbytes: int) -> HostBuffer | None:
        """A slot of `nbytes`, or more; None when others have to go first."""
        size = self._size(nbytes)
        if size in self._counts and self._taken[size] >= self._counts[size]:
            return None
        slot = self.pool.try_allocate(size)
        if slot is not None:
            self._taken[size] += 1
        return slot

    def give_back(self, slot: HostBuffer, nbytes: int) -> None:
        """Free a slot that was taken for `nbytes`."""
        self.pool.free(slot)
        self._taken[self._size(nbytes)] -= 1

    def missing_bytes(self, nbytes: int) -> int:
        """What has to be given back before a block of `nbytes` can have a slot; 0: any one slot."""
        if self._size(nbytes) in self._counts:
            return 0
        return nbytes - (self.pool.account.limit_bytes - self.pool.in_use_bytes)

    def makes_room(self, layout: BlockLayout, wanted_bytes: int) -> bool:
        """Whether a block that goes is of use to one of `wanted_bytes`.

        Parts of a tower are outside of the counts, and may lie in any memory that was free.
        """
        size = self._size(wanted_bytes)
        if size not in self._counts or layout.id.kind is BlockKind.VISION:
            return True
        return self._size(layout.slot_bytes) == size

    def _size(self, nbytes: int) -> int:
        """Of the slot that a block of `nbytes` takes: the least that holds it, if there is one."""
        if nbytes not in self._sizes:
            enough = (size for size in self._counts if size >= nbytes)
            self._sizes[nbytes] = min(enough, default=nbytes)
        return self._sizes[nbytes]

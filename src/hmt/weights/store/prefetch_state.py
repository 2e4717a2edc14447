"""Which blocks are expected, how surely, and what became of those that were read on a guess."""

from collections.abc import Sequence
from dataclasses import dataclass

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.store import Priority
from hmt.weights.store.block_state import BlockState


@dataclass(slots=True)
class StoreCounters:
    """What leases found, since the store was made."""

    hits: int = 0
    pending: int = 0
    misses: int = 0
    waited_s: float = 0.0
    host_bytes: int = 0  # bytes of blocks that were leased, from whichever tier they had come


@dataclass(slots=True)
class PrefetchCounters:
    """Sums since the store was made.

    begun           blocks whose read began on a guess
    in_time, late   of them: needed when they were in memory; needed while they were being read
    unneeded_bytes  of those that nobody has needed so far
    experts         leases of experts that live on disk
    expert_reads    of them, those that had to be read: because they were needed, or on a guess
    """

    begun: int = 0
    in_time: int = 0
    late: int = 0
    unneeded_bytes: int = 0
    experts: int = 0
    expert_reads: int = 0


class PrefetchState:
    """Keeps `awaited` and `urgent` of entries, and counts guesses.

    Not thread-safe: the store holds its lock.
    """

    def __init__(self) -> None:
        self.counters = PrefetchCounters()
        self.urgent_reads = 0  # under way; a guess beside them would take half of the disk
        self._speculative: list[BlockState] = []  # awaited on a guess
        self._probable: list[BlockState] = []  # experts that were asked for before they were chosen
        self._unneeded: dict[BlockId, int] = {}  # guesses that nobody has needed yet: bytes

    def read_begins(self, entry: BlockState, priority: Priority) -> None:
        """`entry`, which was absent, is read for who asked for it."""
        entry.awaited = priority
        self._remember(entry, priority)
        if priority is Priority.SPECULATIVE:
            self._speculative.append(entry)
            self.counters.begun += 1
            self.counters.unneeded_bytes += entry.layout.read_bytes
            self._unneeded[entry.layout.id] = entry.layout.read_bytes
        else:
            self._hurry(entry)
            self._count_read(entry)

    def requested(self, entry: BlockState, priority: Priority) -> None:
        """`entry`, which is there or on its way, has been asked for."""
        if priority is Priority.SPECULATIVE:
            if entry.awaited is None:
                self._speculative.append(entry)
        else:
            self.needed(entry)
            if entry.load is not None:
                self._hurry(entry)
        if entry.load is not None:
            entry.load.promote(priority)
        self._remember(entry, priority)
        entry.awaited = priority if entry.awaited is None else min(priority, entry.awaited)

    def leased(self, entry: BlockState) -> None:
        """`entry` is needed now, there or not."""
        self.counters.experts += _streamed_expert(entry)
        self.needed(entry)

    def needed(self, entry: BlockState) -> None:
        """Count a guess that came true, once."""
        nbytes = self._unneeded.pop(entry.layout.id, None)
        if nbytes is not None:
            self.counters.unneeded_bytes -= nbytes
            self.counters.in_time += entry.load is None
            self.counters.late += entry.load is not None
            self._count_read(entry)

    def read_ended(self, entry: BlockState) -> None:
        """The read of `entry` has ended, well or not."""
        if entry.urgent:
            entry.urgent = False
            self.urgent_reads -= 1

    def dropped(self, entry: BlockState, *, unread: bool = False) -> None:
        """`entry` is no longer there: when it is needed, no guess will have helped.

        With `unread` it never was: the guess was cancelled and does not count.
        """
        entry.awaited = None
        nbytes = self._unneeded.pop(entry.layout.id, None)
        if unread and nbytes is not None:
            self.counters.begun -= 1
            self.counters.unneeded_bytes -= nbytes

    @property
    def held(self) -> bool:
        """Whether some block is there, or on its way, which the next `replaced` may let go."""
        return bool(self._speculative or self._probable)

    def replaced(self, priority: Priority, kept: Sequence[BlockId]) -> None:
        """`kept` is asked for now, and what was asked for with this priority before is not.

        Guesses need not stay, nor experts that were probable, and then not chosen.
        """
        if priority is Priority.SPECULATIVE:
            self.forget_speculative(kept)
        elif priority is Priority.PREFETCH and self._probable:
            before, self._probable = self._probable, []
            wanted = set(kept)
            for entry in before:
                if entry.layout.id not in wanted and entry.awaited is Priority.PREFETCH:
                    entry.awaited = None

    def abandon(self) -> None:
        """The step that asked has failed: nothing need stay for it."""
        self.forget_speculative()
        self._probable.clear()

    def forget_speculative(self, kept: Sequence[BlockId] = ()) -> bool:
        """Blocks that are only guessed need not stay, and reads of them need not begin.

        But those of `kept`.  True when the memory of some came free at once.
        """
        stale, self._speculative = self._speculative, []
        loading = []
        for entry in stale:
            if entry.layout.id in kept:
                self._speculative.append(entry)
                continue
            if entry.awaited is Priority.SPECULATIVE:
                entry.awaited = None
            if entry.load is not None and not entry.urgent:
                loading.append((entry, entry.load))
        for _, load in loading:
            load.cancel_speculative()
        return any(entry.load is not load for entry, load in loading)

    def _remember(self, entry: BlockState, priority: Priority) -> None:
        if priority is Priority.PREFETCH and _streamed_expert(entry):
            self._probable.append(entry)

    def _count_read(self, entry: BlockState) -> None:
        self.counters.expert_reads += _streamed_expert(entry)

    def _hurry(self, entry: BlockState) -> None:
        if not entry.urgent:
            entry.urgent = True
            self.urgent_reads += 1


def _streamed_expert(entry: BlockState) -> bool:
    return not entry.stays and entry.layout.id.kind is BlockKind.EXPERT

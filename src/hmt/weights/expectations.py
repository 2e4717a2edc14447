"""Which blocks somebody expects, how surely, and what became of those that were read on a guess."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from hmt.contracts.blocks import BlockId
from hmt.contracts.store import Priority
from hmt.weights.layout import BlockLayout
from hmt.weights.loading import BlockLoad


@dataclass(slots=True)
class GuessCounters:
    """Sums since the store was made.

    begun           blocks whose read began on a guess
    in_time, late   of them: needed when they were in memory; needed while they were being read
    unneeded_bytes  of those that nobody has needed so far
    """

    begun: int = 0
    in_time: int = 0
    late: int = 0
    unneeded_bytes: int = 0


class Expected(Protocol):
    """A block that is in a slot, or is being read into one.

    load      its read, while it is under way
    awaited   as what it was asked for, until it is leased; it keeps its slot meanwhile
    urgent    it is being read, and not on a guess alone
    """

    layout: BlockLayout
    load: BlockLoad | None
    awaited: Priority | None
    urgent: bool


class Expectations:
    """Keeps `awaited` and `urgent` of blocks, and counts guesses.

    Not thread-safe: the store holds its lock.
    """

    def __init__(self) -> None:
        self.counters = GuessCounters()
        self.urgent_reads = 0  # under way; a guess beside them would take half of the drive
        self._guessed: list[Expected] = []  # awaited on a guess
        self._unneeded: dict[BlockId, int] = {}  # guesses that nobody has needed yet: bytes

    def read_begins(self, entry: Expected, priority: Priority) -> None:
        """`entry`, which was absent, is read for who asked for it."""
        entry.awaited = priority
        if priority is Priority.GUESS:
            self._guessed.append(entry)
            self.counters.begun += 1
            self.counters.unneeded_bytes += entry.layout.read_bytes
            self._unneeded[entry.layout.id] = entry.layout.read_bytes
        else:
            self._hurry(entry)

    def asked(self, entry: Expected, priority: Priority) -> None:
        """`entry`, which is there or on its way, has been asked for."""
        if priority is Priority.GUESS:
            if entry.awaited is None:
                self._guessed.append(entry)
        else:
            self.needed(entry)
            if entry.load is not None:
                self._hurry(entry)
        if entry.load is not None:
            entry.load.promote(priority)
        entry.awaited = priority if entry.awaited is None else min(priority, entry.awaited)

    def needed(self, entry: Expected) -> None:
        """Count a guess that came true, once."""
        nbytes = self._unneeded.pop(entry.layout.id, None)
        if nbytes is not None:
            self.counters.unneeded_bytes -= nbytes
            self.counters.in_time += entry.load is None
            self.counters.late += entry.load is not None

    def read_ended(self, entry: Expected) -> None:
        """The read of `entry` has ended, well or not."""
        if entry.urgent:
            entry.urgent = False
            self.urgent_reads -= 1

    def dropped(self, entry: Expected) -> None:
        """`entry` is no longer there: when it is needed, no guess will have helped."""
        entry.awaited = None
        self._unneeded.pop(entry.layout.id, None)

    def forget_guesses(self) -> None:
        """Blocks that are only guessed need not stay."""
        while self._guessed:
            entry = self._guessed.pop()
            if entry.awaited is Priority.GUESS:
                entry.awaited = None

    def forget(self, entries: Iterable[Expected]) -> None:
        """Nobody expects anything any more; `entries` are all there are."""
        self._guessed.clear()
        for entry in entries:
            entry.awaited = None

    def _hurry(self, entry: Expected) -> None:
        if not entry.urgent:
            entry.urgent = True
            self.urgent_reads += 1

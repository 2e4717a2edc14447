"""What a sequence holds besides its pages: slots of another size.  Numbers only."""

from collections.abc import Set
from typing import Protocol

import numpy as np

from hmt.kvcache.page_table import Ints
from hmt.memory import Bitmap


class SlotCopies(Protocol):
    """Keeps copies in spare slots that it can do without; a StateCheckpoints."""

    @property
    def in_use(self) -> int:
        """Spare slots that it has."""
        ...

    def give_up_one(self) -> None:
        """Give one of them back, by `give_spare`."""
        ...


class SequenceSlots:
    """`count` slots, of which a sequence takes one for each of its pages, and `most` at most.

    A sliding window's ring has slots of the size of a page.  State of a fixed size per sequence is
    the case of `most` = 1.  There may be `spare` slots besides, of the same memory: for sequences
    that are parked, for copies, and for what a step writes on a guess.  A parked sequence keeps its
    slot, and another one may take a spare one for it, so nothing is copied.

    copies   who gives up spare slots where none is free
    """

    def __init__(self, count: int, most: int, spare: int = 0) -> None:
        self.count = count
        self.most = most
        self.spare = spare
        self.copies: SlotCopies | None = None
        self._free = Bitmap(count + spare)
        self._spare_free = spare
        self._slots: dict[int, Ints] = {}
        self._parked: set[int] = set()
        self._others: dict[int, int] = {}

    @property
    def sequences(self) -> Set[int]:
        """Those that have slots."""
        return self._slots.keys()

    @property
    def spare_free(self) -> int:
        """Spare slots that are free."""
        return self._spare_free

    def of(self, sequence: int) -> Ints:
        """Slots of a sequence, in the order in which it took them.  Replaced, never changed."""
        return self._slots[sequence]

    def can_open(self, pages: int) -> bool:
        """Whether there is room for a sequence of so many pages."""
        return min(pages, self.most) <= self._room

    def open(self, sequence: int, pages: int) -> None:
        """Slots for a sequence that may have so many pages; there must be room."""
        self._slots[sequence] = self._take(min(pages, self.most))

    def can_grow(self, sequence: int, pages: int) -> bool:
        """Whether there is room for a sequence to become so many pages."""
        return min(pages, self.most) - len(self._slots[sequence]) <= self._room

    def grow(self, sequence: int, pages: int) -> None:
        """Let a sequence have the slots of so many pages; there must be room."""
        held = self._slots[sequence]
        if (more := min(pages, self.most) - len(held)) > 0:
            self._slots[sequence] = np.concatenate((held, self._take(more)))

    def close(self, sequence: int) -> None:
        """Give a sequence's slots back."""
        self._free.give(self._slots.pop(sequence).tolist())
        if sequence in self._others:
            self.give_spare(self._others.pop(sequence))
        if sequence in self._parked:
            self._parked.remove(sequence)
            self._spare_free += 1

    # Sequences that wait

    def can_park(self) -> bool:
        """Whether another sequence could have a slot in the place of one that is parked."""
        copies = 0 if self.copies is None else self.copies.in_use
        return self.most == 1 and self._spare_free + len(self._others) + copies > 0

    def park(self, sequence: int) -> None:
        """Let a spare slot stand for that of a sequence, if there is one."""
        if sequence in self._others:
            self.give_spare(self._others.pop(sequence))
        if self.can_park() and sequence not in self._parked:
            self._free_a_spare()
            self._spare_free -= 1
            self._parked.add(sequence)

    def can_resume(self, sequence: int) -> bool:
        """Whether a sequence that may be parked would find a slot that is not spare."""
        return sequence not in self._parked or self._room > 0

    def resume(self, sequence: int) -> None:
        """Give back the spare slot that stood for a sequence's; there must be room."""
        if sequence in self._parked:
            self._parked.remove(sequence)
            self._spare_free += 1

    # Spare slots

    def take_spare(self) -> int | None:
        """A spare slot that is free, for a copy; None: there is none."""
        if not self._spare_free:
            return None
        self._spare_free -= 1
        return self._free.take(1)[0]

    def give_spare(self, slot: int) -> None:
        """Give back what `take_spare` gave."""
        self._free.give([slot])
        self._spare_free += 1

    def other(self, sequence: int) -> int | None:
        """A spare slot beside that of a sequence, for `exchange`; None: there is none.

        It stays the same until it is exchanged or others need it.
        """
        if sequence not in self._others:
            if not self._spare_free and self.copies is not None and self.copies.in_use:
                self.copies.give_up_one()
            slot = self.take_spare()
            if slot is None:
                return None
            self._others[sequence] = slot
        return self._others[sequence]

    def has_other(self, sequence: int) -> bool:
        """Whether a sequence has a slot beside its own, as `other` gave it."""
        return sequence in self._others

    def exchange(self, sequence: int) -> None:
        """Let a sequence have its other slot, and its own be the other one."""
        (own,), other = self._slots[sequence].tolist(), self._others[sequence]
        self._slots[sequence], self._others[sequence] = np.array([other]), own

    def _free_a_spare(self) -> None:
        """For a sequence that is parked; `can_park`."""
        if self._spare_free:
            return
        if self._others:
            self.give_spare(self._others.popitem()[1])
        elif self.copies is not None:
            self.copies.give_up_one()

    @property
    def _room(self) -> int:
        """Slots that sequences can take."""
        return self._free.free - self._spare_free

    def _take(self, count: int) -> Ints:
        return np.array(self._free.take(count), dtype=np.int64)

"""What a sequence holds besides its pages: slots of another size.  Numbers only."""

from collections.abc import Set

import numpy as np

from hmt.kvcache.page_table import Ints
from hmt.memory import Bitmap


class SequenceSlots:
    """`count` slots, of which a sequence takes one for each of its pages, and `most` at most.

    A sliding window's ring has slots of the size of a page.  State of a fixed size per sequence is
    the case of `most` = 1.
    """

    def __init__(self, count: int, most: int) -> None:
        self.count = count
        self.most = most
        self._free = Bitmap(count)
        self._slots: dict[int, Ints] = {}

    @property
    def sequences(self) -> Set[int]:
        """Those that have slots."""
        return self._slots.keys()

    def of(self, sequence: int) -> Ints:
        """Slots of a sequence, in the order in which it took them.  Replaced, never changed."""
        return self._slots[sequence]

    def can_open(self, pages: int) -> bool:
        """Whether there is room for a sequence of so many pages."""
        return min(pages, self.most) <= self._free.free

    def open(self, sequence: int, pages: int) -> None:
        """Slots for a sequence that may have so many pages; there must be room."""
        self._slots[sequence] = self._take(min(pages, self.most))

    def can_grow(self, sequence: int, pages: int) -> bool:
        """Whether there is room for a sequence to become so many pages."""
        return min(pages, self.most) - len(self._slots[sequence]) <= self._free.free

    def grow(self, sequence: int, pages: int) -> None:
        """Let a sequence have the slots of so many pages; there must be room."""
        held = self._slots[sequence]
        if (more := min(pages, self.most) - len(held)) > 0:
            self._slots[sequence] = np.concatenate((held, self._take(more)))

    def close(self, sequence: int) -> None:
        """Give a sequence's slots back."""
        self._free.give(self._slots.pop(sequence).tolist())

    def _take(self, count: int) -> Ints:
        return np.array(self._free.take(count), dtype=np.int64)

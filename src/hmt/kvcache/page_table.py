"""Which pages there are, who shares them, and at which level each lies: numbers, no tensors."""

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hmt.memory import Bitmap

Ints = NDArray[np.int64]


class PageTier(enum.IntEnum):
    """Where a page can lie, nearest to computation first."""

    DEVICE = 0  # where its layers compute
    HOST = 1  # host memory, as a rule in fewer bits
    DISK = 2  # the disk


class PageSlots(Protocol):
    """Places for pages at one level."""

    @property
    def count(self) -> int:
        """In all."""
        ...

    @property
    def free(self) -> int:
        """That can be taken."""
        ...

    def take(self, wanted: int) -> list[int]:
        """`wanted` free places, at most `free`."""
        ...

    def give(self, numbers: Iterable[int]) -> None:
        """Free places that were taken."""
        ...


class PageTable:
    """Pages by id.  A page has one place at one level, and as many owners as share it.

    A page in use may move between levels; its id stays, so that nobody's table changes.
    """

    def __init__(self, levels: Sequence[PageSlots]) -> None:
        total = sum(slots.count for slots in levels)
        self.levels = tuple(levels)
        self._ids = Bitmap(total)
        self._level = np.zeros(total, dtype=np.int8)
        self._slot = np.zeros(total, dtype=np.int64)
        self._owners = np.zeros(total, dtype=np.int32)
        self._made = np.zeros(total, dtype=np.int64)

    @property
    def count(self) -> int:
        """Pages that there is room for, over all levels."""
        return len(self._owners)

    @property
    def free(self) -> int:
        """Pages that can still be made."""
        return self._ids.free

    def free_at(self, level: PageTier) -> int:
        """Places that are free at `level`; 0 where there is no such level."""
        return self.levels[level].free if level < len(self.levels) else 0

    def new(self, count: int, level: PageTier = PageTier.DEVICE) -> Ints:
        """`count` pages at `level`, each with one owner; there must be room there."""
        slots = self.levels[level].take(count)
        ids = np.array(self._ids.take(count), dtype=np.int64)
        self._level[ids] = level
        self._slot[ids] = slots
        self._owners[ids] = 1
        self._made[ids] += 1
        return ids

    def share(self, ids: Ints) -> None:
        """One more owner for each of `ids`."""
        assert (self._owners[ids] > 0).all(), "a page that nobody owns cannot be shared"
        np.add.at(self._owners, ids, 1)

    def drop(self, ids: Ints) -> Ints:
        """One owner less for each of `ids`; those that nobody owns any more, which are free now."""
        np.subtract.at(self._owners, ids, 1)
        assert (self._owners[ids] >= 0).all(), "a page was given back twice"
        gone = np.unique(ids[self._owners[ids] == 0])
        for level, slots in enumerate(self.levels):
            if len(there := gone[self._level[gone] == level]):
                slots.give(self._slot[there].tolist())
        self._ids.give(gone.tolist())
        return gone

    def reserve(self, count: int, level: PageTier) -> Ints:
        """Places at `level`, for a move."""
        return np.array(self.levels[level].take(count), dtype=np.int64)

    def move(self, ids: Ints, level: PageTier, reserved: Ints | None = None) -> tuple[Ints, Ints]:
        """Give `ids`, all at one other level, places at `level`: (old, new) places.

        Whoever calls copies what is there before the old places, which are free now, are used.
        """
        assert (self._level[ids] != level).all(), "they are there already"
        left = PageTier(int(self._level[ids[0]]))
        assert (self._level[ids] == left).all(), "from one level at a time"
        new = self.reserve(len(ids), level) if reserved is None else reserved
        old = self._slot[ids].copy()
        self.levels[left].give(old.tolist())
        self._level[ids] = level
        self._slot[ids] = new
        return old, new

    def shared(self, page: int) -> bool:
        """Whether a page has several owners."""
        return bool(self._owners[page] > 1)

    def alone(self, ids: Ints) -> NDArray[np.bool_]:
        """Which of `ids` have one owner."""
        return self._owners[ids] == 1

    def owned(self, ids: Ints) -> NDArray[np.bool_]:
        """Which of `ids` are in use."""
        return self._owners[ids] > 0

    def made(self, ids: Ints) -> Ints:
        """How many pages have had these ids until now."""
        return self._made[ids]

    def freed_by(self, ids: Ints) -> int:
        """Places that `ids` would leave, could they all go now."""
        freed = 0
        for level, slots in enumerate(self.levels):
            there = self._slot[ids[self._level[ids] == level]]
            freed += slots.freed_by(there) if isinstance(slots, GroupedPageSlots) else len(there)
        return freed

    def level_of(self, ids: Ints) -> NDArray[np.int8]:
        """Levels of pages."""
        return self._level[ids]

    def slots_of(self, ids: Ints) -> Ints:
        """Their places at these levels."""
        return self._slot[ids]

    def at(self, level: PageTier) -> Ints:
        """All pages at `level`, by id."""
        return np.flatnonzero((self._owners > 0) & (self._level == level))


class GroupedPageSlots:
    """Places that are written and freed by groups: what a disk reads and writes at once.

    A group's places are taken in a row.  It can be used again when all of them are free; until then
    those that were given back lie idle, and count as taken.
    """

    def __init__(self, groups: int, size: int) -> None:
        self.count = groups * size
        self.size = size
        self._groups = Bitmap(groups)
        self._used = np.zeros(groups, dtype=np.int32)  # places of a group that are in use

    @property
    def free(self) -> int:
        """Places in groups that are free as a whole."""
        return self._groups.free * self.size

    def take(self, wanted: int) -> list[int]:
        """`wanted` places in groups of their own; the last of them may stay unfilled."""
        groups = self._groups.take(-(-wanted // self.size))
        taken: list[int] = []
        for group in groups:
            count = min(self.size, wanted - len(taken))
            self._used[group] = count
            taken += range(group * self.size, group * self.size + count)
        return taken

    def give(self, numbers: Iterable[int]) -> None:
        """Free places that were taken."""
        groups, counts = np.unique(np.array([*numbers]) // self.size, return_counts=True)
        self._used[groups] -= counts.astype(np.int32)
        assert (self._used[groups] >= 0).all(), "a place was given back twice"
        self._groups.give(groups[self._used[groups] == 0].tolist())

    def freed_by(self, numbers: Ints) -> int:
        """Places that could be taken again if `numbers` were given back: those of whole groups."""
        groups, counts = np.unique(numbers // self.size, return_counts=True)
        return int((self._used[groups] == counts).sum()) * self.size

"""Pages that are written to the drive while steps are computed.

A page stays where it is, and is read there, until its place is needed by another; if it is on the
drive by then, nobody waits.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from hmt.base.log import logger
from hmt.contracts.kv import GROUP_PAGES, KVAccount
from hmt.kvcache.book import Level, Numbers, PageBook
from hmt.kvcache.cold import ColdPages
from hmt.kvcache.drive_forms import Mask
from hmt.kvcache.store import PageStore


@dataclass(slots=True)
class _Group:
    """Pages at `level` of which the drive has a copy at `places`, once that is `written`.

    void   somebody may write to one of the pages again: the copy is worth nothing
    """

    ids: Numbers
    made: Numbers  # which of the pages of these ids they are
    level: Level
    places: Numbers
    low: Mask | None
    written: Future[None]
    void: bool = False


class WrittenAhead:
    """Groups of pages that are being written to the drive, or have been.  For one thread.

    Pages may be given up meanwhile, and their ids used again: their group is forgotten then.  Where
    writing failed its pages stay what they were, and are written again when their room is needed.

    works   False after a failure, until the drive has taken pages again
    """

    def __init__(
        self,
        book: PageBook,
        cold: ColdPages,
        account: KVAccount,
        moved: Callable[[Numbers, Level, Level], None],
    ) -> None:
        """`moved` is told ids, from where and to where, of pages that have gone."""
        self._book = book
        self._cold = cold
        self._account = account
        self._moved = moved
        self._groups: list[_Group] = []
        self.works = True

    @property
    def pages(self) -> int:
        """That have a place at two levels, in whole groups."""
        return GROUP_PAGES * len(self._groups)

    @property
    def ids(self) -> Numbers:
        """Of these pages."""
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(group.ids for group in self._groups)])

    def begin(self, ids: Numbers, source: PageStore, low: Mask | None) -> None:
        """Begin to write a group of pages, all at one level, which is in host memory: `source`."""
        assert len(ids) == GROUP_PAGES
        level = Level(int(self._book.level_of(ids[:1])[0]))
        slots, places = self._book.slots_of(ids), self._book.reserve(GROUP_PAGES, Level.COLD)
        written = self._cold.write(places, source, slots, low)
        made = self._book.made(ids)
        self._groups.append(_Group(ids, made, level, places, low, written))

    def forget(self, stays: Numbers) -> None:
        """Give up copies of pages that nobody owns any more, and those that were not written.

        stays   pages that are not to move away, among them all that the next step writes to
        """
        for group in [*self._groups]:
            group.void |= bool(np.isin(group.ids, stays).any())
            if group.written.done() and not (self._still_there(group) and self._is_written(group)):
                self._drop(group)

    def land(self, level: Level, wanted: int) -> None:
        """Let pages go that are on the drive, until `wanted` places are free at `level`.

        Waits for those that are still being written if there are too few without.
        """
        for group in [*self._groups]:
            if self._book.free_at(level) >= wanted:
                return
            if group.level is not level:
                continue
            if not group.written.done():
                begin = time.perf_counter()
                group.written.exception()
                self._account.stalled_s += time.perf_counter() - begin
            if not (self._still_there(group) and self._is_written(group)):
                self._drop(group)
                continue
            self._groups.remove(group)
            self._book.move(group.ids, Level.COLD, group.places)
            self._account.ahead_pages += GROUP_PAGES
            self._account.low_pages += 0 if group.low is None else int(group.low.sum())
            self._moved(group.ids, level, Level.COLD)

    def close(self) -> None:
        """Wait for what is being written, and forget it."""
        for group in [*self._groups]:
            group.written.exception()
            self._drop(group)

    def _still_there(self, group: _Group) -> bool:
        if group.void:
            return False
        alive = self._book.owned(group.ids) & (self._book.level_of(group.ids) == group.level)
        return bool((alive & (self._book.made(group.ids) == group.made)).all())

    def _is_written(self, group: _Group) -> bool:
        error = group.written.exception()
        if error is None:
            return True
        self._account.failed_writes += 1
        self.works = False
        logger.warning("%s; they stay in memory until their room is needed", error)
        return False

    def _drop(self, group: _Group) -> None:
        self._groups.remove(group)
        self._book.levels[Level.COLD].give(group.places.tolist())

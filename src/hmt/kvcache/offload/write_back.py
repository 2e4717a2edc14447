"""Pages that are written to the disk while steps are computed.

A page stays where it is, and is read there, until its place is needed by another; if it is on the
disk by then, nobody waits.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from hmt.base.log import logger
from hmt.contracts.kv import GROUP_PAGES, KVAccount
from hmt.kvcache.offload.disk_layout import Mask
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.page_store import PageStore
from hmt.kvcache.page_table import Ints, PageTable, PageTier


@dataclass(slots=True)
class _Group:
    """Pages at `level` of which the disk has a copy at `places`, once that is `written`.

    void   somebody may write to one of the pages again: the copy is worth nothing
    """

    ids: Ints
    made: Ints  # which of the pages of these ids they are
    level: PageTier
    places: Ints
    low: Mask | None
    written: Future[None]
    void: bool = False


class WriteBackQueue:
    """Groups of pages that are being written to the disk, or have been.  For one thread.

    Pages may be given up meanwhile, and their ids used again: their group is forgotten then.  Where
    writing failed its pages stay what they were, and are written again when their room is needed.

    works   False after a failure, until the disk has taken pages again
    """

    def __init__(
        self,
        page_table: PageTable,
        disk_pages: DiskPages,
        account: KVAccount,
        moved: Callable[[Ints, PageTier, PageTier], None],
    ) -> None:
        """`moved` is told ids, from where and to where, of pages that have gone."""
        self._page_table = page_table
        self._disk_pages = disk_pages
        self._account = account
        self._moved = moved
        self._groups: list[_Group] = []
        self.works = True

    @property
    def pages(self) -> int:
        """That have a place at two levels, in whole groups."""
        return GROUP_PAGES * len(self._groups)

    @property
    def ids(self) -> Ints:
        """Of these pages."""
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(group.ids for group in self._groups)])

    def begin(self, ids: Ints, source: PageStore, low: Mask | None) -> None:
        """Begin to write a group of pages, all at one level, which is in host memory: `source`."""
        assert len(ids) == GROUP_PAGES
        level = PageTier(int(self._page_table.level_of(ids[:1])[0]))
        slots, places = (
            self._page_table.slots_of(ids),
            self._page_table.reserve(GROUP_PAGES, PageTier.DISK),
        )
        written = self._disk_pages.write(places, source, slots, low)
        made = self._page_table.made(ids)
        self._groups.append(_Group(ids, made, level, places, low, written))

    def forget(self, stays: Ints) -> None:
        """Give up copies of pages that nobody owns any more, and those that were not written.

        stays   pages that are not to move away, among them all that the next step writes to
        """
        for group in [*self._groups]:
            group.void |= bool(np.isin(group.ids, stays).any())
            if group.written.done() and not (self._still_there(group) and self._is_written(group)):
                self._drop(group)

    def land(self, level: PageTier, wanted: int) -> None:
        """Let pages go that are on the disk, until `wanted` places are free at `level`.

        Waits for those that are still being written if there are too few without.
        """
        for group in [*self._groups]:
            if self._page_table.free_at(level) >= wanted:
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
            self._page_table.move(group.ids, PageTier.DISK, group.places)
            self._account.written_back_pages += GROUP_PAGES
            self._account.low_pages += 0 if group.low is None else int(group.low.sum())
            self._moved(group.ids, level, PageTier.DISK)

    def close(self) -> None:
        """Wait for what is being written, and forget it."""
        for group in [*self._groups]:
            group.written.exception()
            self._drop(group)

    def _still_there(self, group: _Group) -> bool:
        if group.void:
            return False
        alive = self._page_table.owned(group.ids) & (
            self._page_table.level_of(group.ids) == group.level
        )
        return bool((alive & (self._page_table.made(group.ids) == group.made)).all())

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
        self._page_table.levels[PageTier.DISK].give(group.places.tolist())

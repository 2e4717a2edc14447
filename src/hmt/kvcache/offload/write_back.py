"""Pages that are copied to a lower tier while steps are computed.

A page stays where it is, and is read there, until it has arrived and its place is wanted.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hmt.base.log import logger
from hmt.contracts.kv import GROUP_PAGES, KVAccount
from hmt.kvcache.offload.disk_layout import Mask
from hmt.kvcache.offload.tier_stores import PendingCopy, TierStores
from hmt.kvcache.page_table import Ints, PageTable, PageTier


@dataclass(slots=True)
class PageGroup:
    """Pages at `level` of which `target` has a copy at `places`, once that is `written`.

    void   a sequence may write to one of the pages again: the copy is worth nothing
    """

    ids: Ints
    made: Ints  # which of the pages of these ids they are
    level: PageTier
    target: PageTier
    places: Ints
    low: Mask | None
    written: PendingCopy
    void: bool = False


class WriteBackQueue:
    """Groups of pages that are on their way to host memory or to the disk.  For one thread.

    Those to host memory, one group at a time, leave as soon as they have arrived: the queue owns a
    share of each, so a sequence that gives a page up meanwhile does not free it.  Those to the
    disk, in whole groups, leave when their room is needed, for they are read faster where they are.
    Until then a page may be given up, and its id used again: its group is forgotten then.  Where
    writing to the disk failed, pages stay what they were, and are written again when their room is
    needed.

    works   False after a failure, until the disk has taken pages again
    """

    def __init__(
        self,
        page_table: PageTable,
        stores: TierStores,
        account: KVAccount,
        moved: Callable[[Ints, PageTier, PageTier], None],
    ) -> None:
        """`moved` is told ids, from where and to where, of pages that have gone."""
        self._page_table = page_table
        self._stores = stores
        self._account = account
        self._moved = moved
        self._to_disk: list[PageGroup] = []
        self.to_host: PageGroup | None = None
        self.works = True

    @property
    def pages(self) -> int:
        """That have a place on the disk, too, in whole groups."""
        return GROUP_PAGES * len(self._to_disk)

    @property
    def ids(self) -> Ints:
        """Of these pages."""
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(group.ids for group in self._to_disk)])

    def begin(self, ids: Ints, target: PageTier, low: Mask | None = None) -> None:
        """Begin to copy a group of pages, all at one level above `target`.

        low   which of those that go to the disk are kept in fewer bytes there
        """
        table, slots = self._page_table, self._page_table.slots_of(ids)
        level = PageTier(int(table.level_of(ids[:1])[0]))
        places = table.reserve(len(ids), target)
        if target is PageTier.HOST:
            assert self.to_host is None
            table.share(ids)
            written = self._stores.begin_copy_to_host(slots, places)
        else:
            assert len(ids) == GROUP_PAGES
            written = self._stores.begin_write(level, slots, places, low)
        group = PageGroup(
            ids=ids,
            made=table.made(ids),
            level=level,
            target=target,
            places=places,
            low=low,
            written=written,
        )
        if target is PageTier.HOST:
            self.to_host = group
        else:
            self._to_disk.append(group)

    def settle(self) -> None:
        """Wait for pages that are being copied to host memory, and let them go."""
        group, self.to_host = self.to_host, None
        if group is not None:
            group.written.exception()
            self._land(group)
            self._page_table.drop(group.ids)

    def forget(self, stays: Ints) -> None:
        """Give up disk copies of pages without an owner, and those that were not written.

        stays   pages that are not to move away, among them all that the next step writes to
        """
        for group in [*self._to_disk]:
            group.void |= bool(np.isin(group.ids, stays).any())
            if group.written.done() and not (self._still_there(group) and self._is_written(group)):
                self._drop(group)

    def land(self, level: PageTier, wanted: int) -> None:
        """Let pages go that are on the disk, until `wanted` places are free at `level`.

        Waits for those that are still being written if there are too few without.
        """
        for group in [*self._to_disk]:
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
            self._to_disk.remove(group)
            self._land(group)
            self._account.written_back_pages += GROUP_PAGES
            self._account.low_pages += 0 if group.low is None else int(group.low.sum())

    def close(self) -> None:
        """Wait for what is on its way, and forget it."""
        self.settle()
        for group in [*self._to_disk]:
            group.written.exception()
            self._drop(group)

    def _land(self, group: PageGroup) -> None:
        self._page_table.move(group.ids, group.target, group.places)
        self._moved(group.ids, group.level, group.target)

    def _still_there(self, group: PageGroup) -> bool:
        if group.void:
            return False
        alive = self._page_table.owned(group.ids) & (
            self._page_table.level_of(group.ids) == group.level
        )
        return bool((alive & (self._page_table.made(group.ids) == group.made)).all())

    def _is_written(self, group: PageGroup) -> bool:
        error = group.written.exception()
        if error is None:
            return True
        self._account.failed_writes += 1
        self.works = False
        logger.warning("%s; they stay in memory until their room is needed", error)
        return False

    def _drop(self, group: PageGroup) -> None:
        self._to_disk.remove(group)
        self._page_table.levels[PageTier.DISK].give(group.places.tolist())

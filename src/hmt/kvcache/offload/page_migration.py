"""Which page lies in which tier, and which move: numbers, which TierStores follows."""

import time
from collections.abc import Callable, Iterable

import numpy as np

from hmt.contracts.kv import GROUP_PAGES, KVAccount
from hmt.kvcache.eviction import AttentionDecayed, PageEvictionPolicy
from hmt.kvcache.offload.disk_layout import Mask
from hmt.kvcache.offload.tier_stores import TierStores
from hmt.kvcache.offload.write_back import WriteBackQueue
from hmt.kvcache.page_pool import PagePool
from hmt.kvcache.page_table import Ints, PageTier

_TIER_NAMES = ("near", "host", "disk")  # of levels, for people
_MAX_PROMOTED = 4  # pages at a time
_MARGIN_PAGES = 0.1  # of worth, below which a page stays where it is


class PageMigration(PagePool):
    """Pages of layers without a window in up to three tiers, by worth.

    Pages are made where layers compute.  When room is needed, those worth least move on: to host
    memory, and from there, or where that is full, to the disk, in whole groups.  Those that go next
    are copied before, while steps are computed.
    """

    pages_move = True

    def __init__(
        self,
        stores: TierStores,
        policy: Callable[[int], PageEvictionPolicy],
        clock: Callable[[], float],
    ) -> None:
        """Decides where the pages of `stores` lie."""
        super().__init__(stores.slots(), clock)
        self.stores = stores
        self.policy = policy(self.page_table.count)
        self._made = 0  # pages at once, the last time
        self.account = KVAccount(
            {_TIER_NAMES[n]: s.count for n, s in enumerate(self.page_table.levels)}
        )
        self.queue = WriteBackQueue(self.page_table, stores, self.account, self._note_moved)

    @property
    def free_pages(self) -> int:
        """Pages that can be made, over all tiers."""
        return sum(self.page_table.free_at(level) for level in PageTier) + self.queue.pages

    @property
    def disk_has_room(self) -> bool:
        """Whether pages may go to the disk."""
        return self.queue.pages > 0 or self.page_table.free_at(PageTier.DISK) >= GROUP_PAGES

    @property
    def keeps_low(self) -> bool:
        """Whether pages of little attention are kept in fewer bytes on the disk."""
        return self.stores.low_below is not None

    def new(self, count: int, stays: Iterable[Ints]) -> Ints:
        """`count` pages where layers compute; none of `stays` moves away to make room for them.

        Raises DiskReadError.
        """
        self._make_room(count, stays)
        self._made = count
        made = self.page_table.new(count)
        self.policy.added(made, self.clock())
        self._note_levels()
        return made

    def settle(self) -> None:
        """Wait for pages that are being copied to host memory, and let them go."""
        self.queue.settle()

    def write_back(self, wanted: int, stays: Callable[[], Iterable[Ints]]) -> None:
        """Between steps: let pages that were copied to host memory go, and begin to copy others.

        As many as are short of `wanted` pages that will be made where layers compute, at most a
        group at a time.  From host memory pages are copied to the disk.
        """
        self._write_to_disk(wanted, stays)
        queue, table = self.queue, self.page_table
        if queue.to_host is not None and queue.to_host.written.done():
            queue.settle()
        room = min(GROUP_PAGES, table.free_at(PageTier.HOST))
        enough = table.free_at(PageTier.DEVICE) >= min(wanted, GROUP_PAGES)
        if queue.to_host is not None or not room or enough or not self.stores.copies_ahead:
            return
        movable = self._movable(stays())
        ids = self._least(movable, len(movable), PageTier.DEVICE)[:room]
        if len(ids):
            queue.begin(ids, PageTier.HOST)

    def _write_to_disk(self, wanted: int, stays: Callable[[], Iterable[Ints]]) -> None:
        """Begin to write pages to the disk, if `wanted` others will take their room."""
        queue, table = self.queue, self.page_table
        if queue.pages:
            queue.forget(np.concatenate([*stays()]))
        host = table.levels[PageTier.HOST].count
        level = PageTier.DEVICE if host < GROUP_PAGES else PageTier.HOST
        if not queue.works or not self.stores.writes_ahead(level):
            return
        if self.keeps_low and level is PageTier.DEVICE:
            return  # asked as late as can be which they are: 60 of 64 answers instead of 54
        # Enough for the next two steps: what more are worth is not known yet.
        ready = table.free_at(PageTier.DEVICE) + table.free_at(PageTier.HOST) + queue.pages
        short = min(wanted, max(GROUP_PAGES, 2 * self._made)) - ready
        ids = self._movable(stays()) if level is PageTier.DEVICE else table.at(PageTier.HOST)
        ids = np.setdiff1d(ids, queue.ids)
        groups = min(-(-short // GROUP_PAGES), len(ids) // GROUP_PAGES)
        groups = min(groups, table.free_at(PageTier.DISK) // GROUP_PAGES)
        if groups > 0:
            for group in np.split(self._least(ids, groups * GROUP_PAGES, level), groups):
                queue.begin(group, PageTier.DISK, self._low(group))

    def promote(self, stays: Iterable[Ints]) -> None:
        """Let some pages of host memory change places with ones that are worth less."""
        self.settle()
        in_host = self._staying(self.page_table.at(PageTier.HOST))
        if not len(in_host) or self.page_table.free_at(PageTier.HOST) < _MAX_PROMOTED:
            return
        now = self.clock()
        best = self._least(in_host, len(in_host), PageTier.HOST)[-_MAX_PROMOTED:][::-1]
        worst = self._least(self._movable(stays), len(best), PageTier.DEVICE)
        best = best[: len(worst)]
        gain = self.policy.worth(best, now, 1.0) - self.policy.worth(worst, now, 1.0)
        count = int((gain > _MARGIN_PAGES).sum())
        if count:
            self._move(worst[:count], PageTier.HOST)
            self._move(best[:count], PageTier.DEVICE)

    def release(self) -> None:
        """Give all memory back."""
        self.queue.close()
        self.stores.release()

    def _make_room(self, pages: int, stays: Iterable[Ints]) -> None:
        """Move pages away until so many places are free where layers compute."""
        queue, table = self.queue, self.page_table
        if pages > table.free_at(PageTier.DEVICE):
            queue.settle()
            queue.land(PageTier.DEVICE, pages)
        short = pages - table.free_at(PageTier.DEVICE)
        if short <= 0:
            return
        movable = self._movable(stays)
        # Some more at once: each move costs calls for all layers, however few pages it is of.
        batch = min(max(short, GROUP_PAGES), len(movable))
        room = table.free_at(PageTier.HOST)
        if room < short and table.levels[PageTier.HOST].count and self.stores.disk is not None:
            queue.land(PageTier.HOST, short)
            room = table.free_at(PageTier.HOST)
            aside = self._staying(table.at(PageTier.HOST))
            count = min(len(aside), table.free_at(PageTier.DISK), _whole_groups(short - room))
            if count := count // GROUP_PAGES * GROUP_PAGES:
                self._move(self._least(aside, count, PageTier.HOST), PageTier.DISK)
            room = table.free_at(PageTier.HOST)
        least = self._least(movable, len(movable), PageTier.DEVICE)
        to_host = min(batch, room)
        if to_host:
            self._move(least[:to_host], PageTier.HOST)
        if to_host < short:
            count = min(_whole_groups(short - to_host), table.free_at(PageTier.DISK))
            self._move(least[to_host : to_host + count], PageTier.DISK)
        assert table.free_at(PageTier.DEVICE) >= pages, "capacity was reserved"

    def _movable(self, stays: Iterable[Ints]) -> Ints:
        return self._staying(
            np.setdiff1d(self.page_table.at(PageTier.DEVICE), np.concatenate([*stays]))
        )

    def _staying(self, ids: Ints) -> Ints:
        """Those that do not have a place on the disk already."""
        return np.setdiff1d(ids, self.queue.ids)

    def _least(self, ids: Ints, count: int, level: PageTier) -> Ints:
        """Those worth least, the least first."""
        slots = self.page_table.levels[level]
        pressure = 1 - slots.free / max(1, slots.count)
        worth = self.policy.worth(ids, self.clock(), pressure)
        return ids[np.argsort(worth, kind="stable")[:count]]

    def _move(self, ids: Ints, level: PageTier) -> None:
        """Move pages, all at one level, to another, now."""
        came = PageTier(int(self.page_table.level_of(ids[:1])[0]))
        if level is PageTier.DISK:
            self._write(ids, came)
        else:
            old, new = self.page_table.move(ids, level)
            self.stores.copy(came, old, level, new)
        self._note_moved(ids, came, level)

    def held(self) -> dict[str, int]:
        """Pages that are taken now, by level."""
        return {_TIER_NAMES[n]: s.count - s.free for n, s in enumerate(self.page_table.levels)}

    def _write(self, ids: Ints, came: PageTier) -> None:
        """Move pages to the disk now; if that fails they stay where they are."""
        begin, low = time.perf_counter(), self._low(ids)
        places = self.page_table.reserve(len(ids), PageTier.DISK)
        try:
            slots = self.page_table.slots_of(ids)
            self.stores.begin_write(came, slots, places, low).result()
        except BaseException:
            self.page_table.levels[PageTier.DISK].give(places.tolist())
            raise
        finally:
            self.account.stalled_s += time.perf_counter() - begin
        self.queue.works = True
        self.page_table.move(ids, PageTier.DISK, places)
        self.account.low_pages += 0 if low is None else int(low.sum())

    def _low(self, ids: Ints) -> Mask | None:
        """Which pages that go to the disk are of so little attention that fewer bytes do."""
        below = self.stores.low_below
        if below is None:
            return None
        assert isinstance(self.policy, AttentionDecayed)
        low: Mask = self.policy.scores(ids, self.clock()) < below
        return low

    def _note_moved(self, ids: Ints, came: PageTier, level: PageTier) -> None:
        way = f"{_TIER_NAMES[came]} to {_TIER_NAMES[level]}"
        self.account.moved[way] = self.account.moved.get(way, 0) + len(ids)
        self._note_levels()

    def _note_levels(self) -> None:
        for name, used in self.held().items():
            self.account.peak[name] = max(self.account.peak.get(name, 0), used)


def _whole_groups(pages: int) -> int:
    return -(-pages // GROUP_PAGES) * GROUP_PAGES

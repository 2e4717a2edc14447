"""Where pages lie: three levels, what moves between them, and what is read from which."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hmt.contracts.kv import GROUP_PAGES, KVAccount
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import ops
from hmt.kernels.backend import backend_on
from hmt.kvcache.eviction import AttentionDecayed, PageEvictionPolicy
from hmt.kvcache.offload.disk_layout import Mask
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.offload.write_back import WriteBackQueue
from hmt.kvcache.page_store import PageStore, recode
from hmt.kvcache.page_table import Ints, PageSlots, PageTable, PageTier
from hmt.memory import Bitmap
from hmt.memory.device import Device, Event

# Pages of a layer that lie together: pages, the layer's place in them, a table, and which of those
# that were asked for these are.
PagesByTier = tuple[ops.Pages, int, torch.Tensor, torch.Tensor]

_TIER_NAMES = ("near", "host", "disk")  # of levels, for people
_MAX_PROMOTED = 4  # pages at a time
_MARGIN_PAGES = 0.1  # of worth, below which a page stays where it is


@dataclass(frozen=True, slots=True)
class _PendingWriteBack:
    """Hot pages that are being copied to places in host memory, until `written`."""

    ids: Ints
    places: Ints
    written: Event


class PageMigration:
    """Pages of layers without a window at up to three levels, by worth.

    Pages are made hot.  When room is needed, those worth least move on: to host memory, and from
    there, or where that is full, to the disk, in whole groups.  Beside a device those that go next
    are copied before, while steps are computed.
    """

    def __init__(
        self,
        device_store: PageStore,
        host_store: PageStore | None,
        disk_pages: DiskPages | None,
        policy: Callable[[int], PageEvictionPolicy],
        clock: Callable[[], float],
        device: Device | None = None,
    ) -> None:
        """Takes over the memories, and releases them in the end.

        device  where hot pages are, if that has a queue for writing pages back
        """
        self.device, self.host, self.disk = device_store, host_store, disk_pages
        slots: list[PageSlots] = [
            Bitmap(device_store.count),
            Bitmap(host_store.count if host_store is not None else 0),
        ]
        self.page_table = PageTable(
            [*slots, disk_pages.slots if disk_pages is not None else Bitmap(0)]
        )
        self.policy = policy(self.page_table.count)
        self.clock = clock
        self._device = device
        self._pending: _PendingWriteBack | None = None
        self._made = 0  # pages at once, the last time
        self.crosses = host_store is not None and device_store.crosses_to(
            host_store
        )  # kernels know the way
        self.account = KVAccount(
            {_TIER_NAMES[n]: s.count for n, s in enumerate(self.page_table.levels)}
        )
        self._ahead = None
        if disk_pages is not None:
            self._ahead = WriteBackQueue(
                self.page_table, disk_pages, self.account, self._note_moved
            )

    @property
    def free_pages(self) -> int:
        """That can be made, over all levels."""
        free = sum(self.page_table.free_at(level) for level in PageTier)
        return free + (0 if self._ahead is None else self._ahead.pages)

    @property
    def disk_has_room(self) -> bool:
        """Whether pages may go to the disk."""
        ahead = self._ahead is not None and self._ahead.pages > 0
        return ahead or self.page_table.free_at(PageTier.DISK) >= GROUP_PAGES

    @property
    def keeps_low(self) -> bool:
        """Whether pages of little attention are kept in fewer bytes on the disk."""
        return self.disk is not None and self.disk.low is not None

    def new(self, count: int, stays: Iterable[Ints]) -> Ints:
        """`count` hot pages; none of `stays` moves away to make room for them."""
        self._make_room(count, stays)
        self._made = count
        made = self.page_table.new(count)
        self.policy.added(made, self.clock())
        self._note_levels()
        return made

    def write_back(self, wanted: int, stays: Callable[[], Iterable[Ints]]) -> None:
        """Between steps: let pages that were copied to host memory go, and begin to copy others.

        As many as are short of `wanted` hot pages that will be made, at most a group at a time.
        From host memory pages are copied to the disk.
        """
        self._write_ahead(wanted, stays)
        if self._pending is not None and self._pending.written.reached():
            self.settle()
        room = min(GROUP_PAGES, self.page_table.free_at(PageTier.HOST))
        wanted = min(wanted, GROUP_PAGES)
        if (
            self._pending is not None
            or not room
            or self.page_table.free_at(PageTier.DEVICE) >= wanted
        ):
            return
        device, warm = self._device, self.host
        if device is None or warm is None:
            return
        if not backend_on(self.device.device).on_host and not self.crosses:
            return  # what the CPU has to encode, it encodes when it must
        movable = self._movable(stays())
        ids = self._least(movable, len(movable), PageTier.DEVICE)[:room]
        if not len(ids):
            return
        places = self.page_table.reserve(len(ids), PageTier.HOST)
        self.page_table.share(ids)  # whoever gives them up meanwhile does not free them
        slots, theirs = to_tensor(places), to_tensor(self.page_table.slots_of(ids))

        def work() -> None:
            if self.crosses:
                self.device.send(theirs, warm, slots)
            else:
                warm.take(slots, self.device, theirs)

        self._pending = _PendingWriteBack(ids, places, device.write_back(work))

    def _write_ahead(self, wanted: int, stays: Callable[[], Iterable[Ints]]) -> None:
        """Begin to write pages to the disk, if `wanted` others will take their room."""
        if self._ahead is None:
            return
        if self._ahead.pages:
            self._ahead.forget(np.concatenate([*stays()]))
        level = (
            PageTier.DEVICE if self.host is None or self.host.count < GROUP_PAGES else PageTier.HOST
        )
        source = self.device if level is PageTier.DEVICE else self.host
        assert source is not None
        if not self._ahead.works or not backend_on(source.device).on_host:
            return
        if self.keeps_low and level is PageTier.DEVICE:
            return  # asked as late as can be which they are: 60 of 64 answers instead of 54
        # Enough for the next two steps: what more are worth is not known yet.
        ready = (
            self.page_table.free_at(PageTier.DEVICE)
            + self.page_table.free_at(PageTier.HOST)
            + self._ahead.pages
        )
        short = min(wanted, max(GROUP_PAGES, 2 * self._made)) - ready
        ids = (
            self._movable(stays())
            if level is PageTier.DEVICE
            else self.page_table.at(PageTier.HOST)
        )
        ids = np.setdiff1d(ids, self._ahead.ids)
        groups = min(-(-short // GROUP_PAGES), len(ids) // GROUP_PAGES)
        groups = min(groups, self.page_table.free_at(PageTier.DISK) // GROUP_PAGES)
        if groups > 0:
            for group in np.split(self._least(ids, groups * GROUP_PAGES, level), groups):
                self._ahead.begin(group, source, self._low(group))

    def settle(self) -> None:
        """Wait for pages that are being copied, and let them go."""
        if self._pending is None:
            return
        leaving, self._pending = self._pending, None
        leaving.written.wait()
        self.page_table.move(leaving.ids, PageTier.HOST, leaving.places)
        self._note_moved(leaving.ids, PageTier.DEVICE, PageTier.HOST)
        self.page_table.drop(leaving.ids)

    def copy(self, page: Ints, device_copy: Ints) -> None:
        """Let hot page `device_copy` hold what `page` holds, wherever that is."""
        number = to_tensor(self.page_table.slots_of(device_copy)).to(self.device.device)
        for layer, kept in self.device.layers.items():
            for pages, slot, table, _ in self.lying(layer, page):
                recode(kept.pages, kept.slot, number, pages, slot, table)

    def lying(self, layer: int, ids: Ints) -> Iterator[PagesByTier]:
        """Where pages `ids` of `layer` lie; those of the disk some at a time."""
        levels, slots = self.page_table.level_of(ids), self.page_table.slots_of(ids)
        for level, store in ((PageTier.DEVICE, self.device), (PageTier.HOST, self.host)):
            if store is not None and len(at := np.flatnonzero(levels == level)):
                kept, table = store.layers[layer], to_tensor(slots[at])
                yield kept.pages, kept.slot, table.to(store.device), to_tensor(at)
        if self.disk is not None and len(at := np.flatnonzero(levels == PageTier.DISK)):
            for pages, [(entries, table)] in self.disk.chunks(layer, [slots[at]]):
                if len(table):
                    yield pages, 0, table, to_tensor(at[entries])

    def promote(self, stays: Iterable[Ints]) -> None:
        """Let some pages of host memory change places with hot ones that are worth less."""
        self.settle()
        warm = self._staying(self.page_table.at(PageTier.HOST))
        if (
            self.host is None
            or not len(warm)
            or self.page_table.free_at(PageTier.HOST) < _MAX_PROMOTED
        ):
            return
        now = self.clock()
        best = self._least(warm, len(warm), PageTier.HOST)[-_MAX_PROMOTED:][::-1]
        worst = self._least(self._movable(stays), len(best), PageTier.DEVICE)
        best = best[: len(worst)]
        gain = self.policy.worth(best, now, 1.0) - self.policy.worth(worst, now, 1.0)
        count = int((gain > _MARGIN_PAGES).sum())
        if count:
            self._move(worst[:count], PageTier.HOST)
            self._move(best[:count], PageTier.DEVICE)

    def release(self) -> None:
        """Give all memory back."""
        self.settle()
        if self._ahead is not None:
            self._ahead.close()
        self.device.release()
        if self.host is not None:
            self.host.release()
        if self.disk is not None:
            self.disk.close()

    def _make_room(self, pages: int, stays: Iterable[Ints]) -> None:
        """Move hot pages away until `pages` are free."""
        if pages > self.page_table.free_at(PageTier.DEVICE):
            self.settle()
            if self._ahead is not None:
                self._ahead.land(PageTier.DEVICE, pages)
        short = pages - self.page_table.free_at(PageTier.DEVICE)
        if short <= 0:
            return
        movable = self._movable(stays)
        # Some more at once: each move costs calls for all layers, however few pages it is of.
        batch = min(max(short, GROUP_PAGES), len(movable))
        room = self.page_table.free_at(PageTier.HOST)
        if room < short and self.host is not None and self._ahead is not None:
            self._ahead.land(PageTier.HOST, short)
            room = self.page_table.free_at(PageTier.HOST)
            aside = self._staying(self.page_table.at(PageTier.HOST))
            count = min(
                len(aside), self.page_table.free_at(PageTier.DISK), _whole_groups(short - room)
            )
            if count := count // GROUP_PAGES * GROUP_PAGES:
                self._move(self._least(aside, count, PageTier.HOST), PageTier.DISK)
            room = self.page_table.free_at(PageTier.HOST)
        least = self._least(movable, len(movable), PageTier.DEVICE)
        to_warm = min(batch, room)
        if to_warm:
            self._move(least[:to_warm], PageTier.HOST)
        if to_warm < short:
            count = min(_whole_groups(short - to_warm), self.page_table.free_at(PageTier.DISK))
            self._move(least[to_warm : to_warm + count], PageTier.DISK)
        assert self.page_table.free_at(PageTier.DEVICE) >= pages, "capacity was reserved"

    def _movable(self, stays: Iterable[Ints]) -> Ints:
        return self._staying(
            np.setdiff1d(self.page_table.at(PageTier.DEVICE), np.concatenate([*stays]))
        )

    def _staying(self, ids: Ints) -> Ints:
        """Those that do not have a place on the disk already."""
        return ids if self._ahead is None else np.setdiff1d(ids, self._ahead.ids)

    def _least(self, ids: Ints, count: int, level: PageTier) -> Ints:
        """Those worth least, the least first."""
        slots = self.page_table.levels[level]
        pressure = 1 - slots.free / max(1, slots.count)
        worth = self.policy.worth(ids, self.clock(), pressure)
        return ids[np.argsort(worth, kind="stable")[:count]]

    def _move(self, ids: Ints, level: PageTier) -> None:
        """Move pages, all at one level, to another."""
        came = PageTier(int(self.page_table.level_of(ids[:1])[0]))
        source = self.device if came is PageTier.DEVICE else self.host
        assert source is not None
        if level is PageTier.DISK:
            self._write(ids, source)
        else:
            target = self.device if level is PageTier.DEVICE else self.host
            assert target is not None
            old, new = self.page_table.move(ids, level)
            theirs = to_tensor(old).to(source.device)
            target.take(to_tensor(new).to(target.device), source, theirs)
        self._note_moved(ids, came, level)

    def held(self) -> dict[str, int]:
        """Pages that are taken now, by level."""
        return {_TIER_NAMES[n]: s.count - s.free for n, s in enumerate(self.page_table.levels)}

    def _write(self, ids: Ints, source: PageStore) -> None:
        """Move pages to the disk now; if that fails they stay where they are."""
        assert self.disk is not None and self._ahead is not None
        begin, low = time.perf_counter(), self._low(ids)
        places = self.page_table.reserve(len(ids), PageTier.DISK)
        try:
            self.disk.write(places, source, self.page_table.slots_of(ids), low).result()
        except BaseException:
            self.page_table.levels[PageTier.DISK].give(places.tolist())
            raise
        finally:
            self.account.stalled_s += time.perf_counter() - begin
        self._ahead.works = True
        self.page_table.move(ids, PageTier.DISK, places)
        self.account.low_pages += 0 if low is None else int(low.sum())

    def _low(self, ids: Ints) -> Mask | None:
        """Which pages that go to the disk are of so little attention that fewer bytes do."""
        if self.disk is None or self.disk.low is None:
            return None
        assert isinstance(self.policy, AttentionDecayed)
        low: Mask = self.policy.scores(ids, self.clock()) < self.disk.low.below
        return low

    def _note_moved(self, ids: Ints, came: PageTier, level: PageTier) -> None:
        way = f"{_TIER_NAMES[came]} to {_TIER_NAMES[level]}"
        self.account.moved[way] = self.account.moved.get(way, 0) + len(ids)
        self._note_levels()

    def _note_levels(self) -> None:
        for name, used in self.held().items():
            self.account.peak[name] = max(self.account.peak.get(name, 0), used)


def to_tensor(numbers: Ints) -> torch.Tensor:
    """The same numbers, int64."""
    return torch.from_numpy(np.ascontiguousarray(numbers))


def pages_of(tokens: int) -> int:
    """Pages that so many positions take."""
    return -(-tokens // PAGE_TOKENS)


def _whole_groups(pages: int) -> int:
    return -(-pages // GROUP_PAGES) * GROUP_PAGES

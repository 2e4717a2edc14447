"""The bytes of pages in up to three memories, and copies between these."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hmt.kernels import ops
from hmt.kernels.backend_registry import backend_on
from hmt.kvcache.offload.disk_layout import Mask
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.page_store import PageStore, recode
from hmt.kvcache.page_table import Ints, PageSlots, PageTable, PageTier
from hmt.memory import Bitmap
from hmt.memory.device import Device, Event

# Pages of a layer that lie together: pages, the layer's place in them, a table, and which of those
# that were asked for these are.
PagesByTier = tuple[ops.Pages, int, torch.Tensor, torch.Tensor]


class PendingCopy(Protocol):
    """A copy on its way; a Future is one."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def exception(self) -> BaseException | None:
        """Why it failed, once it has ended; waits for that."""
        ...


@dataclass(frozen=True, slots=True)
class _DeviceCopy:
    """A copy on a device's queue, which ends at `end`."""

    end: Event

    def done(self) -> bool:
        return self.end.reached()

    def exception(self) -> None:
        self.end.wait()


class TierStores:
    """Pages of layers without a window: where layers compute, in host memory, and on the disk.

    Does what PageMigration decides.
    """

    def __init__(
        self,
        device: PageStore,
        host: PageStore | None,
        disk: DiskPages | None,
        queues: Device | None = None,
    ) -> None:
        """Takes over the memories, and releases them in the end.

        queues  of the device where layers compute, if that has one for writing pages back
        """
        self.device, self.host, self.disk = device, host, disk
        self._queues = queues
        # Kernels of the device read and write the pages of host memory.
        self.crosses = host is not None and device.crosses_to(host)

    def slots(self) -> list[PageSlots]:
        """The places that each tier has, all free."""
        host = 0 if self.host is None else self.host.count
        disk = Bitmap(0) if self.disk is None else self.disk.slots
        return [Bitmap(self.device.count), Bitmap(host), disk]

    @property
    def copies_ahead(self) -> bool:
        """Whether pages can be copied to host memory while steps are computed.

        Pages that the CPU has to encode, it encodes when it must.
        """
        if self._queues is None or self.host is None:
            return False
        return backend_on(self.device.device).on_host or self.crosses

    def writes_ahead(self, tier: PageTier) -> bool:
        """Whether pages of `tier` can be written to the disk while steps are computed."""
        source = self._store(tier)
        return self.disk is not None and backend_on(source.device).on_host

    @property
    def low_below(self) -> float | None:
        """The score below which a page is kept in fewer bytes on the disk; None: none is."""
        if self.disk is None or self.disk.low is None:
            return None
        return self.disk.low.below

    def copy(self, tier: PageTier, slots: Ints, to: PageTier, places: Ints) -> None:
        """Copy the pages at `slots` of `tier` to `places` of another one, neither the disk."""
        source, target = self._store(tier), self._store(to)
        theirs = to_tensor(slots).to(source.device)
        target.take(to_tensor(places).to(target.device), source, theirs)

    def begin_copy_to_host(self, slots: Ints, places: Ints) -> PendingCopy:
        """Begin to copy pages from where layers compute to host memory: see `copies_ahead`."""
        host, numbers, theirs = self.host, to_tensor(places), to_tensor(slots)
        assert host is not None and self._queues is not None

        def work() -> None:
            if self.crosses:
                self.device.send(theirs, host, numbers)
            else:
                host.take(numbers, self.device, theirs)

        return _DeviceCopy(self._queues.write_back(work))

    def begin_write(
        self, tier: PageTier, slots: Ints, places: Ints, low: Mask | None
    ) -> "Future[None]":
        """Begin to write pages to the disk; see DiskPages."""
        assert self.disk is not None
        return self.disk.write(places, self._store(tier), slots, low)

    def lying(self, table: PageTable, layer: int, ids: Ints) -> Iterator[PagesByTier]:
        """Where pages `ids` of `layer` lie by `table`; those of the disk some at a time."""
        levels, slots = table.level_of(ids), table.slots_of(ids)
        for level, store in ((PageTier.DEVICE, self.device), (PageTier.HOST, self.host)):
            if store is not None and len(at := np.flatnonzero(levels == level)):
                kept, numbers = store.layers[layer], to_tensor(slots[at])
                yield kept.pages, kept.slot, numbers.to(store.device), to_tensor(at)
        if self.disk is not None and len(at := np.flatnonzero(levels == PageTier.DISK)):
            for pages, [(entries, numbers)] in self.disk.chunks(layer, [slots[at]]):
                if len(numbers):
                    yield pages, 0, numbers, to_tensor(at[entries])

    def copy_out(
        self, table: PageTable, ids: Ints, kinds: Sequence[tuple[ops.Pages, list[int]]]
    ) -> None:
        """Fill pages 0 and on of `kinds`, in host memory, with pages `ids`, wherever they lie.

        Raises DiskReadError.
        """
        for pages, members in kinds:
            for at, layer in enumerate(members):
                for source, slot, numbers, which in self.lying(table, layer, ids):
                    recode(pages, at, which, source, slot, numbers)

    def copy_in(
        self, table: PageTable, ids: Ints, kinds: Sequence[tuple[ops.Pages, list[int]]]
    ) -> None:
        """Let pages `ids`, all where layers compute, hold pages 0 and on of `kinds`."""
        numbers = to_tensor(table.slots_of(ids)).to(self.device.device)
        rows = torch.arange(len(ids))
        for (pages, members), (source, _) in zip(self.device.kinds, kinds, strict=True):
            for at in range(len(members)):
                recode(pages, at, numbers, source, at, rows)

    def copy_page(self, table: PageTable, page: Ints, to: Ints) -> None:
        """Let page `to`, where layers compute, hold what `page` holds, wherever that lies."""
        number = to_tensor(table.slots_of(to)).to(self.device.device)
        for layer, kept in self.device.layers.items():
            for pages, slot, numbers, _ in self.lying(table, layer, page):
                recode(kept.pages, kept.slot, number, pages, slot, numbers)

    def release(self) -> None:
        """Give all memory back."""
        self.device.release()
        if self.host is not None:
            self.host.release()
        if self.disk is not None:
            self.disk.close()

    def _store(self, tier: PageTier) -> PageStore:
        store = self.device if tier is PageTier.DEVICE else self.host
        assert store is not None and tier is not PageTier.DISK
        return store


def to_tensor(numbers: Ints) -> torch.Tensor:
    """The same numbers, int64."""
    return torch.from_numpy(np.ascontiguousarray(numbers))

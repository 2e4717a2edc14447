"""The parts of an encoder of images on a device: there only while images come."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from hmt.base.units import round_up
from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import Priority
from hmt.memory import Account
from hmt.memory.device import Device, Event
from hmt.weights.layout import BlockLayout
from hmt.weights.store.block_store import WeightStore

_ALIGNMENT = 256
_AHEAD = 4  # parts that are read from the disk while one computes


class DeviceEncoder:
    """Leases blocks on a device, in slots that are taken with the first image.

    The first blocks stay, as many as fit beside two slots in which the others take turns: of what
    is used in one order, the block that was used last is wanted last.  For the engine's thread, but
    for `reserve`.
    """

    def __init__(
        self,
        blocks: Sequence[BlockId],
        layouts: Mapping[BlockId, BlockLayout],
        store: WeightStore,
        device: Device,
        account: Account,
    ) -> None:
        """`account` has room for all blocks, or for two slots of the largest."""
        self._blocks, self._layouts = list(blocks), layouts
        self._store, self._device, self._account = store, device, account
        self._lock = threading.Lock()
        self._reserved = False
        self._memory: Tensor | None = None
        self._slots = self._places()
        self._there: dict[int, BlockId] = {}  # by the offset of their slot
        self._views: dict[BlockId, Mapping[str, WeightTensor]] = {}  # in the memory
        self._last_use: dict[int, Event] = {}

    def _places(self) -> dict[BlockId, int]:
        """Where in the memory each block's slot begins."""
        sizes = [round_up(self._layouts[b].slot_bytes, _ALIGNMENT) for b in self._blocks]
        room, at, found = self._account.limit_bytes, 0, dict[BlockId, int]()
        for number, size in enumerate(sizes):
            left = sizes[number + 1 :]
            if at + size + min(sum(left), 2 * max(left, default=0)) > room:
                largest = max(sizes[number:])
                turns = enumerate(self._blocks[number:])
                return found | {block: at + turn % 2 * largest for turn, block in turns}
            found[self._blocks[number]] = at
            at += size
        return found

    @property
    def used_bytes(self) -> int:
        """Of the device's memory."""
        return 0 if self._memory is None else self._memory.nbytes

    def reserve(self) -> None:
        """Charge the slots, which the next `leasing` takes.  For any thread."""
        with self._lock:
            if not self._reserved:
                self._account.charge(self._account.limit_bytes)
                self._reserved = True

    @contextmanager
    def leasing(self) -> Iterator[None]:
        """In the body blocks can be leased, and the device's memory is the encoder's.

        What torch keeps for layers' activations is given back before, and what it keeps of the
        encoder's afterwards: their sizes differ, and together they would pass the budget.

        Raises BudgetError where the slots cannot be had.
        """
        self._device.empty_cache()
        self.reserve()
        if self._memory is None:
            self._memory = self._device.allocate(self._account.limit_bytes)
        try:
            yield
        finally:
            self._device.empty_cache()

    @contextmanager
    def lease(self, block: BlockId) -> Iterator[Mapping[str, WeightTensor]]:
        """The parameters of `block`, on the device.  Raises what reading raises."""
        assert self._memory is not None
        at, layout = self._slots[block], self._layouts[block]
        if self._there.get(at) != block:
            self._bring(block, at, self._memory[at : at + layout.slot_bytes])
        if block not in self._views:
            self._views[block] = layout.views(self._memory[at : at + layout.slot_bytes])
        try:
            yield self._views[block]
        finally:
            self._last_use[at] = self._device.record_event()

    def _bring(self, block: BlockId, at: int, memory: Tensor) -> None:
        self._there.pop(at, None)
        number = self._blocks.index(block)
        following = self._blocks[number : number + 1 + _AHEAD]
        missing = [b for b in following if self._there.get(self._slots[b]) != b]
        self._store.request(missing, Priority.PREFETCH)
        with self._store.lease_bytes(block) as source:
            # The CPU waits; kernels that were launched before go on meanwhile.
            self._device.copy(memory, source, self._last_use.get(at)).wait()
        self._there[at] = block
        if list(self._slots.values()).count(at) == 1:  # it stays
            self._store.forget(block)

    def free(self) -> None:
        """Give all memory back."""
        with self._lock:
            if self._reserved:
                self._device.synchronize()
                self._there.clear()
                self._last_use.clear()
                self._views.clear()
                self._memory = None
                self._device.empty_cache()
                self._account.release(self._account.limit_bytes)
                self._reserved = False

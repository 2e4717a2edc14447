"""The weight store: every block of a model, wherever it lies, by lease.

Some blocks are loaded once and stay.  Any other is read into a slot when it is requested or leased,
and stays there until its slot is needed and it is neither leased nor still awaited.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from hmt.base.errors import BudgetError, Cancelled, HMTError
from hmt.base.trace import Tracer
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import LeasedGroup, Presence, Priority, ResidentBlock, Verify
from hmt.memory import HostBuffer, HostPool, QueueCounters, ReadQueue
from hmt.weights.eviction import LRU, DenseByScan, EvictionPolicy
from hmt.weights.layout import BlockLayout, Table
from hmt.weights.store.block_load import BlockLoad
from hmt.weights.store.block_state import BlockState, State, block_states
from hmt.weights.store.prefetch_state import PrefetchCounters, PrefetchState, StoreCounters
from hmt.weights.store.row_lookup import RowLookup, check_rows
from hmt.weights.store.row_reader import RowReader
from hmt.weights.store.slots import SlotPool
from hmt.weights.store.spill import SpillFile
from hmt.weights.store.victims import choose_victims


class WeightStore:
    """Implements Weights over host memory and disk.

    Safe for several threads as long as each holds one lease at a time, or the slots hold all that
    the threads lease together: threads that wait for each other's slots wait for ever.  The engine
    has one.

    `resident` holds blocks that stay, `slots` those that come and go, `staging`
    the published form of parameters while they are converted, `rows` single rows of tables that
    stay on disk.
    """

    def __init__(
        self,
        layouts: Mapping[BlockId, BlockLayout],
        stays: Collection[BlockId],
        queue: ReadQueue,
        tracer: Tracer,
        *,
        resident: HostPool,
        slots: HostPool,
        staging: HostPool,
        rows: HostPool,
        slot_counts: Mapping[int, int] | None = None,
        policy: EvictionPolicy | None = None,
        spill: SpillFile | None = None,
        check: bool = True,
        verify: Verify = Verify.FIRST,
    ) -> None:
        """`stays` are loaded once; all others pass through slots, also those that a device keeps.

        slot_counts  slots by size in bytes; None: sizes share the memory
        check        whether to look for NaN at a block's first read, as `verify` does for packs
        """
        self._entries = block_states(layouts, stays)
        self._queue = queue
        self._tracer = tracer
        self._slots = {True: SlotPool(resident), False: SlotPool(slots, slot_counts or {})}
        slots.owner_of(self)
        self._resident = resident
        self._holders: dict[HostBuffer, BlockState] = {}
        self._staging = staging
        self._policy = policy or DenseByScan(LRU())
        self._expected = PrefetchState()
        self._spill = spill
        self._check = check
        self._verify = verify
        self._backlog: dict[Priority, deque[BlockState]] = {p: deque() for p in Priority}
        self._held: Counter[int] = Counter()  # leases by thread
        self._changed = threading.Condition()
        reader = RowReader(queue, rows, verify=verify is not Verify.NEVER)
        self._rows = RowLookup(reader, tracer)
        self.counters = StoreCounters()

    def load_residents(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every block that stays.  `progress(bytes done, bytes in all)`.

        Raises DiskReadError or NumericsError of the first block that fails.
        """
        entries = self._entries.values()
        residents = [entry for entry in entries if entry.stays and entry.layout.placed]
        total = sum(entry.layout.read_bytes for entry in residents)
        self._resident.prefault(lambda: progress(0, total) if progress else None)
        ahead = done = 0
        for entry in residents:
            # Keep enough requested to fill the disk's queue; staging memory bounds the rest.
            while ahead < len(residents) and self._start_ahead(residents[ahead]):
                ahead += 1
            with self.lease(entry.layout.id):
                pass
            done += entry.layout.read_bytes
            if progress is not None:
                progress(done, total)
        self.counters = StoreCounters()

    def _start_ahead(self, entry: BlockState) -> bool:
        with self._changed:
            return entry.state is not State.ABSENT or self._begin_load(entry, Priority.PREFETCH)

    # Weights

    def presence(self, block: BlockId) -> Presence:
        """Where `block` is now: HIT, PENDING or MISS."""
        with self._changed:
            state = self._entries[block].state
        if state is State.READY:
            return Presence.HIT
        return Presence.PENDING if state is State.LOADING else Presence.MISS

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        """See Weights.  Replaces what was asked for with this priority and has not begun yet.

        Blocks begin in the order given, each as soon as a slot can be had without taking one that
        is leased or awaited.  Earlier guesses that are not guessed again need not stay, and are
        cancelled as far as their reads have not begun; nor need experts that were SURE, and are not
        now.
        """
        entries = [self._entries[block] for block in blocks]
        backlog = self._backlog[priority]
        idle = not backlog and not self._expected.held
        if idle and all(entry.resident is not None for entry in entries):
            return  # without the lock: a mixture of experts at home in memory asks once a layer
        with self._changed:
            backlog.clear()
            self._expected.replaced(priority, kept=blocks)
            for entry in entries:
                if entry.state is State.ABSENT:
                    backlog.append(entry)
                elif entry.resident is None:
                    self._expected.requested(entry, priority)
            self._begin_backlog()

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """See Weights."""

    def moe_backend(self, layer: int) -> None:
        """See Weights: whoever computes leases."""

    def lease(self, block: BlockId) -> AbstractContextManager[Mapping[str, WeightTensor]]:
        """See Weights."""
        entry = self._entries[block]
        if entry.resident is not None:
            self.counters.host_bytes += entry.layout.slot_bytes
            return entry.resident
        return self._lease(entry)

    @contextmanager
    def _lease(self, entry: BlockState) -> Iterator[Mapping[str, WeightTensor]]:
        with self._changed:
            self._take(entry)
        try:
            yield entry.views
        finally:
            self._give_back([entry])

    @contextmanager
    def lease_bytes(self, block: BlockId) -> Iterator[torch.Tensor]:
        """Like `lease`: the block's whole slot, uint8 [slot_bytes], to copy it elsewhere."""
        with self.lease(block):
            entry = self._entries[block]
            assert entry.slot is not None
            yield entry.slot.tensor[: entry.layout.slot_bytes]

    def lease_each(
        self, blocks: Sequence[BlockId]
    ) -> AbstractContextManager[Iterator[LeasedGroup]]:
        """See Weights.  A group is one block, waited for, and those after it that are ready.

        Nothing is held while waiting, so the slots need to hold one block only; and no group takes
        a slot from the reads of the blocks after it.
        """
        entries = [self._entries[block] for block in blocks]
        if entries and all(entry.resident is not None for entry in entries):
            for entry in entries:
                entry.uses += 1
                self.counters.host_bytes += entry.layout.slot_bytes
            views = [entry.views for entry in entries]
            return nullcontext(iter([list(zip(blocks, views, strict=True))]))
        return self._lease_each(entries)

    @contextmanager
    def _lease_each(self, entries: Sequence[BlockState]) -> Iterator[Iterator[LeasedGroup]]:
        held: list[BlockState] = []
        try:
            yield self._groups(entries, held)
        finally:
            self._give_back(held)

    def _groups(self, blocks: Sequence[BlockState], out: list[BlockState]) -> Iterator[LeasedGroup]:
        """Leases group after group; `out` is the group that is leased now."""
        waiting = deque(blocks)
        while waiting:
            self._give_back(out)
            with self._changed:
                while waiting and (not out or waiting[0].state is State.READY):
                    self._take(waiting[0])
                    out.append(waiting.popleft())
            yield [(entry.layout.id, entry.views) for entry in out]

    def resident(self, blocks: Sequence[BlockId]) -> list[ResidentBlock] | None:
        """See Weights."""
        entries = [self._entries[block] for block in blocks]
        if any(entry.resident is None for entry in entries):
            return None
        return [ResidentBlock(entry.views, entry.layout.slot_bytes) for entry in entries]

    def count(self, nbytes: int) -> None:
        """See Weights."""
        self.counters.host_bytes += nbytes

    def rows(self, block: BlockId, name: str, ids: torch.Tensor) -> torch.Tensor:
        """See Weights.  Rows of a table on disk are read one by one, not the whole table."""
        layout = self._entries[block].layout
        check_rows(layout.tables[name], ids)
        if self._stays(layout.tables[name]):
            return RowReader.from_memory(layout, name, ids, self._resident_views)
        rows, waited_s = self._rows.rows(layout, name, ids)
        self.counters.waited_s += waited_s
        return rows

    def request_rows(self, block: BlockId, name: str, ids: torch.Tensor) -> None:
        """See Weights.  Only a table on disk has anything to do."""
        layout = self._entries[block].layout
        if not self._stays(layout.tables[name]):
            self._rows.request(layout, name, ids)

    def _stays(self, table: Table) -> bool:
        return all(self._entries[holder.block].stays for holder in table.holders)

    def close(self) -> None:
        """End all reads and free all slots.  Nothing may be leased."""
        self.abandon()  # or the end of one read would begin the next
        self._queue.close()
        with self._changed:
            for entry in self._entries.values():
                assert entry.leases == 0, f"{entry.layout.id} is still leased"
                self._drop(entry)
        self._rows.close()

    def abandon(self) -> None:
        """Forget what was asked for ahead of time: the step that asked has failed."""
        with self._changed:
            for backlog in self._backlog.values():
                backlog.clear()
            self._expected.abandon()
            self._rows.abandon()
            for entry in self._entries.values():
                entry.awaited = None

    def forget(self, block: BlockId) -> None:
        """Free the slot of `block`, which nobody leases: it is kept elsewhere from now on."""
        with self._changed:
            self._drop(self._entries[block])

    @property
    def prefetch_counters(self) -> PrefetchCounters:
        """What became of reads on a guess, since the store was made."""
        return self._expected.counters

    def slot_bytes(self, block: BlockId) -> int:
        """Memory that `block` takes when it is there."""
        return self._entries[block].layout.slot_bytes

    def disk_counters(self) -> QueueCounters:
        """What the disk was asked for and gave, since the store was made."""
        return self._queue.counters()

    def seen(self) -> tuple[list[int], list[bool]]:
        """Of blocks as `layouts` had them: leases until now, and who is in memory.  Never waits."""
        entries = self._entries.values()
        return [e.uses for e in entries], [e.state is State.READY for e in entries]

    # BufferOwner: the pool asks while a slot is allocated, with our lock held

    def movable(self, buffer: HostBuffer) -> bool:
        """Whether the block in a slot is complete and nobody has it."""
        entry = self._holders[buffer]
        return entry.state is State.READY and entry.leases == 0

    def moved(self, buffer: HostBuffer) -> None:
        """The block's views, and what kernels made of them, were of the old place."""
        entry = self._holders[buffer]
        entry.views = entry.layout.views(buffer.tensor)

    # Inside, with the lock held, but for _give_back

    def _take(self, entry: BlockState) -> None:
        self._count(entry)
        if entry.state is not State.READY:
            self._wait_ready(entry)
        entry.leases += 1
        self._held[threading.get_ident()] += 1
        entry.awaited = None
        if not entry.stays:
            self._policy.used(entry.layout.id)

    def _give_back(self, held: list[BlockState]) -> None:
        if not held:
            return
        with self._changed:
            self._held[threading.get_ident()] -= len(held)
            while held:
                held.pop().leases -= 1
            self._begin_backlog()
            self._changed.notify_all()

    def _begin_backlog(self) -> None:
        for priority, backlog in self._backlog.items():
            if priority is Priority.SPECULATIVE and self._expected.urgent_reads:
                return
            while backlog:
                entry = backlog.popleft()
                if entry.state is State.ABSENT and not self._begin_load(entry, priority):
                    backlog.appendleft(entry)
                    return  # later blocks must not take the slot that this one waits for

    def _count(self, entry: BlockState) -> None:
        entry.uses += 1
        self.counters.host_bytes += entry.layout.slot_bytes
        if entry.stays:
            return
        self._expected.leased(entry)
        if entry.state is State.READY:
            self.counters.hits += 1
        elif entry.state is State.LOADING:
            self.counters.pending += 1
        else:
            self.counters.misses += 1

    def _wait_ready(self, entry: BlockState) -> None:
        begin = time.perf_counter()
        entry.waiting += 1
        try:
            while entry.state is not State.READY:
                if entry.error is not None:
                    raise entry.error
                if entry.state is State.LOADING:
                    self._expected.requested(entry, Priority.DEMAND)
                elif self._begin_load(entry, Priority.DEMAND, force=True):
                    continue
                elif not self._anything_moves():
                    raise self._too_small(entry)
                self._changed.wait()
        finally:
            entry.waiting -= 1
            if not entry.waiting:
                entry.error = None
            end = time.perf_counter()
            self.counters.waited_s += end - begin
            layout = entry.layout
            self._tracer.record("wait", "disk", layout.read_bytes, begin, end, layout.id)

    def _begin_load(self, entry: BlockState, priority: Priority, *, force: bool = False) -> bool:
        """Start reading `entry`; False when there is no room for it now.

        `force` (somebody waits for this very block) may take the slot of an awaited one.
        """
        if self._try_to_begin(entry, priority, force):
            return True
        # A guess gives up the memory that it would fill for what is sure.
        made_room = priority is not Priority.SPECULATIVE and self._expected.forget_speculative()
        return made_room and self._try_to_begin(entry, priority, force)

    def _try_to_begin(self, entry: BlockState, priority: Priority, force: bool) -> bool:
        assert entry.state is State.ABSENT
        layout = entry.layout
        staging = None
        if layout.staging_bytes:
            staging = self._staging.try_allocate(layout.staging_bytes)
            if staging is None:
                return False
        slot = self._take_slot(entry, priority, force)
        if slot is None:
            if staging is not None:
                self._staging.free(staging)
            return False
        entry.state, entry.slot, entry.staging = State.LOADING, slot, staging
        self._holders[slot] = entry
        entry.error = None
        self._expected.read_begins(entry, priority)
        entry.load = BlockLoad(
            layout,
            slot,
            staging,
            self._queue,
            self._tracer,
            check=self._wants_check(entry),
            finished=lambda error: self._load_finished(entry, error),
        )
        entry.load.start(priority)
        return True

    def _wants_check(self, entry: BlockState) -> bool:
        if entry.layout.seal is None:
            return self._check and not entry.checked
        return self._verify is Verify.ALWAYS or (self._verify is Verify.FIRST and not entry.checked)

    def _load_finished(self, entry: BlockState, error: HMTError | None) -> None:
        assert entry.slot is not None
        if error is None:
            # Outside the lock: nobody else touches a block that is loading.
            try:
                if self._spill is not None and not entry.stays:
                    entry.layout = self._spill.keep(entry.layout, entry.slot)
                entry.views = entry.layout.views(entry.slot.tensor)
            except Exception as caught:  # the waiting lease must hear of it, whatever it is
                error = HMTError(f"loading {entry.layout.id} failed: {caught!r}")
        with self._changed:
            if entry.staging is not None:
                self._staging.free(entry.staging)
            entry.staging = entry.load = None
            self._expected.read_ended(entry)
            if error is None:
                entry.state = State.READY
                entry.checked = True
                if not entry.stays:
                    self._policy.cached(entry.layout.id)
                else:
                    entry.resident = nullcontext(entry.views)
            else:
                # Nobody waits for a failed prefetch: whoever needs the block will read it again, as
                # does somebody who came when its guess had been cancelled.
                cancelled = isinstance(error, Cancelled)
                entry.error = error if entry.waiting and not cancelled else None
                self._expected.dropped(entry, unread=cancelled)
                self._free_slot(entry)
            # A cancelled guess may have ended inside of _begin_load, which makes use of its room.
            if self._backlog[Priority.SPECULATIVE] and not isinstance(error, Cancelled):
                self._begin_backlog()
            self._changed.notify_all()

    def _take_slot(self, entry: BlockState, priority: Priority, force: bool) -> HostBuffer | None:
        slots, wanted = self._slots[entry.stays], entry.layout.slot_bytes
        slot = slots.take(wanted)
        while slot is None and not entry.stays:
            coldest_first = (
                cached
                for cached in map(self._entries.__getitem__, self._policy.eviction_order())
                if slots.makes_room(cached.layout, wanted)
            )
            missing = slots.missing_bytes(wanted)
            victims = choose_victims(coldest_first, missing, priority, force=force)
            if not victims:
                return None
            for victim in victims:
                self._evict(victim)
                slot = slots.take(wanted)
                if slot is not None:
                    return slot
        return slot

    def _evict(self, entry: BlockState) -> None:
        assert entry.leases == 0 and entry.state is State.READY
        self._policy.removed(entry.layout.id)
        self._expected.dropped(entry)
        self._free_slot(entry)

    def _free_slot(self, entry: BlockState) -> None:
        assert entry.slot is not None
        del self._holders[entry.slot]
        self._slots[entry.stays].give_back(entry.slot, entry.layout.slot_bytes)
        entry.slot, entry.views, entry.state, entry.resident = None, {}, State.ABSENT, None

    def _drop(self, entry: BlockState) -> None:
        if entry.state is State.READY and entry.stays:
            self._free_slot(entry)
        elif entry.state is State.READY:
            self._evict(entry)

    def _anything_moves(self) -> bool:
        me = threading.get_ident()
        return any(e.state is State.LOADING for e in self._entries.values()) or any(
            held for thread, held in self._held.items() if thread != me
        )

    def _resident_views(self, block: BlockId) -> Mapping[str, WeightTensor]:
        return self._entries[block].views

    def _too_small(self, entry: BlockState) -> BudgetError:
        pool = self._slots[entry.stays].pool
        return BudgetError(
            f"{entry.layout.id} takes {format_bytes(entry.layout.slot_bytes)}, and the slots "
            f"have {format_bytes(pool.account.limit_bytes)}, of which "
            f"{format_bytes(pool.in_use_bytes)} are in use"
        )

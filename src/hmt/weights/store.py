"""The weight store: every block of a model, wherever it lies, by lease.

A block whose home is host memory is loaded once and stays.  A block whose home is disk is read
into a slot when it is requested or leased, and stays there until its slot is needed and it is
neither leased nor still awaited.
"""

import enum
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from hmt.base.errors import BudgetError, Cancelled, HMTError, RequestError
from hmt.base.trace import Tracer
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.store import LeasedGroup, Presence, Priority, Standing, Verify
from hmt.memory import HostBuffer, HostPool, QueueCounters, TransferQueue
from hmt.weights.eviction import LRU, EvictionPolicy
from hmt.weights.layout import BlockLayout
from hmt.weights.loading import BlockLoad
from hmt.weights.rows import RowReader
from hmt.weights.spill import SpillFile


class _State(enum.Enum):
    ABSENT = enum.auto()
    LOADING = enum.auto()
    READY = enum.auto()


@dataclass(slots=True)
class _Entry:
    layout: BlockLayout
    home: Tier
    state: _State = _State.ABSENT
    views: Mapping[str, WeightTensor] = field(default_factory=dict)
    slot: HostBuffer | None = None
    staging: HostBuffer | None = None
    load: BlockLoad | None = None
    error: HMTError | None = None
    leases: int = 0
    waiting: int = 0  # leases that wait for it
    awaited: bool = False  # requested ahead and not leased yet
    checked: bool = False  # its numbers were seen to be finite, or to be those that were packed
    # Of a resident that has been loaded: it never moves, so its lease needs no lock, which would
    # cost more than a small kernel takes.
    standing: AbstractContextManager[Mapping[str, WeightTensor]] | None = None


@dataclass(slots=True)
class StoreCounters:
    """What leases found, since the store was made."""

    hits: int = 0
    pending: int = 0
    misses: int = 0
    waited_s: float = 0.0
    host_bytes: int = 0  # bytes of blocks that were leased, from whichever tier they had come


class WeightStore:
    """Implements Weights over host memory and disk.

    Safe for several threads as long as each holds one lease at a time, or the slots hold all that
    the threads lease together: threads that wait for each other's slots wait for ever.  The engine
    has one.

    `resident` holds blocks whose home is host memory, `slots` those that come and go, `staging`
    the published form of parameters while they are converted, `rows` single rows of tables that
    stay on disk.
    """

    def __init__(
        self,
        layouts: Mapping[BlockId, BlockLayout],
        plan: Plan,
        queue: TransferQueue,
        tracer: Tracer,
        *,
        resident: HostPool,
        slots: HostPool,
        staging: HostPool,
        rows: HostPool,
        policy: EvictionPolicy | None = None,
        spill: SpillFile | None = None,
        check: bool = True,
        verify: Verify = Verify.FIRST,
    ) -> None:
        """`check` looks for NaN at the first read, and `verify` is the same for blocks of packs."""
        self._entries = {b: _Entry(layout, plan.homes[b]) for b, layout in layouts.items()}
        self._queue = queue
        self._tracer = tracer
        self._pools = {Tier.HOST: resident, Tier.DISK: slots}
        slots.belongs_to(self)
        self._holders: dict[HostBuffer, _Entry] = {}
        self._staging = staging
        self._policy = policy or LRU()
        self._spill = spill
        self._check = check
        self._verify = verify
        self._backlog: dict[Priority, deque[_Entry]] = {p: deque() for p in Priority}
        self._guess_loads: dict[BlockId, BlockLoad] = {}  # that run, and began on a guess
        self._held: Counter[int] = Counter()  # leases by thread
        self._changed = threading.Condition()
        self._rows = RowReader(queue, rows, verify=verify is not Verify.NEVER)
        self.counters = StoreCounters()

    # Life of the residents

    def load_residents(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every block whose home is host memory.  `progress(bytes done, bytes in all)`.

        Raises DiskReadError or NumericsError of the first block that fails.
        """
        residents = [e for e in self._entries.values() if e.home is Tier.HOST and e.layout.placed]
        total = sum(entry.layout.read_bytes for entry in residents)
        ahead = 0
        done = 0
        for entry in residents:
            # Keep enough requested to fill the drive's queue; staging memory bounds the rest.
            while ahead < len(residents) and self._start_ahead(residents[ahead]):
                ahead += 1
            with self.lease(entry.layout.id):
                pass
            done += entry.layout.read_bytes
            if progress is not None:
                progress(done, total)
        self.counters = StoreCounters()

    def _start_ahead(self, entry: _Entry) -> bool:
        with self._changed:
            return entry.state is not _State.ABSENT or self._begin_load(entry, Priority.SURE)

    # Weights

    def presence(self, block: BlockId) -> Presence:
        """Where `block` is now: HIT, PENDING or MISS."""
        with self._changed:
            state = self._entries[block].state
        if state is _State.READY:
            return Presence.HIT
        return Presence.PENDING if state is _State.LOADING else Presence.MISS

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        """See Weights.  Replaces what was asked for with this priority and has not begun yet.

        Blocks begin in the order given, each as soon as a slot can be had without taking one that
        is leased or awaited.  Loads of earlier guesses that are not guessed again are cancelled as
        far as they have not begun.
        """
        entries = [self._entries[block] for block in blocks]
        backlog = self._backlog[priority]
        idle = not backlog and not self._guess_loads
        if idle and all(entry.standing is not None for entry in entries):
            return  # without the lock: a mixture of experts at home in memory asks once a layer
        with self._changed:
            if priority is Priority.GUESS:
                self._cancel_guesses(kept=blocks)
            backlog.clear()
            for entry in entries:
                if entry.state is _State.ABSENT:
                    backlog.append(entry)
                elif entry.state is _State.READY:
                    entry.awaited = entry.home is Tier.DISK
                elif entry.load is not None:
                    entry.load.promote(priority)
            self._begin_backlog()

    def lease(self, block: BlockId) -> AbstractContextManager[Mapping[str, WeightTensor]]:
        """See Weights."""
        entry = self._entries[block]
        if entry.standing is not None:
            self.counters.host_bytes += entry.layout.slot_bytes
            return entry.standing
        return self._lease(entry)

    @contextmanager
    def _lease(self, entry: _Entry) -> Iterator[Mapping[str, WeightTensor]]:
        with self._changed:
            self._take(entry)
        try:
            yield entry.views
        finally:
            self._give_back([entry])

    def lease_each(
        self, blocks: Sequence[BlockId]
    ) -> AbstractContextManager[Iterator[LeasedGroup]]:
        """See Weights.  A group is one block, waited for, and those after it that are ready.

        Nothing is held while waiting, so the slots need to hold one block only; and no group takes
        a slot from the reads of the blocks after it.
        """
        entries = [self._entries[block] for block in blocks]
        if entries and all(entry.standing is not None for entry in entries):
            self.counters.host_bytes += sum(entry.layout.slot_bytes for entry in entries)
            views = [entry.views for entry in entries]
            return nullcontext(iter([list(zip(blocks, views, strict=True))]))
        return self._lease_each(entries)

    @contextmanager
    def _lease_each(self, entries: Sequence[_Entry]) -> Iterator[Iterator[LeasedGroup]]:
        held: list[_Entry] = []
        try:
            yield self._groups(entries, held)
        finally:
            self._give_back(held)

    def _groups(self, entries: Sequence[_Entry], held: list[_Entry]) -> Iterator[LeasedGroup]:
        """Leases group after group; `held` is the group that is leased now."""
        waiting = deque(entries)
        while waiting:
            self._give_back(held)
            with self._changed:
                while waiting and (not held or waiting[0].state is _State.READY):
                    self._take(waiting[0])
                    held.append(waiting.popleft())
            yield [(entry.layout.id, entry.views) for entry in held]

    def standing(self, blocks: Sequence[BlockId]) -> list[Standing] | None:
        """See Weights."""
        entries = [self._entries[block] for block in blocks]
        if any(entry.standing is None for entry in entries):
            return None
        return [Standing(entry.views, entry.layout.slot_bytes) for entry in entries]

    def count(self, nbytes: int) -> None:
        """See Weights."""
        self.counters.host_bytes += nbytes

    def rows(self, block: BlockId, name: str, ids: torch.Tensor) -> torch.Tensor:
        """See Weights.  Rows of a table on disk are read one by one, not the whole table."""
        entry = self._entries[block]
        table_rows = entry.layout.tables[name].param.spec.shape[0]
        if any(not 0 <= index < table_rows for index in ids.tolist()):
            raise RequestError(f"token ids {ids.tolist()} are not all in 0..{table_rows - 1}")
        holders = entry.layout.tables[name].holders
        if all(self._entries[holder.block].home is Tier.HOST for holder in holders):
            return self._rows.from_memory(entry.layout, name, ids, self._resident_views)
        begin = time.perf_counter()
        rows = self._rows.from_disk(entry.layout, name, ids)
        end = time.perf_counter()
        self._tracer.record("wait", "disk", rows.nbytes, begin, end)
        self.counters.waited_s += end - begin
        return rows

    def close(self) -> None:
        """End all reads and free all slots.  Nothing may be leased."""
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
            for entry in self._entries.values():
                entry.awaited = False
            self._cancel_guesses()

    def drive_counters(self) -> QueueCounters:
        """What the drive was asked for and gave, since the store was made."""
        return self._queue.counters()

    # BufferOwner: the pool asks while a slot is allocated, with our lock held

    def movable(self, buffer: HostBuffer) -> bool:
        """Whether the block in a slot is complete and nobody has it."""
        entry = self._holders[buffer]
        return entry.state is _State.READY and entry.leases == 0

    def moved(self, buffer: HostBuffer) -> None:
        """The block's views, and what kernels made of them, were of the old place."""
        entry = self._holders[buffer]
        entry.views = entry.layout.views(buffer.tensor)

    def cached_blocks(self) -> list[BlockId]:
        """Blocks in slots now, coldest first."""
        with self._changed:
            return list(self._policy.coldest_first())

    # Inside, with the lock held, but for _give_back

    def _take(self, entry: _Entry) -> None:
        self._count(entry)
        if entry.state is not _State.READY:
            self._wait_ready(entry)
        entry.leases += 1
        self._held[threading.get_ident()] += 1
        entry.awaited = False
        if entry.home is Tier.DISK:
            self._policy.used(entry.layout.id)

    def _give_back(self, held: list[_Entry]) -> None:
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
            while backlog:
                if backlog[0].state is _State.ABSENT and not self._begin_load(backlog[0], priority):
                    return  # later blocks must not take the slot that this one waits for
                backlog.popleft()

    def _count(self, entry: _Entry) -> None:
        self.counters.host_bytes += entry.layout.slot_bytes
        if entry.home is Tier.HOST:
            return
        if entry.state is _State.READY:
            self.counters.hits += 1
        elif entry.state is _State.LOADING:
            self.counters.pending += 1
        else:
            self.counters.misses += 1

    def _wait_ready(self, entry: _Entry) -> None:
        begin = time.perf_counter()
        entry.waiting += 1
        try:
            while entry.state is not _State.READY:
                if entry.error is not None:
                    raise entry.error
                if entry.state is _State.LOADING:
                    assert entry.load is not None
                    entry.load.promote(Priority.NEED)
                elif self._begin_load(entry, Priority.NEED, force=True):
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
            self._tracer.record("wait", "disk", entry.layout.read_bytes, begin, end)

    def _begin_load(self, entry: _Entry, priority: Priority, *, force: bool = False) -> bool:
        """Start reading `entry`; False when there is no room for it now.

        `force` (somebody waits for this very block) may take the slot of an awaited one.
        """
        if self._try_to_begin(entry, priority, force):
            return True
        # A guess gives up the memory that it would fill for what is sure.
        made_room = priority is not Priority.GUESS and self._cancel_guesses()
        return made_room and self._try_to_begin(entry, priority, force)

    def _cancel_guesses(self, kept: Sequence[BlockId] = ()) -> bool:
        """Drop guesses that have not begun to be read; whether any memory came free at once."""
        stale = [load for block, load in self._guess_loads.items() if block not in kept]
        before = len(self._guess_loads)
        for load in stale:
            load.cancel_guess()  # ends in _load_finished
        return len(self._guess_loads) < before

    def _try_to_begin(self, entry: _Entry, priority: Priority, force: bool) -> bool:
        layout = entry.layout
        staging = None
        if layout.staging_bytes:
            staging = self._staging.try_allocate(layout.staging_bytes)
            if staging is None:
                return False
        slot = self._take_slot(entry, force)
        if slot is None:
            if staging is not None:
                self._staging.free(staging)
            return False
        entry.state, entry.slot, entry.staging = _State.LOADING, slot, staging
        self._holders[slot] = entry
        entry.error = None
        entry.awaited = priority is not Priority.GUESS
        entry.load = BlockLoad(
            layout,
            slot,
            staging,
            self._queue,
            self._tracer,
            check=self._wants_check(entry),
            finished=lambda error: self._load_finished(entry, error),
        )
        if priority is Priority.GUESS:
            self._guess_loads[layout.id] = entry.load
        entry.load.start(priority)
        return True

    def _wants_check(self, entry: _Entry) -> bool:
        if entry.layout.seal is None:
            return self._check and not entry.checked
        return self._verify is Verify.ALWAYS or (self._verify is Verify.FIRST and not entry.checked)

    def _load_finished(self, entry: _Entry, error: HMTError | None) -> None:
        assert entry.slot is not None
        if error is None:
            # Outside the lock: nobody else touches a block that is loading.
            try:
                if self._spill is not None and entry.home is Tier.DISK:
                    entry.layout = self._spill.keep(entry.layout, entry.slot)
                entry.views = entry.layout.views(entry.slot.tensor)
            except Exception as caught:  # the waiting lease must hear of it, whatever it is
                error = HMTError(f"loading {entry.layout.id} failed: {caught!r}")
        with self._changed:
            if entry.staging is not None:
                self._staging.free(entry.staging)
            entry.staging = entry.load = None
            self._guess_loads.pop(entry.layout.id, None)
            if error is None:
                entry.state = _State.READY
                entry.checked = True
                if entry.home is Tier.DISK:
                    self._policy.used(entry.layout.id)
                else:
                    entry.standing = nullcontext(entry.views)
            else:
                # Nobody waits for a failed prefetch: whoever needs the block will read it again, as
                # does somebody who came when its guess had been cancelled.
                wanted = entry.waiting and not isinstance(error, Cancelled)
                entry.error = error if wanted else None
                self._free_slot(entry)
            self._changed.notify_all()

    def _take_slot(self, entry: _Entry, force: bool) -> HostBuffer | None:
        pool = self._pools[entry.home]
        slot = pool.try_allocate(entry.layout.slot_bytes)
        if slot is not None or entry.home is Tier.HOST:
            return slot
        victims = self._victims(force)
        room = pool.account.limit_bytes - pool.in_use_bytes
        if room + sum(victim.layout.slot_bytes for victim in victims) < entry.layout.slot_bytes:
            return None  # evicting them all would empty the cache for nothing
        for victim in victims:
            self._evict(victim)
            slot = pool.try_allocate(entry.layout.slot_bytes)
            if slot is not None:
                return slot
        return None

    def _victims(self, force: bool) -> list[_Entry]:
        """Cached blocks that may go, in the order in which they should; awaited ones last."""
        entries = [self._entries[block] for block in self._policy.coldest_first()]
        free = [entry for entry in entries if entry.leases == 0]
        unawaited = [entry for entry in free if not entry.awaited]
        return unawaited + [entry for entry in free if entry.awaited] if force else unawaited

    def _evict(self, entry: _Entry) -> None:
        assert entry.leases == 0 and entry.state is _State.READY
        self._policy.removed(entry.layout.id)
        self._free_slot(entry)

    def _free_slot(self, entry: _Entry) -> None:
        assert entry.slot is not None
        del self._holders[entry.slot]
        self._pools[entry.home].free(entry.slot)
        entry.slot, entry.views, entry.state, entry.standing = None, {}, _State.ABSENT, None

    def _drop(self, entry: _Entry) -> None:
        if entry.state is _State.READY:
            self._policy.removed(entry.layout.id)
            self._free_slot(entry)

    def _anything_moves(self) -> bool:
        me = threading.get_ident()
        return any(e.state is _State.LOADING for e in self._entries.values()) or any(
            held for thread, held in self._held.items() if thread != me
        )

    def _resident_views(self, block: BlockId) -> Mapping[str, WeightTensor]:
        return self._entries[block].views

    def _too_small(self, entry: _Entry) -> BudgetError:
        pool = self._pools[entry.home]
        return BudgetError(
            f"{entry.layout.id} takes {format_bytes(entry.layout.slot_bytes)}, and the slots "
            f"have {format_bytes(pool.account.limit_bytes)}, of which "
            f"{format_bytes(pool.in_use_bytes)} are in use"
        )

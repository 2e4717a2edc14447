"""Weights for a device that computes beside the CPU: what stays there, and what is copied there."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.plan import DevicePlan, Plan, Tier
from hmt.contracts.store import LeasedGroup, MoeBackend, Presence, Priority, ResidentBlock
from hmt.kernels import graph_ops
from hmt.kernels.host_experts import HostExpertChannel, make_channel
from hmt.kernels.row_table import RowTable
from hmt.memory.device import CopyEvent, Device, DeviceBuffer, DevicePool, Event
from hmt.weights.experts.moe_backends import MoeBackends, Params, StreamedExpert, make_backends
from hmt.weights.layout import BlockLayout
from hmt.weights.store.block_store import WeightStore
from hmt.weights.store.device_embedding import token_table
from hmt.weights.store.device_state import DeviceCounters
from hmt.weights.store.slot_schedule import (
    SlotSchedule,
    copied_blocks,
    for_experts_of,
    schedule_slots,
)

# From here on the CPU takes longer for a block than its copy does: an FFN of 400 MB is copied in
# 7 ms at 55 GB/s, and computed in 0.3 ms per token at 4.7 Top/s (16 AMX cores; not yet tuned).
_MANY_TOKENS = 32
# From here on a step needs most of a layer's experts, and the link brings all of them sooner than
# link and CPU together compute them: at 4.7 Top/s 256 tokens of DeepSeek-V3 take the CPU 38 ms.
_MOST_EXPERTS_TOKENS = 256
_TOKENS = BlockId(TRUNK, BlockKind.EMBEDDING)
_FEW, _MANY, _ALL_EXPERTS = range(3)  # kinds of steps


@dataclass(slots=True)
class _CopiedBlock:
    """A block in a slot of the device, or on its way there."""

    slot: DeviceBuffer
    views: Params
    arrived: Event
    leases: int = 0


class DeviceWeights:
    """Implements Weights: each block where it computes.  For one thread.

    Blocks that compute on the CPU come from `store` as they do without a device.  The others stay
    on the device, or are copied into a slot there, in the order in which a step uses them, as soon
    as it is free: the first ones of the next step while the last ones of this one compute.  A slot
    is written again when the kernels that read it have ended.  Slots take turns, so a block always
    comes to the same one, and what is captured can read it there.
    """

    def __init__(
        self,
        store: WeightStore,
        layouts: Mapping[BlockId, BlockLayout],
        plan: Plan,
        share: DevicePlan,
        device: Device,
        *,
        resident: DevicePool,
        slots: DevicePool,
    ) -> None:
        """`share` is the part of `plan` for `device`."""
        self._store, self.request_rows = store, store.request_rows
        self._layouts = layouts
        self._device = device
        self._homes = plan.homes
        everything = share.computes_prompts
        no_experts = frozenset(
            b for b in everything if b.kind is not BlockKind.EXPERT or b in share.computes
        )
        self._computing = (share.computes, no_experts, everything)  # by kind of step
        self._kind = _FEW
        self._to_stay = [
            block
            for block, home in plan.homes.items()
            if home is Tier.DEVICE and block in share.computes
        ]
        self._plan, self._share = plan, share
        self._resident_pool = resident
        self._resident: dict[BlockId, ResidentBlock] = {}
        self._resident_memory: dict[BlockId, Tensor] = {}
        self._standing: dict[BlockId, Tensor] = {}  # what stays in host memory, and was copied
        self.moe_backends = MoeBackends({})
        self._free_slots = {
            size: [slots.allocate(size) for _ in range(count)]
            for size, count in share.slot_counts.items()
        }
        self._schedule = [
            schedule_slots(copied_blocks(plan, blocks), self._size_of, self._free_slots)
            for blocks in self._computing
        ]
        self._full_schedule = self._schedule[_ALL_EXPERTS]
        self._cached: dict[BlockId, int] = {}  # experts, and where they lie, while all compute
        self._shared = for_experts_of(self._full_schedule, self._schedule[:_ALL_EXPERTS])
        del self._shared[share.staging_slots :]
        self._views: dict[tuple[int, BlockId], Params] = {}  # of blocks, by their slots' addresses
        self._taken: dict[DeviceBuffer, BlockId] = {}
        self._copied: OrderedDict[BlockId, _CopiedBlock] = OrderedDict()  # in the order of copying
        # Of copies under way: what holds the host's where it is.  They arrive in this order.
        self._sources: deque[tuple[Event, ExitStack]] = deque()
        self._under_way: deque[CopyEvent] = deque()  # not yet in `counters`
        self._counters = DeviceCounters()
        self.count = store.count
        self._tokens: RowTable | None = None
        self._looks_up_rows = graph_ops.can_look_up_rows(device.where)
        self.routed = store.routed

    def load_residents(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Copy every block whose home is the device.  `progress(bytes done, bytes in all)`.

        Raises what reading raises.
        """
        total = sum(self._layouts[block].slot_bytes for block in self._to_stay)
        done = 0
        for index, block in enumerate(self._to_stay):
            layout = self._layouts[block]
            self._store.request(self._to_stay[index : index + 4], Priority.PREFETCH)
            buffer = self._resident_pool.allocate(layout.slot_bytes)
            with self._store.lease_bytes(block) as source:
                self._device.copy(buffer.tensor, source).wait()
            self._store.forget(block)
            views = layout.views(buffer.tensor)
            self._resident[block] = ResidentBlock(views, layout.slot_bytes)
            self._resident_memory[block] = buffer.tensor
            done += layout.slot_bytes
            if progress is not None:
                progress(done, total)

    def form_backends(self, pool: DevicePool, *, host_is_pinned: bool) -> None:
        """Let layers' experts be computed in several places; `pool` has their slots.

        Where host memory is not pinned the device cannot fetch experts from it.
        """
        if host_is_pinned or not self._share.staging_slots:
            self.moe_backends = make_backends(
                self._plan, self._share, self._layouts, self._store, self._device, pool,
                self._resident_memory, self.stream, [slot.tensor for slot in self._shared],
            )  # fmt: skip

    def open_channel(self, **sizes: Any) -> HostExpertChannel | None:
        """A channel for the backends that need the host; None without one: see `make_channel`."""
        experts = self.moe_backends.on_host()
        channel = make_channel(self._device.where, experts, **sizes) if experts else None
        if channel is not None:
            self.moe_backends.use(channel)
        return channel

    def begin(self, tokens: int) -> None:
        """A step of `tokens` tokens comes next."""
        kind = _FEW if tokens < _MANY_TOKENS else _MANY
        if tokens >= _MOST_EXPERTS_TOKENS or (kind is _MANY and not self.moe_backends.by_layer):
            kind = _ALL_EXPERTS
        changes = kind != self._kind
        if changes and _ALL_EXPERTS in (kind, self._kind):
            self._hand_over()
        self._kind = kind
        if kind is _ALL_EXPERTS:
            changes |= self._find_cached()
        if changes:
            for block, copied in list(self._copied.items()):
                if copied.slot is not self._now.slots.get(block):
                    self._free(block)
        self._copy_ahead(0)

    def _find_cached(self) -> bool:
        """Look for experts that need not be copied; whether they are others than before.

        Steps of few tokens change that on the device, so the CPU waits for those here.
        """
        turns = self._full_schedule
        if not turns.experts_separate or (cached := self.moe_backends.cached()) == self._cached:
            return False
        self._cached = cached
        self._schedule[_ALL_EXPERTS] = turns.without(cached, self._size_of, self._free_slots)
        return True

    @property
    def _now(self) -> SlotSchedule:
        return self._schedule[self._kind]

    def _size_of(self, block: BlockId) -> int:
        return self._layouts[block].slot_bytes

    def _hand_over(self) -> None:
        """Slots of prompts' experts become those of experts that few tokens bring, or the reverse.

        Kernels bring those; whichever comes second waits for the first.
        """
        if not self._shared:
            return
        for arrived, _ in self._sources:
            self._device.wait_event(arrived)
        used = self._device.record_event()
        for slot in self._shared:
            slot.last_use = used

    @property
    def counters(self) -> DeviceCounters:
        """What has been copied until now."""
        while self._under_way and self._under_way[0].reached():
            self._counters.link_s += self._under_way.popleft().elapsed_s()
        return self._counters

    # Weights

    def lease(self, block: BlockId) -> AbstractContextManager[Params]:
        """See Weights."""
        if self.is_on_host(block):
            return self._store.lease(block)
        standing = self._resident.get(block)
        if standing is not None:
            return nullcontext(standing.params)
        return self._lease_copied(block)

    def lease_each(
        self, blocks: Sequence[BlockId]
    ) -> AbstractContextManager[Iterator[LeasedGroup]]:
        """See Weights."""
        if all(map(self.is_on_host, blocks)):
            return self._store.lease_each(blocks)
        return nullcontext(self._one_by_one(blocks))

    def resident(self, blocks: Sequence[BlockId]) -> Sequence[ResidentBlock] | None:
        """See Weights."""
        if all(map(self.is_on_host, blocks)):
            return self._store.resident(blocks)
        found = [self._resident[block] for block in blocks if block in self._resident]
        return found if len(found) == len(blocks) else None

    def find_tokens(self, *, host_is_pinned: bool) -> None:
        """Let tokens be looked up on the device, where it can read their table."""
        if _TOKENS in self._layouts and graph_ops.has_kernels(self._device.where):
            table = self._layouts[_TOKENS].tables["weight"]
            self._tokens = token_table(
                table, self._device, self._resident, self._store, host_is_pinned=host_is_pinned
            )

    def find_tokens_of(self, lender: "DeviceWeights") -> None:
        """Let tokens be looked up as another model does, whose table this one uses."""
        self._tokens = lender._tokens

    @property
    def looks_up_tokens(self) -> bool:
        """Whether `rows` of the table of tokens are looked up on the device."""
        return self._tokens is not None

    def rows(self, block: BlockId, name: str, ids: Tensor) -> Tensor:
        """See Weights; on the device where it can look them up."""
        if block != _TOKENS or self._tokens is None or not self._looks_up_rows:
            return self._store.rows(block, name, ids)  # other tables are those of positions
        assert name == "weight"
        return graph_ops.rows_at(self._tokens, ids.to(self._device.where, non_blocking=True))

    def moe_backend(self, layer: int) -> MoeBackend | None:
        """See Weights."""
        if self._kind is _ALL_EXPERTS and layer in self.moe_backends.streamed:
            return self.moe_backends.streamed[layer]
        return self.moe_backends.by_layer.get(layer)

    def stream(self, blocks: Sequence[BlockId]) -> Iterator[list[StreamedExpert]]:
        """A layer's experts on the device, in this order, in groups of as many as are copied.

        A group stays until the next is asked for.  Those that are cached are not copied.
        """
        most, followed = self._group_of(blocks[0]), None
        held: list[BlockId] = []
        group: list[StreamedExpert] = []
        try:
            for block in blocks:
                address = self._cached.get(block)
                if address is not None:
                    group.append((block.index, None, address))
                    continue
                if held and (len(held) == most or block not in self._copied):
                    yield group
                    group = []
                    self._give_back(held)
                if not held:
                    self._pass_over(block)
                copied = self._copied.get(block) or self._copy(block)
                if copied.arrived is not followed:  # most of a group arrive together
                    followed = copied.arrived
                    self._device.wait_event(followed)
                copied.leases += 1
                held.append(block)
                group.append((block.index, copied.views, copied.slot.tensor.data_ptr()))
            yield group
        finally:
            self._give_back(held)

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        """See Weights."""
        self._store.request([b for b in blocks if b not in self._resident], priority)

    def abandon(self) -> None:
        """Forget what was asked for ahead of time: the step that asked has failed."""
        self._device.synchronize()
        for block in [block for block, copied in self._copied.items() if not copied.leases]:
            self._free(block)
        self._store.abandon()

    def close(self) -> None:
        """Give up all that is on the device.  Nothing may be leased."""
        self._device.synchronize()
        for block in list(self._copied):
            self._free(block)
        while self._sources:
            self._sources.popleft()[1].close()
        self._resident.clear()
        self._resident_memory.clear()
        self._standing.clear()
        self.moe_backends = MoeBackends({})
        self._views.clear()

    def is_on_host(self, block: BlockId) -> bool:
        """Whether the CPU computes with a block in steps like this."""
        return block not in self._computing[self._kind]

    # For steps that are captured: what `lease` does, by its parts

    def place(self, block: BlockId) -> Params | None:
        """Where a block that is copied will lie in steps like this; None for others."""
        slot = self._now.slots.get(block)
        return None if slot is None else self._views_in(slot, block)

    def arrive(self, block: BlockId) -> None:
        """What comes next on the compute queue waits for a block that is copied."""
        self._pass_over(block)
        copied = self._copied.get(block) or self._copy(block)
        self._device.wait_event(copied.arrived)
        copied.leases += 1

    def leave(self, block: BlockId) -> None:
        """What is on the compute queue was the last to read it in this step."""
        copied = self._copied[block]
        copied.leases -= 1
        copied.slot.last_use = self._device.record_event()
        # It comes again in the next step only, when all others have had the slot.
        if not copied.leases:
            self._free(block)
            self._copy_ahead(self._now.numbers[block] + 1)

    def waited(self, seconds: float) -> None:
        """Count time in which the CPU waited for the device."""
        self._counters.waited_s += seconds

    # Inside

    def _views_in(self, slot: DeviceBuffer, block: BlockId) -> Params:
        key = (slot.tensor.data_ptr(), block)
        if key not in self._views:
            self._views[key] = self._layouts[block].views(slot.tensor)
        return self._views[key]

    def _pass_over(self, block: BlockId) -> None:
        """Free what was copied for a step and not used in it, now that `block` is."""
        positions = self._now.numbers
        here, half = positions[block], len(positions) // 2
        passed = []
        for other, copied in self._copied.items():
            if other == block:
                break  # those behind it are for later
            if not copied.leases and (positions[other] - here) % len(positions) > half:
                passed.append(other)
        for other in passed:
            self._free(other)

    def _bytes_of(self, block: BlockId, leases: ExitStack) -> Tensor:
        """A block in host memory; what stays there is leased only once."""
        found = self._standing.get(block)
        if found is not None:
            self._store.count(found.nbytes)
            return found
        found = leases.enter_context(self._store.lease_bytes(block))
        if self._store.resident([block]) is not None:
            self._standing[block] = found
        return found

    def _copy_ahead(self, position: int) -> None:
        """Copy what is used from `position` of the order on, as long as there are slots."""
        order, number = self._now.order, 0
        while number < len(order):
            at = (position + number) % len(order)
            if order[at] in self._copied:
                number += 1
                continue
            together = self._next_to_copy(order, at)
            if not together:  # what comes first goes over the link first
                return
            self._copy_all(together)
            number += len(together)

    def _next_to_copy(self, order: Sequence[BlockId], at: int) -> list[BlockId]:
        """What can be copied from there on, at once: a block, or some of a layer's experts.

        A small expert takes the link less time (60 us) than copying it alone takes the CPU.
        """
        first, slots = order[at], set[DeviceBuffer]()
        if self._store.presence(first) is not Presence.HIT:
            return []
        several = first.kind is BlockKind.EXPERT and self._homes[first] is Tier.HOST
        found: list[BlockId] = []
        for block in order[at : at + self._group_of(first)] if several else [first]:
            slot = self._now.slots[block]
            alike = (block.layer, block.kind, self._homes[block]) == (
                first.layer, first.kind, self._homes[first],
            )  # fmt: skip
            if not alike or block in self._copied or slot in self._taken or slot in slots:
                break
            slots.add(slot)
            found.append(block)
        return found

    def _group_of(self, block: BlockId) -> int:
        """How many like it are copied while as many compute."""
        slots = self._share.slot_counts.get(self._layouts[block].slot_bytes, 0)
        return max(1, slots // 2)

    def _one_by_one(self, blocks: Sequence[BlockId]) -> Iterator[LeasedGroup]:
        resident = [(block, self._resident.get(block)) for block in blocks]
        if all(standing is not None for _, standing in resident):
            yield [(block, standing.params) for block, standing in resident if standing]
            return
        for block in blocks:
            with self.lease(block) as params:
                yield [(block, params)]

    @contextmanager
    def _lease_copied(self, block: BlockId) -> Iterator[Params]:
        self.arrive(block)
        try:
            yield self._copied[block].views
        finally:
            self.leave(block)

    def _give_back(self, held: list[BlockId]) -> None:
        if not held:
            return
        last, used = held[-1], self._device.record_event()
        while held:
            copied = self._copied[held[-1]]
            copied.leases -= 1
            copied.slot.last_use = used
            self._free(held.pop())
        self._copy_ahead(self._now.numbers[last] + 1)

    def _copy(self, block: BlockId) -> _CopiedBlock:
        """Copy a block that is needed now, if need be into the slot of what was asked for later."""
        later = self._taken.get(self._now.slots[block])
        if later is not None:
            if self._copied[later].leases:
                size = format_bytes(self._layouts[block].slot_bytes)
                raise BudgetError(
                    f"{block} takes {size} of GPU memory, and its slot is in use: "
                    "raise --gpu-memory"
                )
            self._free(later)
        self._copy_all([block])
        return self._copied[block]

    def _copy_all(self, blocks: Sequence[BlockId]) -> None:
        """To their slots, which are free; several are at home in host memory."""
        self._let_go()
        slots = [self._now.slots[block] for block in blocks]
        uses = dict.fromkeys(slot.last_use for slot in slots if slot.last_use is not None)
        with ExitStack() as stack:
            source = stack.enter_context(ExitStack())
            host_bytes = [self._bytes_of(block, source) for block in blocks]
            arrived = self._device.copy_each([slot.tensor for slot in slots], host_bytes, uses)
            if any(self._homes[block] is Tier.DISK for block in blocks):
                # Its slot in host memory is wanted for the next read.
                arrived.wait()
            else:
                self._sources.append((arrived, source))
                stack.pop_all()
        self._under_way.append(arrived)
        for block, slot in zip(blocks, slots, strict=True):
            self._counters.copied_bytes += slot.nbytes
            self._copied[block] = _CopiedBlock(slot, self._views_in(slot, block), arrived)
            self._taken[slot] = block

    def _free(self, block: BlockId) -> None:
        copied = self._copied.pop(block)
        del self._taken[copied.slot]

    def _let_go(self) -> None:
        """Release the host's copies of what has arrived."""
        while self._sources and self._sources[0][0].reached():
            self._sources.popleft()[1].close()

"""Weights for a device that computes beside the CPU: what stays there, and what is copied there."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.store import LeasedGroup, Presence, Priority, Standing
from hmt.memory.device import Copy, Device, DeviceBuffer, DevicePool, Mark
from hmt.weights.layout import BlockLayout
from hmt.weights.store import WeightStore

Params = Mapping[str, WeightTensor]

# From here on the CPU takes longer for a block than its copy does: an FFN of 400 MB is copied in
# 7 ms at 55 GB/s, and computed in 0.3 ms per token at 4.7 Top/s (16 AMX cores; not yet tuned).
_MANY_TOKENS = 32


@dataclass(slots=True)
class DeviceCounters:
    """Sums since the load, of copies from host memory to the device for steps.

    link_s     time in which the link was at it; of those that have arrived
    waited_s   time in which the CPU waited for the device before it computed
    """

    copied_bytes: int = 0
    link_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Place:
    """The slot that a block always has, and its views there."""

    slot: DeviceBuffer
    views: Params


@dataclass(slots=True)
class _Copied:
    """A block in a slot of the device, or on its way there.

    source   holds the host's copy where it is until the device has it
    """

    place: _Place
    arrived: Mark
    source: ExitStack
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
        device: Device,
        *,
        resident: DevicePool,
        slots: DevicePool,
    ) -> None:
        self._store = store
        self._layouts = layouts
        self._device = device
        self._homes = plan.homes
        device_blocks = (plan.device.computes, plan.device.computes_prompts)
        self._computing = device_blocks  # in steps of few tokens, and of many
        self._orders = tuple(
            [b for b in plan.homes if b in blocks and plan.homes[b] is not Tier.DEVICE]
            for blocks in device_blocks
        )
        self._many = False
        self._to_stay = [block for block, home in plan.homes.items() if home is Tier.DEVICE]
        self._resident_pool = resident
        self._resident: dict[BlockId, Standing] = {}
        free = {
            size: [slots.allocate(size) for _ in range(count)]
            for size, count in plan.device.slot_counts.items()
        }
        self._places = tuple(self._take_turns(order, free) for order in self._orders)
        self._taken: dict[DeviceBuffer, BlockId] = {}
        self._copied: OrderedDict[BlockId, _Copied] = OrderedDict()  # in the order of copying
        self._leaving: list[tuple[Mark, ExitStack]] = []  # sources of copies under way
        self._under_way: deque[Copy] = deque()  # not yet in `counters`
        self._counters = DeviceCounters()
        self.count = store.count
        self.rows = store.rows
        self.routed = store.routed

    def load_residents(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Copy every block whose home is the device.  `progress(bytes done, bytes in all)`.

        Raises what reading raises.
        """
        total = sum(self._layouts[block].slot_bytes for block in self._to_stay)
        done = 0
        for index, block in enumerate(self._to_stay):
            layout = self._layouts[block]
            self._store.request(self._to_stay[index : index + 4], Priority.SURE)
            buffer = self._resident_pool.allocate(layout.slot_bytes)
            with self._store.lease_bytes(block) as source:
                self._device.copy(buffer.tensor, source).wait()
            self._store.forget(block)
            views = layout.views(buffer.tensor)
            self._resident[block] = Standing(views, layout.slot_bytes)
            done += layout.slot_bytes
            if progress is not None:
                progress(done, total)

    def begin(self, tokens: int) -> None:
        """A step of `tokens` tokens comes next."""
        many = tokens >= _MANY_TOKENS
        if many != self._many:
            self._many = many
            places = self._places[many]
            for block, copied in list(self._copied.items()):
                if copied.place is not places.get(block):
                    self._free(block)
        self._copy_ahead(0)

    @property
    def counters(self) -> DeviceCounters:
        """What has been copied until now."""
        while self._under_way and self._under_way[0].reached():
            self._counters.link_s += self._under_way.popleft().took_s()
        return self._counters

    # Weights

    def lease(self, block: BlockId) -> AbstractContextManager[Params]:
        """See Weights."""
        if self._on_host(block):
            return self._store.lease(block)
        standing = self._resident.get(block)
        if standing is not None:
            return nullcontext(standing.params)
        return self._lease_copied(block)

    def lease_each(
        self, blocks: Sequence[BlockId]
    ) -> AbstractContextManager[Iterator[LeasedGroup]]:
        """See Weights."""
        if all(map(self._on_host, blocks)):
            return self._store.lease_each(blocks)
        return nullcontext(self._one_by_one(blocks))

    def standing(self, blocks: Sequence[BlockId]) -> Sequence[Standing] | None:
        """See Weights."""
        if all(map(self._on_host, blocks)):
            return self._store.standing(blocks)
        found = [self._resident[block] for block in blocks if block in self._resident]
        return found if len(found) == len(blocks) else None

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
        for _, source in self._leaving:
            source.close()
        self._leaving.clear()
        self._resident.clear()

    # For steps that are captured: what `lease` does, by its parts

    def place(self, block: BlockId) -> Params | None:
        """Where a block that is copied will lie in steps like this; None for others."""
        place = self._places[self._many].get(block)
        return None if place is None else place.views

    def arrive(self, block: BlockId) -> None:
        """What comes next on the compute queue waits for a block that is copied."""
        copied = self._copied.get(block) or self._copy(block)
        self._device.follow(copied.arrived)
        copied.leases += 1

    def leave(self, block: BlockId) -> None:
        """What is on the compute queue was the last to read it in this step."""
        copied = self._copied[block]
        copied.leases -= 1
        copied.place.slot.last_use = self._device.mark()
        # It comes again in the next step only, when all others have had the slot.
        if not copied.leases:
            self._free(block)
            self._copy_ahead(self._orders[self._many].index(block) + 1)

    def waited(self, seconds: float) -> None:
        """Count time in which the CPU waited for the device."""
        self._counters.waited_s += seconds

    # Inside

    def _take_turns(
        self, order: Sequence[BlockId], slots: Mapping[int, Sequence[DeviceBuffer]]
    ) -> dict[BlockId, _Place]:
        places = {}
        taken: Counter[int] = Counter()
        for block in order:
            layout = self._layouts[block]
            same = slots[layout.slot_bytes]
            slot = same[taken[layout.slot_bytes] % len(same)]
            taken[layout.slot_bytes] += 1
            places[block] = _Place(slot, layout.views(slot.tensor))
        return places

    def _on_host(self, block: BlockId) -> bool:
        return block not in self._computing[self._many]

    def _copy_ahead(self, position: int) -> None:
        """Copy what is used from `position` of the order on, as long as there are slots."""
        order = self._orders[self._many]
        for number in range(len(order)):
            block = order[(position + number) % len(order)]
            if block in self._copied:
                continue
            # What comes first goes over the link first.
            if self._store.presence(block) is not Presence.HIT or not self._try_to_copy(block):
                return

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
            yield self._copied[block].place.views
        finally:
            self.leave(block)

    def _copy(self, block: BlockId) -> _Copied:
        """Copy a block that is needed now, if need be into the slot of what was asked for later."""
        later = self._taken.get(self._places[self._many][block].slot)
        if later is not None:
            if self._copied[later].leases:
                size = format_bytes(self._layouts[block].slot_bytes)
                raise BudgetError(
                    f"{block} takes {size} of GPU memory, and its slot is in use: "
                    "raise --gpu-memory"
                )
            self._free(later)
        copied = self._try_to_copy(block)
        assert copied is not None, "the slot is free"
        return copied

    def _try_to_copy(self, block: BlockId) -> _Copied | None:
        place = self._places[self._many][block]
        slot = place.slot
        if slot in self._taken:
            return None
        self._let_go()
        with ExitStack() as stack:
            source = ExitStack()
            host_bytes = source.enter_context(self._store.lease_bytes(block))
            stack.enter_context(source)
            arrived = self._device.copy(slot.tensor, host_bytes, after=slot.last_use)
            if self._homes[block] is Tier.DISK:
                # Its slot in host memory is wanted for the next read.
                arrived.wait()
                source.close()
            stack.pop_all()
        self._under_way.append(arrived)
        self._counters.copied_bytes += slot.nbytes
        copied = self._copied[block] = _Copied(place, arrived, source)
        self._taken[slot] = block
        return copied

    def _free(self, block: BlockId) -> None:
        copied = self._copied.pop(block)
        del self._taken[copied.place.slot]
        self._leaving.append((copied.arrived, copied.source))

    def _let_go(self) -> None:
        """Release the host's copies of what has arrived."""
        for copied in self._copied.values():
            if copied.arrived.reached():
                copied.source.close()
        there = [(mark, source) for mark, source in self._leaving if mark.reached()]
        for _, source in there:
            source.close()
        self._leaving = [left for left in self._leaving if left not in there]


def inner_homes(plan: Plan) -> Mapping[BlockId, Tier]:
    """Homes as the host's store sees them: what lives on the device passes through it once."""
    return {block: Tier.DISK if home is Tier.DEVICE else home for block, home in plan.homes.items()}

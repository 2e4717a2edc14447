"""Which slot of a device each block comes to that is copied there, and in which order."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.plan import Plan, Tier
from hmt.memory.device import DeviceBuffer

SlotNumbers = Mapping[int, Sequence[DeviceBuffer]]


@dataclass(frozen=True, slots=True)
class SlotSchedule:
    """Blocks that steps of one kind copy, in the order in which they use them.

    numbers           of each in that order
    slots             of each; slots of a size take turns
    experts_separate  whether no other block comes to an expert's slot
    """

    order: list[BlockId]
    numbers: dict[BlockId, int]
    slots: dict[BlockId, DeviceBuffer]
    experts_separate: bool

    def without(
        self, experts: Collection[BlockId], size_of: Callable[[BlockId], int], slots: SlotNumbers
    ) -> "SlotSchedule":
        """Of those that are left when some `experts` are not copied.  Others keep their slots.

        Experts must be apart.
        """
        order = [block for block in self.order if block not in experts]
        left = schedule_slots([b for b in order if b.kind is BlockKind.EXPERT], size_of, slots)
        others = {b: slot for b, slot in self.slots.items() if b.kind is not BlockKind.EXPERT}
        return SlotSchedule(order, _numbered(order), others | left.slots, True)


def schedule_slots(
    order: Sequence[BlockId], size_of: Callable[[BlockId], int], slots: SlotNumbers
) -> SlotSchedule:
    """Each block of `order` in the next slot of its size."""
    found = {}
    taken: Counter[int] = Counter()
    for block in order:
        size = size_of(block)
        found[block] = slots[size][taken[size] % len(slots[size])]
        taken[size] += 1
    theirs, others = (
        {slot for block, slot in found.items() if (block.kind is BlockKind.EXPERT) is own}
        for own in (True, False)
    )
    return SlotSchedule(list(order), _numbered(order), found, not theirs & others)


def copied_blocks(plan: Plan, blocks: Collection[BlockId]) -> list[BlockId]:
    """Those of `blocks` that do not live on the device, in model order."""
    return [b for b in plan.homes if b in blocks and plan.homes[b] is not Tier.DEVICE]


def for_experts_of(schedule: SlotSchedule, others: Sequence[SlotSchedule]) -> list[DeviceBuffer]:
    """Slots of experts in `schedule` to which no block comes in `others`; none of several sizes."""
    used = {slot for other in others for slot in other.slots.values()}
    experts = (slot for block, slot in schedule.slots.items() if block.kind is BlockKind.EXPERT)
    found = list(dict.fromkeys(slot for slot in experts if slot not in used))
    return found if len({slot.tensor.nbytes for slot in found}) == 1 else []


def _numbered(order: Sequence[BlockId]) -> dict[BlockId, int]:
    return {block: number for number, block in enumerate(order)}

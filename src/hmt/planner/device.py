"""What a device that computes beside the CPU gets: layers, and the memory for them.

A layer computes where its weights are, or its weights are copied to the device while others are
being computed.  Layers come one after the other, but copying goes on all the time, so of the
layers that do not fit on the device the copied share is what the link carries while the CPU reads
the others from memory: link / (link + memory) of their bytes.  Layers that stay come at the lowest
cost and first; copied ones are spread among those of the CPU, where there is time to copy them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes, round_up
from hmt.contracts.blocks import BlockId, BlockKind, BlockSize
from hmt.contracts.plan import DeviceShare, Machine
from hmt.planner.footprint import Demand, activation_bytes, kv_bytes
from hmt.planner.slots import slot_counts

_ALIGNMENT = 256
_NO_SLOTS: Mapping[int, int] = {}
_COPIED_LAYERS = 2  # slots for so many: one is copied while the other computes


@dataclass(slots=True)
class _Stage:
    """A layer, or the head: what it takes on the device."""

    index: int
    blocks: list[BlockSize]
    kv_bytes: int

    @property
    def weight_bytes(self) -> int:
        return sum(round_up(block.slot_bytes, _ALIGNMENT) for block in self.blocks)

    @property
    def has_experts(self) -> bool:
        return any(block.id.kind is BlockKind.EXPERT for block in self.blocks)


def share_of_device(
    demand: Demand, device_bytes: int, machine: Machine, *, chunk: int, context: int
) -> tuple[DeviceShare, list[BlockId]]:
    """Decide what the device gets of `device_bytes`, and which blocks live there.

    Raises BudgetError where not even one layer would fit.
    """
    stages = _stages(demand, context)
    activations = activation_bytes(demand, chunk, context)
    room = device_bytes - activations
    everything = sum(stage.weight_bytes + stage.kv_bytes for stage in stages)
    chosen, copied, counts = stages, list[_Stage](), _NO_SLOTS
    if everything > room:
        chosen, copied, counts = _what_fits(stages, room, _copied_share(machine))
    if not chosen and not copied:
        least = min(stage.weight_bytes + stage.kv_bytes for stage in stages) + activations
        raise BudgetError(
            f"{demand.spec.architecture} cannot use {format_bytes(device_bytes)} of GPU memory: "
            f"its smallest layer takes {format_bytes(least)} with its keys and values and "
            "activations; give --gpu-memory more, or 0 to compute on the CPU alone"
        )
    slots = sum(round_up(size, _ALIGNMENT) * count for size, count in counts.items())
    share = DeviceShare(
        computes=frozenset(b.id for stage in (*chosen, *copied) for b in stage.blocks),
        stages=frozenset(stage.index for stage in (*chosen, *copied)),
        reserved={
            "resident": sum(stage.weight_bytes for stage in chosen),
            "slots": slots,
            "kv": sum(stage.kv_bytes for stage in (*chosen, *copied)),
            "activations": activations,
        },
        slot_counts=counts,
    )
    return share, [block.id for stage in chosen for block in stage.blocks]


def _stages(demand: Demand, context: int) -> list[_Stage]:
    kv = _layer_kv(demand)
    tokens = kv_bytes(demand, context) // max(1, demand.kv_token_bytes)
    layers = demand.spec.layers
    stages = [
        _Stage(index, [], round_up(kv[index] * tokens, _ALIGNMENT)) for index in range(layers)
    ]
    head = _Stage(layers, [], 0)
    for block in demand.blocks:
        if block.id.kind is BlockKind.HEAD:
            head.blocks.append(block)
        elif block.id.kind is not BlockKind.EMBEDDING:
            stages[block.id.layer].blocks.append(block)
    return [*stages, head]


def kv_token_bytes(demand: Demand, layers: Collection[int]) -> int:
    """KV bytes of one position in some `layers`."""
    return sum(_layer_kv(demand)[index] for index in layers)


def _layer_kv(demand: Demand) -> list[int]:
    """KV bytes of one position, by layer."""
    widths = [layer.row_width for layer in demand.spec.kv]
    if not widths:
        return [0] * demand.spec.layers
    return [demand.kv_token_bytes * width // sum(widths) for width in widths]


def _copied_share(machine: Machine) -> float:
    """Of the bytes that do not stay on the device, those that are copied there in every step."""
    link, memory = machine.link_rate, machine.ram_read_rate
    return link / (link + memory) if link and memory else 0.0


def _what_fits(
    stages: list[_Stage], room: int, share: float
) -> tuple[list[_Stage], list[_Stage], Mapping[int, int]]:
    """Stages that stay, stages that are copied, and slots by size for these.

    The head stays if it fits at all: it is the largest single read of a step.  A layer with
    experts is not copied: a step needs few of them.
    """
    head, layers = stages[-1], stages[:-1]
    may_copy = [stage for stage in layers if not stage.has_experts]
    for count in range(len(layers), -1, -1):
        away = len(layers) - count
        copies = min(round(away * share), len(may_copy))
        kept = [head, *_spread(layers, count)] if count < len(layers) else [head, *layers]
        others = [stage for stage in may_copy if stage not in kept]
        copied = _spread(others, min(copies, len(others)))
        counts = _slots(copied)
        for chosen in (kept, kept[1:]):
            taken = sum(stage.weight_bytes + stage.kv_bytes for stage in chosen)
            taken += sum(stage.kv_bytes for stage in copied)
            taken += sum(round_up(size, _ALIGNMENT) * n for size, n in counts.items())
            if taken <= room:
                return chosen, copied, counts
    return [], [], _NO_SLOTS


def _slots(copied: list[_Stage]) -> Mapping[int, int]:
    blocks = [block for stage in copied for block in stage.blocks]
    if not blocks:
        return _NO_SLOTS
    largest = max(stage.weight_bytes for stage in copied)
    counts = slot_counts(blocks, _COPIED_LAYERS * largest)
    return counts or {size: 2 for size in {block.slot_bytes for block in blocks}}


def _spread(stages: list[_Stage], count: int) -> list[_Stage]:
    """`count` of them, evenly."""
    return [stages[(2 * n + 1) * len(stages) // (2 * count)] for n in range(count)]

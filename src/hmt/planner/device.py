"""What a device that computes beside the CPU gets: blocks, and the memory for them.

The device takes attention first, with routers, norms and the keys and values: they are small, read
for every token, and long contexts are where the CPU falls behind.  Of the rest (dense feed-forward
networks, experts) it keeps what fits.  What does not fit is read from host memory in every step, by
the CPU, which computes with it, or by the link, which copies it to the device.  Layers come one
after the other, but copying goes on all the time; so the copied share is what the link carries
while the CPU reads the rest: link / (link + CPU) of the bytes, by the rates that both have at once.
Copied blocks are spread among the CPU's, where there is time to copy them.  In steps of many tokens
the CPU would compute for longer than the copy takes: then all dense blocks are copied.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes, round_up
from hmt.contracts.blocks import BlockId, BlockKind, BlockSize
from hmt.contracts.plan import DeviceShare, Machine
from hmt.planner.footprint import Demand, activation_bytes, kv_bytes

_ALIGNMENT = 256
_SLOTS = 2  # of each size: one is copied while another is used
_WIDE = (BlockKind.FFN, BlockKind.EXPERT)


@dataclass(slots=True)
class _Layer:
    """A layer as the device sees it.

    core   what attention needs, keys and values included
    wide   its feed-forward network, or its experts
    """

    index: int
    core: list[BlockSize] = field(default_factory=list)
    wide: list[BlockSize] = field(default_factory=list)
    kv_bytes: int = 0

    @property
    def core_bytes(self) -> int:
        return _bytes(self.core) + self.kv_bytes

    @property
    def may_be_copied(self) -> bool:
        """A layer's experts are not: a step needs few of them."""
        return all(block.id.kind is BlockKind.FFN for block in self.wide)


@dataclass(slots=True)
class _Choice:
    """Layers whose core is on the device, by what happens to the rest of them."""

    stay: list[_Layer]
    copied: list[_Layer]
    on_cpu: list[_Layer]

    @property
    def layers(self) -> list[_Layer]:
        return [*self.stay, *self.copied, *self.on_cpu]

    @property
    def in_prompts(self) -> list[_Layer]:
        """Those whose rest is copied in steps of many tokens."""
        return [*self.copied, *(layer for layer in self.on_cpu if layer.may_be_copied)]

    @property
    def slot_counts(self) -> dict[int, int]:
        wide = [block for layer in self.in_prompts for block in layer.wide]
        sizes = [block.slot_bytes for block in wide]
        return {size: min(_SLOTS, sizes.count(size)) for size in dict.fromkeys(sizes)}

    @property
    def nbytes(self) -> int:
        """On the device, slots included."""
        stays = sum(_bytes(layer.wide) for layer in self.stay)
        return sum(layer.core_bytes for layer in self.layers) + stays + _slot_bytes(self)


def share_of_device(
    demand: Demand, device_bytes: int, machine: Machine, *, chunk: int, context: int
) -> tuple[DeviceShare, list[BlockId]]:
    """Decide what the device gets of `device_bytes`, and which blocks live there.

    Raises BudgetError where not even one layer's attention would fit.
    """
    layers, head = _layers(demand, context)
    activations = activation_bytes(demand, chunk, context)
    room = device_bytes - activations
    choice = _choose(layers, room - _bytes(head), _copied_share(machine))
    if not choice.layers or choice.nbytes + _bytes(head) > room:
        head = []
        choice = _choose(layers, room, _copied_share(machine))
    if not choice.layers:
        least = min(layer.core_bytes for layer in layers) + activations
        raise BudgetError(
            f"{demand.spec.architecture} cannot use {format_bytes(device_bytes)} of GPU memory: "
            f"the smallest attention takes {format_bytes(least)} with its keys and values, "
            "activations, and slots for the rest of the layer besides; give --gpu-memory more, or "
            "0 to compute on the CPU alone"
        )
    stays = [*(b for layer in choice.layers for b in layer.core), *head]
    stays += [block for layer in choice.stay for block in layer.wide]
    copied = _ids(block for layer in choice.copied for block in layer.wide)
    in_prompts = _ids(block for layer in choice.in_prompts for block in layer.wide)
    share = DeviceShare(
        computes=_ids(stays) | copied,
        computes_prompts=_ids(stays) | copied | in_prompts,
        stages=frozenset(
            [*(layer.index for layer in choice.layers), *([len(layers)] if head else [])]
        ),
        reserved={
            "resident": _bytes(stays),
            "slots": _slot_bytes(choice),
            "kv": sum(layer.kv_bytes for layer in choice.layers),
            "activations": activations,
        },
        slot_counts=choice.slot_counts,
    )
    return share, [block.id for block in stays]


def kv_token_bytes(demand: Demand, layers: Collection[int]) -> int:
    """KV bytes of one position in some `layers`."""
    return sum(_layer_kv(demand)[index] for index in layers)


def _layers(demand: Demand, context: int) -> tuple[list[_Layer], list[BlockSize]]:
    """All layers, and the head's blocks."""
    tokens = kv_bytes(demand, context) // max(1, demand.kv_token_bytes)
    layers = [
        _Layer(index, kv_bytes=round_up(kv * tokens, _ALIGNMENT))
        for index, kv in enumerate(_layer_kv(demand))
    ]
    head = []
    for block in demand.blocks:
        if block.id.kind is BlockKind.HEAD:
            head.append(block)
        elif block.id.kind is not BlockKind.EMBEDDING:
            layer = layers[block.id.layer]
            (layer.wide if block.id.kind in _WIDE else layer.core).append(block)
    return layers, head


def _layer_kv(demand: Demand) -> list[int]:
    """KV bytes of one position, by layer."""
    widths = [layer.row_width for layer in demand.spec.kv]
    if not widths:
        return [0] * demand.spec.layers
    return [demand.kv_token_bytes * width // sum(widths) for width in widths]


def _copied_share(machine: Machine) -> float:
    """Of the bytes that do not stay on the device, those that are copied there in every step."""
    link = machine.shared_link_rate or machine.link_rate
    memory = machine.shared_cpu_rate or machine.ram_read_rate
    return link / (link + memory) if link and memory else 0.0


def _choose(layers: list[_Layer], room: int, share: float) -> _Choice:
    """As many cores as fit, and then as much else: what is left is copied or the CPU's."""
    for count in range(len(layers), 0, -1):
        chosen = _spread(layers, count)
        for staying in range(count, -1, -1):
            choice = _split(chosen, staying, share)
            if choice.nbytes <= room:
                return choice
    return _Choice([], [], [])


def _split(layers: list[_Layer], staying: int, share: float) -> _Choice:
    stay = _spread(layers, staying)
    kept = {layer.index for layer in stay}
    away = [layer for layer in layers if layer.index not in kept]
    may_be = [layer for layer in away if layer.may_be_copied]
    # Rounded up: the link also copies while the device computes and the CPU waits.
    copied = _spread(may_be, ceil(len(may_be) * share))
    those = {layer.index for layer in copied}
    return _Choice(stay, copied, [layer for layer in away if layer.index not in those])


def _spread(layers: list[_Layer], count: int) -> list[_Layer]:
    """`count` of them, evenly."""
    return [layers[(2 * n + 1) * len(layers) // (2 * count)] for n in range(count)]


def _slot_bytes(choice: _Choice) -> int:
    counts: Mapping[int, int] = choice.slot_counts
    return sum(round_up(size, _ALIGNMENT) * count for size, count in counts.items())


def _bytes(blocks: Sequence[BlockSize]) -> int:
    return sum(round_up(block.slot_bytes, _ALIGNMENT) for block in blocks)


def _ids(blocks: Iterable[BlockSize]) -> frozenset[BlockId]:
    return frozenset(block.id for block in blocks)

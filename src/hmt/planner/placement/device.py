"""What a device that computes beside the CPU gets: blocks, and the memory for them.

The device takes attention first, with routers, norms and the keys and values: they are small, read
for every token, and long contexts are where the CPU falls behind.  Of the rest (dense feed-forward
networks, experts) it keeps what fits.  What does not fit is read from host memory in every step, by
the CPU, which computes with it, or by the link, which copies it to the device.  Layers come one
after the other, but copying goes on all the time; so the copied share is what the link carries
while the CPU reads the rest: link / (link + CPU) of the bytes, by the rates that both have at once.
Copied blocks are spread among the CPU's, where there is time to copy them.  In steps of many tokens
the CPU would compute for longer than the copy takes: then all blocks are copied.

Experts stay on the device all or not at all.  If not, each layer gets a cache of as many as fit
beside everything else, and a step brings the link's share of those that are missing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from hmt.base.errors import BudgetError
from hmt.base.units import MIB, format_bytes, round_up
from hmt.contracts.blocks import BlockId, BlockKind, BlockSize
from hmt.contracts.kv import KVTiers
from hmt.contracts.machine import Machine
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.plan import DevicePlan
from hmt.planner.cost.demand import Demand
from hmt.planner.placement.encoder import least_encoder_bytes, with_spare
from hmt.planner.placement.footprint import (
    device_activation_bytes,
    kv_bytes,
    layer_kv_bytes,
    sequence_bytes,
)

_ALIGNMENT = 256
_SLOTS = 2  # of each size: one is copied while another is used
# Slots for experts of prompts: half of them compute, half are on their way.  The most that fit.
_EXPERT_COPIES = (16, 8, 4)
# More of small ones, since launching what computes a group and copies the next takes the CPU about
# 1 ms, and the link 1.6 for 32 of 2.8 MiB.  Prompts of 4096 tokens of 30B-A3B in Q4_K_M, 8 GiB of
# an H200, tokens/s: 7,100 with 32 slots, 8,800 with 64, 8,700 with 128, 8,400 with 256.
_SMALL_EXPERT, _SMALL_COPIES = 4 * MIB, (64, 32)
_SMALL_SHARE = 1 / 8  # of the room, at most
LINK_SHARE = 0.25  # of missing experts, where rates are unknown
_LEAST_SHARE_OF_CACHE = 0.85  # of the room for experts, against that for bringing them
# A GPU finds each page of 4 KiB of pinned host memory by an entry of 8 bytes of its own memory: for
# 344 GiB an H200 took 0.65 GiB.
_PAGE_BYTES, _ENTRY_BYTES = 4096, 8
_WIDE = (BlockKind.FFN, BlockKind.EXPERT)


@dataclass(eq=False)
class _Layer:
    """A layer as the device sees it.  Its sums are made once, when it is complete.

    core   what attention needs, KV cache and recurrent state included
    wide   its feed-forward network, or its experts
    """

    index: int
    core: list[BlockSize] = field(default_factory=list)
    wide: list[BlockSize] = field(default_factory=list)
    kv_bytes: int = 0

    @cached_property
    def core_bytes(self) -> int:
        return _bytes(self.core) + self.kv_bytes

    @cached_property
    def wide_bytes(self) -> int:
        return _bytes(self.wide)

    @cached_property
    def wide_sizes(self) -> tuple[tuple[int, int], ...]:
        """Bytes of slots, and how many of its blocks have them, in the order in which they come."""
        return tuple(Counter(block.slot_bytes for block in self.wide).items())

    @cached_property
    def slot_bytes(self) -> int:
        """Of a slot for any of its wide blocks."""
        return round_up(max((size for size, _ in self.wide_sizes), default=0), _ALIGNMENT)

    @cached_property
    def sparse(self) -> bool:
        """Whether a step of few tokens needs few of its wide blocks."""
        return any(block.id.kind is BlockKind.EXPERT for block in self.wide)


@dataclass(slots=True)
class _Choice:
    """Layers whose core is on the device, by what happens to the rest of them.

    sparse          experts that do not stay: `expert_slots` of each layer are cached
    staging_slots   for all of these layers together; see shared_slots
    expert_copies   slots in which prompts' experts take turns
    """

    stay: list[_Layer]
    copied: list[_Layer]
    on_cpu: list[_Layer]
    sparse: list[_Layer] = field(default_factory=list)
    expert_slots: int = 0
    staging_slots: int = 0
    expert_copies: int = _EXPERT_COPIES[0]

    @property
    def layers(self) -> list[_Layer]:
        return [*self.stay, *self.copied, *self.on_cpu, *self.sparse]

    @property
    def in_prompts(self) -> list[_Layer]:
        """Those whose rest is copied in steps of many tokens."""
        return [*self.copied, *self.on_cpu, *(self.sparse if self.staging_slots else ())]

    @property
    def slot_counts(self) -> dict[int, int]:
        found: dict[int, int] = {}
        groups = [([*self.copied, *self.on_cpu], _SLOTS)]
        if self.staging_slots:
            groups.append((self.sparse, self.expert_copies))
        for layers, most in groups:
            sizes: Counter[int] = Counter()
            for alike, times in Counter(layer.wide_sizes for layer in layers).items():
                for size, count in alike:
                    sizes[size] += count * times
            found |= {size: min(most, count) for size, count in sizes.items()}
        return found

    @property
    def can_fetch(self) -> bool:
        """Whether the device computes experts that do not stay there."""
        return bool(self.staging_slots) or not self.sparse

    @property
    def shared_slots(self) -> int:
        """Of those for experts that are brought: in a prompt, its experts take turns there.

        None where dense networks, which come in every step, take turns in slots of the same size,
        or where layers' experts have several sizes.
        """
        dense = {size for layer in [*self.copied, *self.on_cpu] for size, _ in layer.wide_sizes}
        sizes = {size for layer in self.sparse for size, _ in layer.wide_sizes}
        if len(sizes) != 1 or sizes & dense or not self.staging_slots:
            return 0
        return min(self.staging_slots, self.slot_counts[sizes.pop()])

    @property
    def expert_bytes(self) -> int:
        """Of the caches, and of the slots of those that are brought and share none."""
        staging = (self.staging_slots - self.shared_slots) * _largest(self.sparse)
        return self.expert_slots * _slot_in_each(self.sparse) + staging

    @property
    def nbytes(self) -> int:
        """On the device, slots included."""
        stays = sum(layer.wide_bytes for layer in self.stay)
        cores = sum(layer.core_bytes for layer in self.layers)
        return cores + stays + _slot_bytes(self) + self.expert_bytes


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What a device gets, by numbers.  Layers of each sort are spread evenly over the model.

    layers          whose attention computes there, with their keys and values
    head            whether the output layer does
    staying         of those layers, those whose dense network stays there
    copied          of the others, those whose network is copied there in every step
    expert_slots    of each of those layers that has experts: experts that are cached
    staging_slots   for experts that are brought for one step
    """

    layers: int
    head: bool = False
    staying: int = 0
    copied: int = 0
    expert_slots: int = 0
    staging_slots: int = 0


@dataclass(frozen=True, slots=True)
class DevicePart:
    """Layers that are for the device of this index among several; with the last, also the head."""

    index: int
    layers: range


class DeviceRoom:
    """The part of a device's memory that choices are about, and what each of them takes."""

    def __init__(
        self,
        demand: Demand,
        device_bytes: int,
        *,
        chunk: int,
        context: int,
        host_bytes: int = 0,
        levels: KVTiers | None = None,
        part: DevicePart | None = None,
    ) -> None:
        """See `share_of_device`."""
        layers, head = _layers(demand, context, levels)
        part = part or DevicePart(0, range(len(layers)))
        self.layers = layers[part.layers.start : part.layers.stop]
        self.head = head if part.layers.stop == len(layers) else []
        self.activations = device_activation_bytes(demand, chunk, context)
        self._host_bytes, self._weight_bytes = host_bytes, demand.weight_bytes
        self.mapping = _mapping_bytes(min(host_bytes, self._weight_bytes))
        # As many as in host memory: copies stay for as long as what they are copies of.
        self.adapters = round_up(demand.adapter_bytes, _PAGE_BYTES)
        self.room = device_bytes - self.activations - self.mapping - self.adapters
        self.encoder_bytes = work = 0
        if part.index == 0:
            self.encoder_bytes, work = least_encoder_bytes(demand, self.activations)
        wanted = self.encoder_bytes + work
        if wanted and self._nbytes(DeviceChoice(len(self.layers), True)) > self.room - wanted:
            self.encoder_bytes = wanted = work = 0
        self.activations += work
        self.room -= wanted

    def taken(self, asked: DeviceChoice) -> int | None:
        """Bytes that a choice takes; None where they are not there.

        What is left may be too little for the page tables of all host memory: `host_bytes`.
        """
        nbytes = self._nbytes(asked)
        return nbytes if nbytes <= self.room + self.mapping else None

    def host_bytes(self, asked: DeviceChoice) -> int:
        """Host memory that can be used beside a choice: as much as there is room to map.

        So more host memory never takes a choice away.
        """
        left = self.room + self.mapping - self._nbytes(asked)
        if left >= self.mapping:
            return self._host_bytes
        return min(self._host_bytes, left // _ALIGNMENT * _ALIGNMENT // _ENTRY_BYTES * _PAGE_BYTES)

    def _nbytes(self, asked: DeviceChoice) -> int:
        return self.choice(asked).nbytes + (_bytes(self.head) if asked.head else 0)

    def choice(self, asked: DeviceChoice) -> "_Choice":
        """The layers that a choice means."""
        chosen = _spread(self.layers, asked.layers)
        dense = [layer for layer in chosen if not layer.sparse]
        found = _split(dense, min(asked.staying, len(dense)), asked.copied)
        found.sparse = [layer for layer in chosen if layer.sparse]
        if found.sparse and asked.staging_slots:
            found.staging_slots = asked.staging_slots
            found.expert_slots = min(asked.expert_slots, len(found.sparse[0].wide))
            room = self.room - (_bytes(self.head) if asked.head else 0)
            copies = _copies_of(found.sparse, room)
            for found.expert_copies in copies:
                if found.nbytes <= room:
                    break
        return found

    def best(self, demand: Demand, machine: Machine) -> tuple["_Choice", list[BlockSize]]:
        """As much as fits, attention first; and the head's blocks, if they are there."""
        share, brought = copied_share(machine), _fetched_experts(demand, machine)
        head = self.head
        choice = _choose(self.layers, self.room - _bytes(head), share, brought)
        fits = choice.layers and choice.nbytes + _bytes(head) <= self.room
        if not fits or (brought and not choice.can_fetch):
            without = _choose(self.layers, self.room, share, brought)
            # A head on the CPU costs less than experts that the device has no part in.
            if not fits or without.can_fetch:
                choice, head = without, []
        return choice, head


def share_of_device(
    demand: Demand,
    device_bytes: int,
    machine: Machine,
    *,
    chunk: int,
    context: int,
    host_bytes: int = 0,
    levels: KVTiers | None = None,
    asked: DeviceChoice | None = None,
    part: DevicePart | None = None,
) -> tuple[DevicePlan, list[BlockId], int]:
    """Decide what the device gets of `device_bytes`, which blocks live there, and the host's bytes.

    host_bytes   the budget of the host, of which all that weights take is pinned
    levels       where keys and values lie, if not all of them there
    asked        what it shall get; None: as much as fits, attention first
    part         the layers that are its; None: all of them

    Raises BudgetError where not even one layer's attention would fit, or not what was asked.
    """
    space = DeviceRoom(
        demand, device_bytes, chunk=chunk, context=context, host_bytes=host_bytes, levels=levels,
        part=part,
    )  # fmt: skip
    layers, activations, mapping = space.layers, space.activations, space.mapping
    adapters = space.adapters
    mapped = host_bytes
    share = copied_share(machine)
    if asked is None:
        choice, head = space.best(demand, machine)
    else:
        if space.taken(asked) is None:
            raise BudgetError(
                f"{asked} takes more than the {format_bytes(space.room)} of GPU memory that "
                f"activations leave of {format_bytes(device_bytes)}"
            )
        choice, head = space.choice(asked), space.head if asked.head else []
        mapped = space.host_bytes(asked)
        mapping = min(mapping, _mapping_bytes(mapped))
    if not choice.layers:
        least = min(layer.core_bytes for layer in layers) + activations + mapping + adapters
        raise BudgetError(
            f"{demand.spec.architecture} cannot use {format_bytes(device_bytes)} of GPU memory: "
            f"the smallest attention takes {format_bytes(least)} with its keys and values, "
            "activations, and slots for the rest of the layer besides; give --gpu-memory more, or "
            "0 to compute on the CPU alone"
        )
    spare = device_bytes - activations - mapping - adapters - space.encoder_bytes - choice.nbytes
    encoder, activations = with_spare(
        demand, space.encoder_bytes, activations, spare - _bytes(head)
    )
    stays = [*(b for layer in choice.layers for b in layer.core), *head]
    stays += [block for layer in choice.stay for block in layer.wide]
    copied = _ids(block for layer in choice.copied for block in layer.wide)
    in_prompts = _ids(block for layer in choice.in_prompts for block in layer.wide)
    found = DevicePlan(
        index=0 if part is None else part.index,
        computes=_ids(stays) | copied,
        computes_prompts=_ids(stays) | copied | in_prompts,
        stages=frozenset(
            [*(layer.index for layer in choice.layers), *([demand.spec.layers] if head else [])]
        ),
        reserved={
            "resident": _bytes(stays),
            "slots": _slot_bytes(choice),
            "experts": choice.expert_bytes,
            "kv": sum(layer.kv_bytes for layer in choice.layers),
            "activations": activations,
            "mapping": mapping,
            **({"adapters": adapters} if adapters else {}),
            **({"encoder": encoder} if encoder else {}),
        },
        slot_counts=choice.slot_counts,
        expert_slots=choice.expert_slots,
        staging_slots=choice.staging_slots,
        link_share=(share or LINK_SHARE) if choice.staging_slots else 0.0,
    )
    return found, [block.id for block in stays], mapped


def _layers(
    demand: Demand, context: int, levels: KVTiers | None
) -> tuple[list[_Layer], list[BlockSize]]:
    """All layers, and the head's blocks."""
    tokens = {0: kv_bytes(demand, context) // max(1, demand.kv_token_bytes)}
    if levels is not None:
        tokens[0] = (levels.device_pages + levels.staged_pages) * PAGE_TOKENS
        tokens |= {window: count * PAGE_TOKENS for window, count in levels.ring_pages.items()}
    layers = []
    for index, kept in enumerate(layer_kv_bytes(demand)):
        state = round_up(demand.state_slots * sequence_bytes(demand, (index,)), _ALIGNMENT)
        kv = sum(
            round_up(nbytes * tokens.get(window, tokens[0]), _ALIGNMENT)
            for window, nbytes in kept.items()
        )
        layers.append(_Layer(index, kv_bytes=kv + state))
    head = []
    for block in demand.blocks:
        if block.id.kind is BlockKind.HEAD:
            head.append(block)
        elif block.id.kind is not BlockKind.EMBEDDING:
            layer = layers[block.id.layer]
            (layer.wide if block.id.kind in _WIDE else layer.core).append(block)
    return layers, head


def copied_share(machine: Machine) -> float:
    """Of the bytes that do not stay on the device, those that are copied there in every step."""
    # It is not faster beside the CPU than alone, whatever was measured.
    device = machine.device
    if device is None:
        return 0.0
    link = min(device.shared_link_rate or device.link_rate, device.link_rate)
    memory = device.shared_cpu_rate or machine.cpu.read_rate
    return link / (link + memory) if link and memory else 0.0


def _fetched_experts(demand: Demand, machine: Machine) -> int:
    """The most experts of a layer that a decoding step brings; 0 where it cannot bring any."""
    if not demand.experts_alike:
        return 0
    wanted = demand.spec.experts_per_token * demand.batch
    return max(1, ceil(wanted * (copied_share(machine) or LINK_SHARE)))


def _choose(layers: list[_Layer], room: int, share: float, fetched: int) -> _Choice:
    """As many cores as fit, and then as much else: what is left is copied or the CPU's."""
    for count in range(len(layers), 0, -1):
        chosen = _spread(layers, count)
        cores = sum(layer.core_bytes for layer in chosen)
        if cores > room:
            continue
        everything = _Choice(chosen, [], [])
        if everything.nbytes <= room:
            return everything
        dense = [layer for layer in chosen if not layer.sparse]
        least = min((layer.wide_bytes for layer in dense), default=0)
        most = min(len(dense), (room - cores) // least if least else len(dense))
        for staying in range(most, -1, -1):
            # Rounded up: the link also copies while the device computes and the CPU waits.
            choice = _split(dense, staying, ceil((len(dense) - staying) * share))
            choice.sparse = [layer for layer in chosen if layer.sparse]
            if choice.nbytes <= room:
                _cache_experts(choice, room, fetched)
                return choice
    return _Choice([], [], [])


def _split(layers: list[_Layer], staying: int, copied: int) -> _Choice:
    """Of `layers` so many stay, of the others `copied` at most are copied; the CPU has the rest."""
    stay = _spread(layers, staying)
    kept = set(stay)
    away = [layer for layer in layers if layer not in kept]
    moved = _spread(away, min(copied, len(away)))
    those = set(moved)
    return _Choice(stay, moved, [layer for layer in away if layer not in those])


def _cache_experts(choice: _Choice, room: int, fetched: int) -> None:
    """Use what is left of `room` for slots of experts; none where not one fits to bring any."""
    if not choice.sparse or not fetched:
        return
    choice.staging_slots, size, copies = 1, _largest(choice.sparse), _copies_of(choice.sparse, room)
    for choice.expert_copies in copies:
        if room - choice.nbytes >= size:
            break
    spare = room - choice.nbytes
    if spare < 0:
        choice.staging_slots = 0
        return
    if choice.shared_slots:
        choice.staging_slots = fetched
        choice.staging_slots = choice.shared_slots
    missing, in_each = fetched - choice.staging_slots, _slot_in_each(choice.sparse)
    more = min(missing, int(spare * (1 - _LEAST_SHARE_OF_CACHE)) // size)
    if spare - more * size < in_each:  # too little for any cache
        more = min(missing, spare // size)
    choice.staging_slots += more
    spare = room - choice.nbytes
    choice.expert_slots = min(spare // in_each, len(choice.sparse[0].wide))


def _mapping_bytes(host_bytes: int) -> int:
    return round_up(host_bytes // _PAGE_BYTES * _ENTRY_BYTES, _ALIGNMENT)


def _largest(layers: Sequence[_Layer]) -> int:
    """Bytes of a slot for any of the layers' experts."""
    return max((layer.slot_bytes for layer in layers), default=0)


def _slot_in_each(layers: Sequence[_Layer]) -> int:
    """Bytes of a slot for an expert in each of the layers."""
    return sum(layer.slot_bytes for layer in layers)


def _copies_of(layers: Sequence[_Layer], room: int) -> tuple[int, ...]:
    """Slots for experts of the layers' prompts to try, the most first."""
    size = _largest(layers)
    most = int(room * _SMALL_SHARE) // size if size <= _SMALL_EXPERT else 0
    return (*(count for count in _SMALL_COPIES if count <= most), *_EXPERT_COPIES)


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

"""Backends that compute a layer's experts: cached on a device, brought there, or on the host."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.plan import DevicePlan, Plan, Tier
from hmt.contracts.store import ResidentBlock
from hmt.kernels import host_experts, ops
from hmt.kernels.graph_ops import has_kernels
from hmt.kernels.host_experts import ExpertShares, ExpertSlots, HostExpertChannel, HostExpertPlaces
from hmt.memory.device import Device, DevicePool
from hmt.weights.layout import BlockLayout

_MOST_TABLES = 4  # for each expert, of where groups of streamed experts lie

Params = Mapping[str, WeightTensor]
# An expert's number, its parameters on the device unless a cache has it, and where it begins there.
StreamedExpert = tuple[int, Params | None, int]
Added = tuple[Tensor, Tensor]  # hidden states, and what shared experts add


class HostExperts(Protocol):
    """Experts whose home is host memory; the methods are those of `WeightStore`."""

    def lease_bytes(self, block: BlockId) -> AbstractContextManager[Tensor]:
        """The block's whole slot, uint8 [slot_bytes], which does not move meanwhile."""
        ...

    def resident(self, blocks: Sequence[BlockId]) -> Sequence[ResidentBlock] | None:
        """The blocks where they lie; None where one of them may move."""
        ...

    def count(self, nbytes: int) -> None:
        """Note that so many bytes of host memory were read."""
        ...


Stream = Callable[[Sequence[BlockId]], Iterator[list[StreamedExpert]]]


class HybridExperts:
    """Implements MoeBackend: a cache on a device, the link, and the host.

    Sums of device and host are added last: results depend in their last digits on which experts
    are cached.
    """

    def __init__(
        self,
        layer: int,
        slots: ExpertSlots,
        places: HostExpertPlaces,
        share: Tensor,
        nbytes: int,
        on_host: Callable[[int, list[int]], Sequence[tuple[int, Params]]],
    ) -> None:
        """`on_host` gives experts of a layer in host memory."""
        self.slots = slots
        self.channel: HostExpertChannel | None = None
        self.places = places
        self._layer = layer
        self.share = share
        self._nbytes = nbytes
        self._on_host = on_host

    @property
    def splits(self) -> int:
        """Of an expert that is cut."""
        return 1 if self.places.cuts is None else self.places.cuts.pieces

    def begin(
        self, x: Tensor, chosen: Tensor, scales: Tensor, activation: str
    ) -> Callable[..., Tensor]:
        """See MoeBackend: the host begins, and the device when the ending is called."""
        channel = self.channel if self.channel is not None and self.channel.accepts(x) else None
        # Many tokens choose so many experts that a share of them is nearly whole.
        cuts = self.places.cuts if channel is not None and len(x) == 1 else None
        shares = host_experts.divide(self.slots, chosen, self.share, cuts)
        if channel is not None:
            channel.submit(self._layer, x, shares, scales, activation)

        def end(added: Added | None = None) -> Tensor:
            host_experts.fetch(self.slots, shares, self._nbytes, cuts)
            cut = None if cuts is None else shares.cut
            total = self.places.compute(x, shares.here, chosen, scales, activation, cut=cut)
            if channel is not None:
                return channel.collect(self._layer, total, shares, added)
            return _sum_of(self._add_host(total, x, shares, scales, activation), added)

        return end

    def _add_host(
        self, total: Tensor, x: Tensor, shares: ExpertShares, scales: Tensor, activation: str
    ) -> Tensor:
        """What is asked for without a channel."""
        asked = shares.on_host.cpu()
        wanted = sorted({expert for token in asked.tolist() for expert in token if expert >= 0})
        if wanted:
            given = self._on_host(self._layer, wanted)
            its = ops.experts(x.cpu(), given, asked, scales.cpu(), activation, last=False)
            total += its.to(total.device)
        return total.to(x.dtype)

    def all_on_host(self) -> list[tuple[int, Params]]:
        """The layer's experts in host memory."""
        return list(self._on_host(self._layer, list(range(len(self.slots.table)))))


class ResidentExperts:
    """Implements MoeBackend where all of a layer's experts stay on the device."""

    def __init__(self, compute: Callable[[Tensor, Tensor, Tensor, str], Tensor]) -> None:
        """`compute` takes x, chosen, scales and the activation; [tokens, hidden] in x.dtype."""
        self._compute = compute

    def begin(
        self, x: Tensor, chosen: Tensor, scales: Tensor, activation: str
    ) -> Callable[..., Tensor]:
        """See MoeBackend."""

        def end(added: Added | None = None) -> Tensor:
            return _sum_of(self._compute(x, chosen, scales, activation), added)

        return end


class StreamedExperts:
    """Implements MoeBackend for steps that need most experts: the device computes them all.

    They come group by group, in ascending order, so results are those of experts that stay there,
    to the bit: those that are cached from where they are, and the others are copied.
    """

    def __init__(self, blocks: Sequence[BlockId], places: HostExpertPlaces, stream: Stream) -> None:
        """`blocks` are all experts of a layer."""
        self._blocks = blocks
        self._places = places
        self._stream = stream
        # On the device, by experts and where they lie: they take turns in few slots.
        self._tables: dict[tuple[tuple[int, int], ...], Tensor] = {}

    def begin(
        self, x: Tensor, chosen: Tensor, scales: Tensor, activation: str
    ) -> Callable[..., Tensor]:
        """See MoeBackend: copies are under way anyhow."""

        def end(added: Added | None = None) -> Tensor:
            return _sum_of(self._compute(x, chosen, scales, activation), added)

        return end

    def _compute(self, x: Tensor, chosen: Tensor, scales: Tensor, activation: str) -> Tensor:
        total: Tensor | None = None
        for group in self._stream(self._blocks):
            if self._places.has_table:
                here = self._table([(index, address) for index, _, address in group], x.device)
                among = range(group[0][0], group[-1][0] + 1)  # they are in ascending order
                total = self._places.compute(
                    x, here, chosen, scales, activation, total, among=among
                )
            else:
                given = [
                    (index, self._places.view(index, address) if params is None else params)
                    for index, params, address in group
                ]
                total = ops.experts(x, given, chosen, scales, activation, total, last=False)
        assert total is not None
        return total.to(x.dtype)

    def _table(self, group: list[tuple[int, int]], where: torch.device) -> Tensor:
        """int64 [experts]: where each of a group lies, and 0 for others."""
        found = self._tables.get(tuple(group))
        if found is None:
            addresses = [0] * len(self._blocks)
            for index, address in group:
                addresses[index] = address
            # Not from pageable memory: the CPU would wait for all that is on the queue.
            pinned = torch.tensor(addresses, dtype=torch.int64, pin_memory=True)
            found = pinned.to(where, non_blocking=True)
            if len(self._tables) > _MOST_TABLES * len(self._blocks):
                self._tables.clear()  # slots that keep changing hands
            self._tables[tuple(group)] = found
        return found


@dataclass(frozen=True, slots=True)
class MoeBackends:
    """Those of all layers with experts.

    by_layer   None of them if it is empty
    nbytes     of an expert; the mean where layers differ
    streamed   for steps that need most experts
    """

    by_layer: Mapping[int, HybridExperts | ResidentExperts]
    nbytes: int = 0
    streamed: Mapping[int, StreamedExperts] = field(default_factory=dict)

    def use(self, channel: HostExpertChannel) -> None:
        """Ask at `channel` while it is open."""
        for backend in self.by_layer.values():
            if isinstance(backend, HybridExperts):
                backend.channel = channel
                if channel.link_share is None:
                    channel.tune(backend.share)  # which all have in common

    def on_host(self) -> dict[int, list[tuple[int, Params]]]:
        """All experts of the layers that need the host, by layer."""
        return {
            layer: backend.all_on_host()
            for layer, backend in self.by_layer.items()
            if isinstance(backend, HybridExperts)
        }

    def cached(self) -> dict[BlockId, int]:
        """Where experts lie that caches have; waits for the device."""
        slots = {n: one.slots for n, one in self.by_layer.items() if isinstance(one, HybridExperts)}
        if not slots:
            return {}
        tables = torch.stack([one.table for one in slots.values()]).tolist()
        return {
            BlockId(layer, BlockKind.EXPERT, expert): address
            for layer, table in zip(slots, tables, strict=True)
            for expert, address in enumerate(table)
            if address
        }

    def counts(self) -> tuple[int, int, int, float] | None:
        """Experts found in the cache, brought, and left to the host; waits for the device.

        And what was brought of those that were cut, which are left: whole ones that it makes.
        None where nothing is shared out.
        """
        hybrid = [
            backend for backend in self.by_layer.values() if isinstance(backend, HybridExperts)
        ]
        if not hybrid:
            return None
        counted = torch.stack([backend.slots.counts for backend in hybrid]).tolist()
        cut = sum(row[3] / backend.splits for backend, row in zip(hybrid, counted, strict=True))
        found, brought, left, _ = map(sum, zip(*counted, strict=True))
        return found, brought, left, cut

    def seen(self) -> dict[int, tuple[list[float], list[bool]]]:
        """Of layers whose experts are shared out: each one's score, and whether it is cached.

        Waits for the device.
        """
        slots = {n: one.slots for n, one in self.by_layer.items() if isinstance(one, HybridExperts)}
        if not slots:
            return {}
        scores = torch.stack([one.scores for one in slots.values()]).tolist()
        cached = torch.stack([one.table != 0 for one in slots.values()]).tolist()
        return dict(zip(slots, zip(scores, cached, strict=True), strict=True))


def make_backends(
    plan: Plan,
    share: DevicePlan,
    layouts: Mapping[BlockId, BlockLayout],
    store: HostExperts,
    device: Device,
    pool: DevicePool,
    resident: Mapping[BlockId, Tensor],
    stream: Stream,
    shared: Sequence[Tensor] = (),
) -> MoeBackends:
    """Backends for layers whose experts all stay on the device or all stay in host memory.

    share     the part of the plan for the device
    resident  the device's memory of blocks that live there
    stream    copies blocks to the device
    shared    slots for experts that are brought, beside those of the `pool`
    """
    layers: dict[int, list[BlockId]] = {}
    for block in layouts:
        if block.kind is BlockKind.EXPERT and block.layer in share.stages:
            layers.setdefault(block.layer, []).append(block)
    blocks = [block for of_layer in layers.values() for block in of_layer]
    if not blocks or not has_kernels(device.where):
        return MoeBackends({})
    homes = {plan.homes[block] for block in blocks}
    nbytes = sum(layouts[block].slot_bytes for block in blocks) // len(blocks)
    try:
        if homes == {Tier.DEVICE}:
            return MoeBackends(_resident_backends(layers, layouts, resident, device), nbytes)
        alike = experts_alike_by_layer({block: layouts[block] for block in blocks})
        if homes == {Tier.HOST} and share.staging_slots and alike:
            maker = _HybridMaker(share, layouts, store, device, pool)
            backends = maker.make(layers, shared)
            streamed = {
                layer: StreamedExperts(layers[layer], backend.places, stream)
                for layer, backend in backends.items()
            }
            return MoeBackends(backends, nbytes, streamed)
    except ValueError:  # no kernel computes on them: the host does, or one expert after the other
        pass
    return MoeBackends({})


def _resident_backends(
    layers: Mapping[int, list[BlockId]],
    layouts: Mapping[BlockId, BlockLayout],
    resident: Mapping[BlockId, Tensor],
    device: Device,
) -> dict[int, HybridExperts | ResidentExperts]:
    if not host_experts.can_read_by_address(device.where):
        return {}  # leases give the same, to the bit
    backends: dict[int, HybridExperts | ResidentExperts] = {}
    for layer, blocks in layers.items():
        views = [layouts[block].views(resident[block]) for block in blocks]
        if _laid_out_alike([layouts[block] for block in blocks]):
            first = resident[blocks[0]].data_ptr()
            places = HostExpertPlaces(first, {first: views[0]}.__getitem__)
            addresses = [resident[block].data_ptr() for block in blocks]
            here = torch.tensor(addresses, dtype=torch.int64, device=device.where)
            backends[layer] = ResidentExperts(_in_blocks(places, here))
        else:  # as in a checkpoint that is read as it is
            given = list(enumerate(views))
            backends[layer] = ResidentExperts(host_experts.scattered(given, device.where))
    return backends


def _in_blocks(
    places: HostExpertPlaces, here: Tensor
) -> Callable[[Tensor, Tensor, Tensor, str], Tensor]:
    return lambda x, chosen, scales, activation: places.compute(
        x, here, chosen, scales, activation, last=True
    )


class _HybridMaker:
    def __init__(
        self,
        share: DevicePlan,
        layouts: Mapping[BlockId, BlockLayout],
        store: HostExperts,
        device: Device,
        pool: DevicePool,
    ) -> None:
        self._part, self._layouts, self._store = share, layouts, store
        self._device, self._pool = device, pool
        with torch.inference_mode(False):  # may be set later
            self._share = torch.full((1,), share.link_share, device=device.where)

    def make(
        self, layers: Mapping[int, list[BlockId]], shared: Sequence[Tensor]
    ) -> dict[int, HybridExperts]:
        part = self._part
        slots: dict[int, Tensor] = {}

        def take(count: int, nbytes: int, given: Sequence[Tensor] = ()) -> Tensor:
            more = range(count - len(given))
            taken = [*given, *(self._pool.allocate(nbytes).tensor for _ in more)]
            for slot in taken:
                slot.zero_()  # of experts that are cut, kernels read what never came
            slots.update((slot.data_ptr(), slot) for slot in taken)
            return self._tensor([slot.data_ptr() for slot in taken])

        layouts = {layer: self._layouts[blocks[0]] for layer, blocks in layers.items()}
        largest = max(layout.slot_bytes for layout in layouts.values())
        mixed = not _laid_out_alike(list(layouts.values()))
        staging = take(part.staging_slots, largest, shared)
        backends, places = {}, list[tuple[BlockLayout, HostExpertPlaces]]()
        for layer, blocks in layers.items():
            layout = layouts[layer]
            cache = take(part.expert_slots, layout.slot_bytes)
            self._fill(blocks, [slots[address][: layout.slot_bytes] for address in cache.tolist()])
            known = (its for other, its in places if _laid_out_alike([layout, other]))
            here = next(known, None)
            if here is None:
                views = _views_of(layout, slots)
                here = HostExpertPlaces(next(iter(slots)), views, others=mixed)
                places.append((layout, here))
            backends[layer] = HybridExperts(
                layer,
                self._cache(blocks, cache, staging),
                here,
                self._share,
                layout.slot_bytes,
                self._on_host,
            )
        return backends

    def _fill(self, blocks: list[BlockId], slots: list[Tensor]) -> None:
        """The first experts, since any are better than none; whatever is wanted replaces them."""
        with ExitStack() as stack:
            kept = blocks[: len(slots)]
            memory = [stack.enter_context(self._store.lease_bytes(block)) for block in kept]
            if memory:
                zeroed = self._device.record_event()
                self._device.copy_each(slots[: len(memory)], memory, (zeroed,)).wait()

    def _cache(self, blocks: list[BlockId], addresses: Tensor, staging: Tensor) -> ExpertSlots:
        origins = []
        for block in blocks:
            with self._store.lease_bytes(block) as memory:
                origins.append(self._device.address(memory))
        count, places = len(blocks), addresses.tolist()
        kept = min(count, len(places))
        return ExpertSlots(
            self._tensor(places[:kept] + [0] * (count - kept)),
            addresses,
            self._tensor([*range(kept), *[-1] * (len(places) - kept)]),
            torch.zeros(count, dtype=torch.float32, device=self._device.where),
            staging,
            self._tensor(origins),
            self._tensor([0] * 4),
        )

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device.where)

    def _on_host(self, layer: int, experts: list[int]) -> list[tuple[int, Params]]:
        blocks = [BlockId(layer, BlockKind.EXPERT, expert) for expert in experts]
        standing = self._store.resident(blocks)
        assert standing is not None, "they are at home in host memory"
        self._store.count(sum(one.nbytes for one in standing))
        return [(expert, one.params) for expert, one in zip(experts, standing, strict=True)]


def _views_of(layout: BlockLayout, slots: Mapping[int, Tensor]) -> Callable[[int], Params]:
    return lambda address: layout.views(slots[address])


def _sum_of(routed: Tensor, added: Added | None) -> Tensor:
    return routed if added is None else added[0] + (routed + added[1])


def experts_alike_by_layer(layouts: Mapping[BlockId, BlockLayout]) -> bool:
    """Whether views of an expert's slot would show the parameters of any other of its layer.

    Layers may differ: files of K types keep some layers' matrices in more bits.
    """
    layers: dict[int, dict[int, BlockLayout]] = {}
    for block, layout in layouts.items():
        if block.kind is BlockKind.EXPERT:
            layers.setdefault(block.layer, {})[id(layout)] = layout
    return all(_laid_out_alike(list(distinct.values())) for distinct in layers.values())


def _laid_out_alike(layouts: Sequence[BlockLayout]) -> bool:
    """Whether one's views of a slot would show any other's parameters."""

    def form(layout: BlockLayout) -> list[object]:
        parts = [(one.param.spec.name, one.format, one.at) for one in layout.placed]
        return [layout.slot_bytes, sorted(parts, key=lambda part: part[0])]

    if not layouts:
        return True
    first = form(layouts[0])
    return all(form(layout) == first for layout in layouts)

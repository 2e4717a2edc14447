"""What choices for a device would cost, without making a plan of each.

A plan names every block; here a layer is a few sums.  So thousands of choices can be compared in
the time of a few plans.  What is found is planned then, and the plan's own cost is what counts.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from hmt.contracts.blocks import TRUNK, BlockKind, BlockSize
from hmt.contracts.machine import Machine
from hmt.contracts.plan import Tier
from hmt.planner.cost.demand import Demand
from hmt.planner.cost.workload import (
    ComputeSite,
    ExpertWork,
    LayerWork,
    Sums,
    WeightWork,
    Workload,
    add_attention,
)
from hmt.planner.placement.device import LINK_SHARE, DeviceChoice, DeviceRoom, copied_share
from hmt.planner.placement.footprint import host_activation_bytes


class DeviceEstimate:
    """The choices for one device, beside a host of so many bytes."""

    def __init__(
        self,
        demand: Demand,
        machine: Machine,
        *,
        device_bytes: int,
        host_bytes: int,
        chunk: int,
        context: int,
    ) -> None:
        """`context` counts the positions of all users together."""
        self.room = DeviceRoom(
            demand, device_bytes, chunk=chunk, context=context, host_bytes=host_bytes
        )
        self.layers = demand.spec.layers
        self._demand, self._chunk, self._hits = demand, chunk, demand.hit_curve
        self._link_share = copied_share(machine) or LINK_SHARE
        self._kv_bytes = [layer.kv_bytes for layer in self.room.layers]
        others = host_activation_bytes(demand, chunk, context) + 2 * demand.staging_bytes
        self._others_bytes = others
        self._core: list[dict[str, WeightWork]] = [{} for _ in range(self.layers)]
        self._wide: list[dict[str, WeightWork]] = [{} for _ in range(self.layers)]
        self._head: dict[str, WeightWork] = {}
        experts: dict[int, list[BlockSize]] = {}
        for block in demand.blocks:
            layer, kind, _ = block.id
            if kind is BlockKind.EXPERT:
                experts.setdefault(layer, []).append(block)
            elif kind is not BlockKind.EMBEDDING:
                sums = self._wide if kind is BlockKind.FFN else self._core
                _add(self._head if layer == TRUNK else sums[layer], block)
        self._experts = {layer: _group(blocks) for layer, blocks in experts.items()}
        bare = [LayerWork() for _ in range(self.layers)]
        add_attention(bare, demand, {})
        self._bare = bare
        self._alike = self._kinds()
        self.experts = max((group.count for group in self._experts.values()), default=0)

    def loads(self, asked: DeviceChoice) -> Workload:
        """What each layer does then."""
        choice = self.room.choice(asked)
        on_device = {layer.index for layer in choice.layers}
        stay = {layer.index for layer in choice.stay}
        copied = {layer.index for layer in choice.copied}
        away = {layer.index for layer in choice.on_cpu}
        left = self._left(asked, on_device)
        dense = self._dense_bytes(asked.head, on_device, stay)
        read = _read(dense, left)
        share = self._cached(left - sum(dense.values()))
        layers: list[LayerWork] = []
        made: dict[tuple[object, ...], LayerWork] = {}
        for index, bare in enumerate(self._bare):
            here, gone = index in on_device, index in read
            key = self._alike[index], here, gone, index in stay, index in copied, index in away
            if key in made:
                layers.append(made[key])
                continue
            load = replace(bare, few={}, many={}, attention_device=_device(here))
            site = ComputeSite(device=_device(here), copied=False, read=gone and not here)
            _put(load.few, self._core[index], site)
            _put(load.many, self._core[index], site)
            staying, moved = index in stay, index in copied
            read_too = gone and not staying
            site = ComputeSite(device=_device(staying or moved), copied=moved, read=read_too)
            _put(load.few, self._wide[index], site)
            moved = index in copied or index in away
            site = ComputeSite(device=_device(staying or moved), copied=moved, read=read_too)
            _put(load.many, self._wide[index], site)
            group = self._experts.get(index)
            if group is not None:
                load.experts = replace(
                    group,
                    home=Tier.HOST if share is None else Tier.DISK,
                    on_device=float(choice.expert_slots) if here else 0.0,
                    in_memory=(share or 0.0) * group.count,
                    fetched=choice.staging_slots if here else 0,
                )
                load.many_experts_device = _device(here and bool(choice.staging_slots))
            layers.append(load)
            made[key] = load
        head = LayerWork()
        head_read = self.layers in read and not asked.head
        site = ComputeSite(device=_device(asked.head), copied=False, read=head_read)
        _put(head.few, self._head, site)
        return Workload(
            layers=layers,
            head=head,
            chosen=self._demand.spec.experts_per_token,
            link_share=self._link_share if choice.staging_slots else 0.0,
            chunk=self._chunk,
            hits=self._hits,
            prefetch_experts=self._demand.prefetch_experts,
        )

    def _kinds(self) -> list[int]:
        """For each layer the number of the first that has as much of everything."""
        kinds: list[int] = []
        first: list[tuple[int, tuple[object, ...]]] = []
        for index in range(self.layers):
            own = (self._core[index], self._wide[index], self._bare[index],
                   self._experts.get(index), self._kv_bytes[index])  # fmt: skip
            known = next((number for number, other in first if other == own), None)
            if known is None:
                first.append((index, own))
            kinds.append(index if known is None else known)
        return kinds

    def _dense_bytes(self, head: bool, on_device: set[int], stay: set[int]) -> dict[int, float]:
        """Bytes of dense blocks that are the host's, by layer; the head's by the next number."""
        found = {}
        for index in range(self.layers):
            core = 0.0 if index in on_device else _bytes(self._core[index])
            found[index] = core + (0.0 if index in stay else _bytes(self._wide[index]))
        found[self.layers] = 0.0 if head else _bytes(self._head)
        return found

    def _left(self, asked: DeviceChoice, on_device: set[int]) -> float:
        """Host memory for weights."""
        kv = sum(self._kv_bytes[index] for index in range(self.layers) if index not in on_device)
        return float(self.room.host_bytes(asked) - self._others_bytes - kv)

    def _cached(self, left: float) -> float | None:
        """The share of experts that host memory has room for; None: all of them."""
        total = sum(group.count * group.each.nbytes for group in self._experts.values())
        if not total or total <= left:
            return None
        return max(0.0, left / total)


def _read(dense: Mapping[int, float], left: float) -> set[int]:
    """Layers whose dense blocks come from the disk, evenly spread."""
    total = sum(dense.values())
    if not total or total <= left:
        return set()
    heavy = [index for index, nbytes in dense.items() if nbytes]
    count = min(len(heavy), ceil(len(heavy) * (total - left) / total))
    return {heavy[(2 * n + 1) * len(heavy) // (2 * count)] for n in range(count)}


def _add(sums: dict[str, WeightWork], block: BlockSize) -> None:
    sums.setdefault(block.encoding, WeightWork()).add(block)


def _device(computes: bool) -> int | None:
    """The device of the estimate, where it computes."""
    return 0 if computes else None


def _put(sums: Sums, weights: Mapping[str, WeightWork], place: ComputeSite) -> None:
    for encoding, found in weights.items():
        known = sums.get((place, encoding))
        sums[place, encoding] = found if known is None else known.plus(found)


def _bytes(sums: Mapping[str, WeightWork]) -> float:
    return sum(weights.nbytes for weights in sums.values())


def _group(blocks: list[BlockSize]) -> ExpertWork:
    total = WeightWork()
    for block in blocks:
        total.add(block)
    count = len(blocks)
    return ExpertWork(
        count=count, each=total.times(1 / count), encoding=blocks[0].encoding, home=Tier.HOST
    )

"""A plan as work: which bytes each layer reads where, and how much there is to compute with them.

Everything of a layer that lies in one place, in one encoding, is one sum.  So a step's cost is a
walk over layers, whether they have three blocks or three hundred.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hmt.contracts.blocks import TRUNK, BlockKind, BlockSize
from hmt.contracts.kv import GROUP_PAGES
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.plan import Plan, Tier
from hmt.planner.cost.demand import Demand
from hmt.planner.cost.expert_hit_rate import HitCurve

_BYTES_PER_NUMBER = 2  # where nothing is known of a block but its bytes


class ComputeSite(NamedTuple):
    """Where a block computes, and how it gets there.

    device     of the machine's; None: the CPU computes
    copied     over the link to the device, in every step
    read       from the disk, in every step
    """

    device: int | None
    copied: bool
    read: bool


@dataclass(slots=True, kw_only=True)
class WeightWork:
    """Weights of one encoding, summed up.

    blocks      how many there are
    read_bytes  what the disk would read of them
    """

    nbytes: float = 0
    numbers: float = 0
    read_bytes: float = 0
    blocks: float = 0

    def add(self, block: BlockSize) -> None:
        """Count `block`, too."""
        numbers = block.numbers
        self.nbytes += block.slot_bytes
        self.numbers += block.slot_bytes / _BYTES_PER_NUMBER if numbers is None else numbers
        self.read_bytes += block.read_bytes
        self.blocks += 1

    def plus(self, other: "WeightWork") -> "WeightWork":
        """Both together."""
        return WeightWork(
            nbytes=self.nbytes + other.nbytes,
            numbers=self.numbers + other.numbers,
            read_bytes=self.read_bytes + other.read_bytes,
            blocks=self.blocks + other.blocks,
        )

    def times(self, factor: float) -> "WeightWork":
        """So many of them."""
        return WeightWork(
            nbytes=self.nbytes * factor,
            numbers=self.numbers * factor,
            read_bytes=self.read_bytes * factor,
            blocks=self.blocks * factor,
        )


Sums = dict[tuple[ComputeSite, str], WeightWork]


@dataclass(slots=True, kw_only=True)
class ExpertWork:
    """A layer's routed experts.

    each       one of them, on average
    home       where they live
    on_device  cached there, or all of them if that is their home
    in_memory  in slots of host memory, where they live on the disk
    fetched    at most, to the device in one step
    """

    count: int
    each: WeightWork
    encoding: str
    home: Tier
    on_device: float = 0.0
    in_memory: float = 0.0
    fetched: int = 0


@dataclass(slots=True, kw_only=True)
class LayerWork:
    """What one layer reads and computes.

    few, many       dense blocks in steps of few tokens, and of many
    many_experts_device   the device that computes prompts' experts; None: the CPU
    attention_device   the same of attention
    kv_bytes        of one position's keys and values
    kv_operations   of one token's attention to one position
    expanded_operations, expanding_operations, expanded_from   of latents that prompts make keys and
                    values of: of a token's attention to a position, of making one position's, and
                    how many tokens of a text more than which do (inf: never); 0: no latents
    window          positions that are seen at most; 0: all
    selected        positions that a token attends to at most, whatever it sees; 0: all
    index_bytes, index_operations   of one position's index keys, and of scoring it for one token
    state_bytes     of one sequence's recurrent state
    """

    few: Sums = field(default_factory=dict)
    many: Sums = field(default_factory=dict)
    experts: ExpertWork | None = None
    many_experts_device: int | None = None
    attention_device: int | None = None
    kv_bytes: float = 0.0
    kv_operations: float = 0.0
    expanded_operations: float = 0.0
    expanding_operations: float = 0.0
    expanded_from: float = 0.0
    window: int = 0
    selected: int = 0
    index_bytes: float = 0.0
    index_operations: float = 0.0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShares:
    """Attention's positions by where they lie, as shares of all.

    on_device   where layers compute
    on_host     in host memory beside a device
    on_disk
    disk_ratio  bytes of a position on the disk, over those where layers compute
    """

    on_device: float = 1.0
    on_host: float = 0.0
    on_disk: float = 0.0
    disk_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model under a plan.

    head              of the rows whose logits are wanted
    chosen            experts of a token in each layer
    link_share        of experts that are not cached on the device, those that are copied there
    chunk             prompt tokens per step
    hits              of caches of experts
    row_bytes         read from the disk for each token, of tables
    kv                where attention's positions lie
    prefetch_experts  whether experts are read from the disk on a guess
    links             that copy at once for steps of prompts: rows of layers are cut for that
    """

    layers: list[LayerWork]
    head: LayerWork
    chosen: int
    link_share: float
    chunk: int
    hits: HitCurve
    row_bytes: int = 0
    kv: KVShares = KVShares()
    prefetch_experts: bool = False
    links: int = 1

    @property
    def read_blocks(self) -> float:
        """Dense blocks that come from the disk in every decode step."""
        sums = (load.few.items() for load in (*self.layers, self.head))
        return sum(w.blocks for each in sums for (place, _), w in each if place.read)


def workload_of(demand: Demand, plan: Plan) -> Workload:
    """What each layer does under `plan`."""
    spec = demand.spec
    layers = [LayerWork() for _ in range(spec.layers)]
    head, row_bytes = LayerWork(), 0
    experts: dict[int, list[BlockSize]] = {}
    for block in demand.blocks:
        layer, kind, _ = block.id
        home = plan.homes[block.id]
        if kind is BlockKind.EXPERT:
            experts.setdefault(layer, []).append(block)
            continue
        if kind is BlockKind.EMBEDDING:
            lookups = spec.row_lookups.get(block.id, 1)
            row_bytes += lookups * demand.row_bytes if home is Tier.DISK else 0
            continue
        load = head if layer == TRUNK else layers[layer]
        few = next((d.index for d in plan.devices if block.id in d.computes), None)
        for sums, device in ((load.few, few), (load.many, plan.device_of(block.id))):
            copied = device is not None and home is not Tier.DEVICE
            place = ComputeSite(device, copied, home is Tier.DISK)
            sums.setdefault((place, block.encoding), WeightWork()).add(block)
    for index, blocks in experts.items():
        layers[index].experts = _experts(blocks, plan)
        layers[index].many_experts_device = plan.device_of(blocks[0].id)
    # Slots of host memory hold the experts of all layers that live on the disk.
    away = [load.experts for load in layers if load.experts and load.experts.home is Tier.DISK]
    total = sum(group.count * group.each.nbytes for group in away)
    share = _expert_slot_bytes(away, _streamed_bytes(demand, plan), plan) / total if total else 0.0
    for group in away:
        group.in_memory = min(1.0, share) * group.count
    add_attention(layers, demand, plan.stage_devices)
    return Workload(
        layers=layers,
        head=head,
        chosen=spec.experts_per_token,
        link_share=plan.device.link_share,
        chunk=plan.max_prefill_tokens,
        hits=demand.hit_curve,
        row_bytes=row_bytes,
        kv=_kv_shares(demand, plan),
        prefetch_experts=demand.prefetch_experts,
        links=max(1, len(plan.devices)),
    )


def _experts(blocks: list[BlockSize], plan: Plan) -> ExpertWork:
    total = WeightWork()
    for block in blocks:
        total.add(block)
    count, home = len(blocks), plan.homes[blocks[0].id]
    work = ExpertWork(
        count=count, each=total.times(1 / count), encoding=blocks[0].encoding, home=home
    )
    if home is Tier.DEVICE:
        work.on_device = count
    for share in plan.devices:
        if home is not Tier.DEVICE and blocks[0].id.layer in share.stages:
            work.on_device = min(share.expert_slots, count)
            work.fetched = share.staging_slots
    return work


def _streamed_bytes(demand: Demand, plan: Plan) -> int:
    """Of dense blocks that come and go in slots; tables are read row by row."""
    slotless = (BlockKind.EXPERT, BlockKind.EMBEDDING)
    return sum(
        block.slot_bytes
        for block in demand.blocks
        if block.id.kind not in slotless and plan.homes[block.id] is Tier.DISK
    )


def _expert_slot_bytes(away: list[ExpertWork], streamed_bytes: int, plan: Plan) -> float:
    """Bytes of slots that experts have: their own, or what dense blocks leave.

    Where sizes share the slots, a dense block takes the place of experts as long as there are any.
    """
    if plan.slot_counts and away:
        sizes = {group.each.nbytes for group in away}
        if sizes <= set(plan.slot_counts):
            return float(sum(size * plan.slot_counts[int(size)] for size in sizes))
    return float(max(0, plan.reserved.get("slots", 0) - streamed_bytes))


def add_attention(
    layers: list[LayerWork], demand: Demand, stage_devices: Mapping[int, int]
) -> None:
    """Fill in what attention reads and computes in each layer, and where: see `Plan`."""
    layers_kv, states = demand.spec.kv_layers, demand.spec.state_layers
    widths = sum(layer.row_width for layer in layers_kv.values())
    heads = demand.spec.attention_heads
    for index, load in enumerate(layers):
        load.attention_device = stage_devices.get(index)
        own = (state for i, state in states.items() if i % len(layers) == index)
        load.state_bytes = sum(tensor.nbytes for state in own for tensor in state)
        if not demand.spec.kv:  # a shape of which no more is known
            load.kv_bytes = demand.kv_token_bytes / max(1, len(layers))
        elif (kv := layers_kv.get(demand.spec.kv_sources.get(index, index))) is not None:
            load.kv_bytes = demand.kv_token_bytes * kv.row_width / widths
            load.kv_operations = 2.0 * heads * (kv.key_dim + kv.value_dim)
            load.window, load.selected = kv.window, kv.selected
            if (keys := layers_kv.get(len(layers) + index)) is not None:
                load.index_bytes = demand.kv_token_bytes * keys.row_width / widths
                load.index_operations = 2.0 * keys.query_heads * (keys.key_dim + 1)
            if kv.kind is KVKind.LATENT and kv.expanded_dim:
                _expand(load, kv, heads)


def _expand(load: LayerWork, kv: KVLayer, heads: int) -> None:
    """What making keys and values of latents costs, and saves."""
    load.expanded_operations = 2.0 * heads * kv.expanded_dim
    load.expanding_operations = 2.0 * heads * kv.value_dim * kv.made_dim
    load.expanded_from = kv.longest_absorbed


def _kv_shares(demand: Demand, plan: Plan) -> KVShares:
    levels, sizes = plan.kv_tiers, demand.kv_sizes
    if levels is None or sizes is None or not levels.pages or not sizes.device_page:
        return KVShares()
    on_host = levels.host_pages / levels.pages
    on_disk = levels.disk_groups * GROUP_PAGES / levels.pages
    return KVShares(
        on_device=1.0 - on_host - on_disk,
        on_host=on_host,
        on_disk=on_disk,
        disk_ratio=sizes.disk_group / (GROUP_PAGES * sizes.device_page),
    )

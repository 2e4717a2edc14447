"""From a model, a budget and a machine to a plan.  Pure functions: equal input, equal plan.

Every dense block is read once per token, so each byte of it saves equally much by being resident;
an expert is read by the share of tokens that are routed to it, which is less.  So dense blocks
become resident first, and what is left caches experts.  Where dense blocks do not all fit, those
that stay on disk are spread evenly over the model: the disk then reads while resident layers
compute, instead of falling idle and then being waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.units import format_bytes, round_down, round_up, shown_at_least
from hmt.contracts.blocks import BlockId, BlockKind, BlockSize
from hmt.contracts.kv import KVTiers, PinnedPages, min_device_pages, ring_pages
from hmt.contracts.machine import Machine
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.plan import Plan, Tier
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.demand import Demand, KVTierSizes
from hmt.planner.cost.workload import workload_of
from hmt.planner.placement.device import DeviceChoice
from hmt.planner.placement.encoder import image_bytes
from hmt.planner.placement.footprint import (
    default_chunk,
    host_activation_bytes,
    kv_bytes,
    kv_token_bytes,
    sequence_bytes,
    state_bytes,
    working_set_bytes,
)
from hmt.planner.placement.kv_tiers import (
    KVBudgets,
    device_bytes,
    host_bytes,
    plan_kv_tiers,
    work_bytes,
)
from hmt.planner.placement.layer_split import shares_of_devices
from hmt.planner.placement.slot_counts import slot_counts

_SMALLEST_CONTEXT = 256
_LARGEST_DEFAULT_CONTEXT = 8192
_MEMORY_PAGE_BYTES = 4096
_FASTER = 0.98  # of the time or the bytes: what is less better is not worth another cache
_MOST_ROWS = 64  # of a table on disk, looked up at once
_MOST_ROWS_OF_PROMPTS = 4096  # where each token reads several rows of one
# Prompt tokens per step of a device.  It unpacks what it multiplies in other forms once per step,
# and where weights are copied to it, all of them once per step: of DeepSeek-V3 343 GiB.
_DEVICE_CHUNKS = (8192, 4096, 2048, 1024)
_MOST_RESIDENT_CHUNK = 2048  # nothing is copied: more would only make other requests wait longer
# Decoding, for room that larger steps take.  Of 30B-A3B in Q4_K_M with 8 GiB, steps of 4096 tokens
# instead of 2048 save a prompt of 4096 half of its copies, 217 ms, and cost a token 0.06 ms of 1.4;
# instead of 512 they cost it 0.11 ms.
_MOST_SLOWER = 1.1
# The same in bytes that come from slower memory, where rates are unknown: they are a part of the
# time.  Experts of 30B-A3B in Q4_K_M, 8 GiB: 6% more for half of the copies of prompts of 4096.
_MOST_MORE_BYTES = 1.1


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user decides; None leaves it to the planner.

    context             positions of KV over all sequences
    max_prefill_tokens  prompt tokens per step
    prefetch_distance   layers requested ahead
    kv                  of keys and values that do not all lie where layers compute; None: they do
    device_bytes        of a GPU's memory that weights, KV and activations may take; 0: no GPU
    other_device_bytes  the same of GPUs that come behind it, over which layers are spread
    device              what the GPU gets; None: as much as fits, attention first
    """

    host_bytes: int
    context: int | None = None
    max_prefill_tokens: int | None = None
    prefetch_distance: int | None = None
    device_bytes: int = 0
    kv: KVBudgets | None = None
    device: DeviceChoice | None = None
    other_device_bytes: tuple[int, ...] = ()


def solve(demand: Demand, options: PlanOptions, machine: Machine) -> Plan:
    """Decide where everything lives, and say what one decoded token costs there.

    Raises BudgetError when even the smallest working set does not fit; it says what would.
    Raises ConfigError for a context that is longer than the model's.
    """
    plan = _solved(demand, options, machine)
    if options.max_prefill_tokens is None and plan.device.stages:
        return _with_larger_steps(demand, options, machine, plan)
    return plan


def _with_larger_steps(demand: Demand, options: PlanOptions, machine: Machine, plan: Plan) -> Plan:
    """`plan`, or the one with the largest steps for prompts that decodes about as fast.

    Only for devices: they add up in an order that depends on the step anyway.  On the CPU the
    steps are a function of the model, so that logits do not depend on the budget.
    """
    context = min(plan.kv_tokens, demand.spec.max_context * demand.batch)
    computed = (block for share in plan.devices for block in share.computes_prompts)
    copies = any(plan.homes[block] is not Tier.DEVICE for block in computed)
    for chunk in _DEVICE_CHUNKS:
        if not plan.max_prefill_tokens < chunk <= context:
            continue
        if not copies and chunk > _MOST_RESIDENT_CHUNK:
            continue
        asked = replace(options, context=context, max_prefill_tokens=chunk)
        try:
            larger = _solved(demand, asked, machine)
        except BudgetError:
            continue
        as_many = larger.stage_devices.keys() >= plan.stage_devices.keys()
        if as_many and _decodes_about_as_fast(demand, larger, plan):
            return larger
    return plan


def _decodes_about_as_fast(demand: Demand, plan: Plan, other: Plan) -> bool:
    if plan.predicted_token_s and other.predicted_token_s:
        return plan.predicted_token_s <= _MOST_SLOWER * other.predicted_token_s
    return _slow_bytes(demand, plan) <= _MOST_MORE_BYTES * _slow_bytes(demand, other)


def _solved(demand: Demand, options: PlanOptions, machine: Machine) -> Plan:
    refusal: BudgetError | None = None
    plan: Plan | None = None
    try:
        plan = _placed(demand, options, machine)
    except BudgetError as error:
        refusal = error
    plan = _better_with_sliding_windows(demand, options, machine, plan)
    if plan is None:
        assert refusal is not None
        raise refusal
    plan = _better_with_tables(demand, machine, plan)
    token = CostModel(workload_of(demand, plan), machine).decode(1, 0)
    return replace(
        plan,
        host_bytes_per_token=token.nbytes["CPU"] + token.nbytes["link"],
        disk_bytes_per_token=token.nbytes["disk"],
        predicted_token_s=token.seconds,
    )


def _better_with_tables(demand: Demand, machine: Machine, plan: Plan) -> Plan:
    """`plan`, or one that keeps tables in memory instead of as many experts, where that is faster.

    A lookup on the disk is one small read, and waited for: where hardly an expert is missing, the
    longest wait of a step.  Rows of other tables than that of tokens are asked for ahead.
    """
    others = demand.spec.row_lookups
    tables = [
        table
        for table in demand.of_kind(BlockKind.EMBEDDING)
        if plan.homes[table.id] is Tier.DISK and table.id not in others
    ]
    nbytes, slots = sum(table.slot_bytes for table in tables), plan.reserved["slots"]
    streamed = [block for block in _streamable(demand) if plan.homes[block.id] is Tier.DISK]
    if not tables or any(block.id.kind is not BlockKind.EXPERT for block in streamed):
        return plan
    if slots - nbytes < working_set_bytes(streamed) + demand.passing_bytes:
        return plan
    resident = plan.reserved["resident"] + nbytes
    kept = replace(
        plan,
        homes={**plan.homes, **dict.fromkeys((table.id for table in tables), Tier.HOST)},
        reserved={**plan.reserved, "resident": resident, "slots": slots - nbytes},
        slot_counts=slot_counts(streamed, slots - nbytes - demand.vision_slot_bytes),
    )
    before, after = (
        CostModel(workload_of(demand, one), machine).decode(1, 0).seconds for one in (plan, kept)
    )
    return kept if after < before else plan


def _better_with_sliding_windows(
    demand: Demand, options: PlanOptions, machine: Machine, plan: Plan | None
) -> Plan | None:
    """`plan`, or one whose layers with windows keep those alone, where that is faster.

    plan   keeps all positions in all layers; None: that does not fit

    Whole pages in one place are the simpler cache: they stay where the memory that rings save
    would hold nothing that is wanted.
    """
    context = options.context
    if context is None and plan is not None:
        context = min(plan.kv_tokens, demand.spec.max_context * demand.batch)
    near = None if context is None else _sliding_window_bytes(demand, options, context)
    if near is None:
        return plan
    try:
        kept = replace(options, context=context, kv=KVBudgets(near))
        ringed = _placed(demand, kept, machine)
    except BudgetError:
        return plan
    if plan is None:
        return ringed
    homes = (ringed.homes[b] for b in ringed.homes if b.kind is BlockKind.EXPERT)
    if ringed.device.stages and any(home is not Tier.DEVICE for home in homes):
        return plan  # steps that ask for experts elsewhere are not captured beside rings
    assert context is not None
    each = context / demand.batch
    before, after = (
        CostModel(workload_of(demand, one), machine).decode(1, each).seconds
        for one in (plan, ringed)
    )
    if not before or not after:  # nothing is known of the machine
        before, after = _slow_bytes(demand, plan), _slow_bytes(demand, ringed)
    return ringed if after < _FASTER * before else plan


def _sliding_window_bytes(demand: Demand, options: PlanOptions, context: int) -> int | None:
    """Bytes of keys and values near, with rings for windows; None where that is not for us to say.

    Or where rings would save little, or too few pages would be left for all requests at once.
    """
    sizes = demand.kv_sizes
    if sizes is None or not sizes.ring_pages or options.kv is not None or options.device:
        return None
    if options.other_device_bytes:  # rings are one device's
        return None
    chunk, pages = _chunk(demand, options), -(-context // PAGE_TOKENS)
    if pages < min_device_pages(chunk, demand.batch, PinnedPages()):
        return None
    longest = {window: demand.batch * ring_pages(window, chunk) for window in sizes.ring_pages}
    rings = {window: min(pages, count) for window, count in longest.items()}
    levels = KVTiers(pages, ring_pages=rings)
    nbytes = device_bytes(levels, sizes)
    return nbytes if nbytes < _FASTER * kv_bytes(demand, context) else None


def _slow_bytes(demand: Demand, plan: Plan) -> float:
    """Bytes of weights weighed by how far they are."""
    far = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 100}
    return float(sum(far[plan.homes[block.id]] * block.slot_bytes for block in demand.blocks))


def _placed(demand: Demand, options: PlanOptions, machine: Machine) -> Plan:
    """The plan, without what it costs."""
    if not demand.spec.kv_layers:  # there are no pages that could lie anywhere
        options = replace(options, kv=None)
    if options.kv is None and options.device_bytes:
        return _with_device(demand, options, machine)
    if options.kv is None:
        return _on_host(demand, options)
    sizes = demand.kv_sizes
    assert sizes is not None
    chunk, most = _chunk(demand, options), demand.spec.max_context * demand.batch
    levels = plan_kv_tiers(
        sizes, options.kv, context=options.context, most=most, chunk=chunk, batch=demand.batch,
        device=0 if options.device_bytes else None,
    )  # fmt: skip
    values = [layer.value_dim + 1 for layer in demand.spec.kv_layers.values()]
    rows = demand.spec.attention_heads * max(values, default=0)
    work = work_bytes(levels, sizes, chunk + demand.batch - 1, rows)
    demand = replace(demand, kv_work_bytes=work)
    context = min(options.context or most, levels.pages * PAGE_TOKENS)
    options = replace(options, context=context, max_prefill_tokens=chunk)
    if options.device_bytes:
        plan = _with_device(demand, options, machine, levels)
    else:
        plan = _on_host(demand, options, _kv_bytes(sizes, levels))
    return replace(plan, kv_tokens=levels.pages * PAGE_TOKENS, kv_tiers=levels)


def _with_device(
    demand: Demand, options: PlanOptions, machine: Machine, levels: KVTiers | None = None
) -> Plan:
    """The devices take what they can; the rest is planned as without them."""
    # Layers of a device need as many positions of KV there as the others have in host memory.
    context = _context(demand, options, options.host_bytes // 4)
    sizes = (options.device_bytes, *options.other_device_bytes)
    shares, stays, mapped = shares_of_devices(
        demand, sizes, machine, chunk=_chunk(demand, options), context=context,
        host_bytes=options.host_bytes, levels=levels, asked=options.device,
    )  # fmt: skip
    on_device = set(stays)
    there = {stage for share in shares for stage in share.stages}
    on_host = [index for index in range(demand.spec.layers) if index not in there]
    rest = replace(
        demand,
        blocks=tuple(block for block in demand.blocks if block.id not in on_device),
        kv_token_bytes=kv_token_bytes(demand, on_host),
        sequence_bytes=sequence_bytes(demand, on_host),
        # A block goes to the device from a slot in host memory.
        passing_bytes=max(
            (demand.passing_bytes, *(b.slot_bytes for b in demand.blocks if b.id in on_device))
        ),
    )
    options = replace(options, context=context, max_prefill_tokens=_chunk(demand, options))
    # Layers of the CPU keep everything in host memory, and those of the device what is not near.
    beside = None
    if levels is not None and demand.kv_sizes is not None:
        beside = kv_bytes(rest, context) + host_bytes(levels, demand.kv_sizes)
    plan = _on_host(rest, replace(options, host_bytes=mapped), beside)
    homes = {block.id: plan.homes.get(block.id, Tier.DEVICE) for block in demand.blocks}
    homes |= {block.id: Tier.DISK for block in demand.vision}
    return replace(
        plan,
        homes=homes,
        budgets={Tier.HOST: options.host_bytes, Tier.DEVICE: sum(sizes)},
        kv_tokens=round_up(context, PAGE_TOKENS),
        devices=shares,
    )


def _on_host(demand: Demand, options: PlanOptions, kv: int | None = None) -> Plan:
    """`kv`: bytes of keys and values; None: those of the context."""
    needed = smallest_budget(demand, options, kv)
    if options.host_bytes < needed:
        raise BudgetError(_too_small(demand, options, needed, kv))
    fixed = _reserve(demand, options, options.host_bytes - needed, kv)
    # In whole pages, of which blocks are made: a byte more must not become a page less.
    left = round_down(options.host_bytes - sum(fixed.values()), _MEMORY_PAGE_BYTES)
    smallest = working_set_bytes(_streamable(demand))
    distance = options.prefetch_distance
    tables = _other_tables(demand)
    free = left - demand.weight_bytes - demand.passing_bytes
    if free + sum(table.slot_bytes for table in tables) >= 0:
        homes = {block.id: Tier.HOST for block in demand.blocks}
        while free < 0:  # the largest tables stay on the disk
            free += tables[-1].slot_bytes
            homes[tables.pop().id] = Tier.DISK
        # What is left keeps a tower in memory once an image has come.
        slots = max(demand.passing_bytes, min(demand.vision_bytes, demand.passing_bytes + free))
        distance = distance or 0
    else:
        distance = 2 if distance is None else distance
        homes, slots = _place(demand, left - demand.passing_bytes, smallest, distance)
        slots = slots + demand.passing_bytes
    resident = sum(b.slot_bytes for b in demand.blocks if homes[b.id] is Tier.HOST)
    homes |= {block.id: Tier.DISK for block in demand.vision}
    return Plan(
        homes=homes,
        budgets={Tier.HOST: options.host_bytes},
        reserved={"resident": resident, "slots": slots, **fixed},
        prefetch_distance=distance,
        max_prefill_tokens=_chunk(demand, options),
        kv_tokens=_positions(demand, fixed["kv"], options, options.host_bytes - needed),
        slot_counts=slot_counts(
            [b for b in _streamable(demand) if homes[b.id] is Tier.DISK],
            slots - demand.vision_slot_bytes,
        ),
    )


def smallest_budget(demand: Demand, options: PlanOptions, kv: int | None = None) -> int:
    """The least host memory with which `solve` succeeds for these options.

    `kv`: bytes of keys and values; None: those of the context.
    """
    fixed = _reserve(demand, options, 0, kv)
    return sum(fixed.values()) + working_set_bytes(_streamable(demand)) + demand.passing_bytes


def _reserve(
    demand: Demand, options: PlanOptions, spare: int, kv: int | None = None
) -> dict[str, int]:
    """Bytes that do not hold weights, by purpose: the least that works, and part of `spare`."""
    staging, row = demand.staging_bytes, demand.row_bytes
    # A second staging buffer lets one block be read while another is converted.
    buffers = 2 if 2 * staging <= spare // 4 else 1
    # Page by page, not row by row, so that they never take more than was added.
    looked_up = _chunk(demand, options) * sum(demand.spec.row_lookups.values())
    most = max(_MOST_ROWS, min(_MOST_ROWS_OF_PROMPTS, looked_up)) * row
    rows = min(most, max(row, round_down(spare // 16, _MEMORY_PAGE_BYTES)))
    context = _context(demand, options, spare // 4)
    images = image_bytes(demand, spare, on_host=not options.device_bytes)
    others = {"images": round_down(images, _MEMORY_PAGE_BYTES)} if demand.image_bytes else {}
    if demand.adapter_bytes:
        others["adapters"] = round_up(demand.adapter_bytes, _MEMORY_PAGE_BYTES)
    return others | {
        "activations": host_activation_bytes(demand, _chunk(demand, options), context),
        "staging": buffers * staging,
        "prefixes": round_up(demand.prefix_bytes, _MEMORY_PAGE_BYTES),
        "rows": rows + demand.row_sums_bytes,
        "kv": round_up(kv_bytes(demand, context) if kv is None else kv, _MEMORY_PAGE_BYTES)
        + state_bytes(demand),
    }


def _positions(demand: Demand, kv: int, options: PlanOptions, spare: int) -> int:
    """Positions for which `kv` bytes have room, beside recurrent state."""
    if not demand.kv_token_bytes:  # no layer keeps any per position
        return round_up(_context(demand, options, spare // 4), PAGE_TOKENS)
    return round_down((kv - state_bytes(demand)) // demand.kv_token_bytes, PAGE_TOKENS)


def _kv_bytes(sizes: KVTierSizes, levels: KVTiers) -> int:
    return device_bytes(levels, sizes) + host_bytes(levels, sizes)


def _chunk(demand: Demand, options: PlanOptions) -> int:
    return options.max_prefill_tokens or default_chunk(demand)


def _context(demand: Demand, options: PlanOptions, affordable_bytes: int) -> int:
    longest = demand.spec.max_context
    if demand.batch > 1:  # each text has whole pages
        longest = round_up(longest, PAGE_TOKENS) * demand.batch
    if options.context is not None:
        if not 0 < options.context <= longest:
            raise ConfigError(
                f"a context of {options.context} positions was asked for; "
                f"{demand.spec.architecture} can use 1 to {longest} ({demand.batch} requests of "
                f"{demand.spec.max_context})"
            )
        return options.context
    affordable = affordable_bytes // max(1, _context_token_bytes(demand, options))
    wanted = _SMALLEST_CONTEXT + min(_LARGEST_DEFAULT_CONTEXT - _SMALLEST_CONTEXT, affordable)
    return min(longest, round_up(wanted, PAGE_TOKENS))


def _context_token_bytes(demand: Demand, options: PlanOptions) -> int:
    """What one more position costs: its KV, and its part of the attention's workspace."""
    scores = 4 * demand.spec.attention_heads * _chunk(demand, options)
    return demand.kv_token_bytes + demand.kv_layer_bytes + scores


def _streamable(demand: Demand) -> list[BlockSize]:
    """Blocks that are leased whole.  A table on disk is read row by row and needs no slot."""
    return [block for block in demand.blocks if block.id.kind is not BlockKind.EMBEDDING]


def _other_tables(demand: Demand) -> list[BlockSize]:
    """Tables besides that of tokens, which tokens read few rows of; smallest first."""
    tables = (block for block in demand.blocks if block.id in demand.spec.row_lookups)
    return sorted(tables, key=lambda table: table.slot_bytes)


def _place(
    demand: Demand, left: int, smallest: int, distance: int
) -> tuple[dict[BlockId, Tier], int]:
    """Homes of all blocks and the bytes for slots, when not everything can be resident."""
    homes = {block.id: Tier.DISK for block in demand.blocks}
    dense = [block for block in _streamable(demand) if block.id.kind is not BlockKind.EXPERT]
    experts = demand.of_kind(BlockKind.EXPERT)
    dense_bytes = sum(block.slot_bytes for block in dense)
    expert_slot = max((block.slot_bytes for block in experts), default=0)
    if dense_bytes + expert_slot <= left:
        homes |= {block.id: Tier.HOST for block in dense}
        slots = left - dense_bytes
        others = demand.spec.row_lookups
        tables = [t for t in demand.of_kind(BlockKind.EMBEDDING) if t.id not in others]
        # A lookup on disk costs one small read per token: a table is resident last.
        for table in sorted(tables, key=lambda table: table.slot_bytes):
            if not experts and table.slot_bytes <= slots:
                homes[table.id] = Tier.HOST
                slots -= table.slot_bytes
        return homes, slots if experts else 0
    # Enough slots for the layers ahead; but where nearly everything fits, slots for whole layers
    # would make more stream than has to.
    ahead = min((distance + 1) * _layer_bytes(dense), left // 2, 2 * (dense_bytes - left))
    window = max(smallest, ahead)
    for block in _spread(dense, left - window):
        homes[block.id] = Tier.HOST
    resident = sum(b.slot_bytes for b in demand.blocks if homes[b.id] is Tier.HOST)
    return homes, left - resident


def _layer_bytes(dense: Sequence[BlockSize]) -> int:
    """Dense bytes of the largest layer."""
    layers: dict[int, int] = {}
    for block in dense:
        if block.id.kind is not BlockKind.HEAD:
            layers[block.id.layer] = layers.get(block.id.layer, 0) + block.slot_bytes
    return max(layers.values(), default=0)


def _spread(blocks: Sequence[BlockSize], room: int) -> list[BlockSize]:
    """Blocks that fit in `room`, chosen evenly along the model."""
    total = sum(block.slot_bytes for block in blocks)
    chosen, seen, taken = [], 0, 0
    for block in blocks:
        seen += block.slot_bytes
        share = room * seen // total  # what an even spread would have taken by now
        if taken + block.slot_bytes <= share:
            chosen.append(block)
            taken += block.slot_bytes
    return chosen


def _too_small(demand: Demand, options: PlanOptions, needed: int, kv: int | None) -> str:
    fixed = _reserve(demand, options, 0, kv)
    parts = ", ".join(f"{format_bytes(n)} {purpose}" for purpose, n in fixed.items() if n)
    blocks = working_set_bytes(_streamable(demand))
    return (
        f"{demand.spec.architecture} cannot run in {format_bytes(options.host_bytes)} of host "
        f"memory: it needs {parts}, and {format_bytes(blocks)} for the blocks in use at once. "
        f"The smallest --host-memory that works is {needed} bytes "
        f"({format_bytes(shown_at_least(needed))}); "
        "a shorter --context or a smaller --max-prefill-tokens lowers it"
    )

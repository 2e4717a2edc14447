"""Why a plan puts each kind of block where it does, in sentences with the figures that decide."""

from hmt.base.units import format_bytes, format_rate
from hmt.contracts.blocks import BlockKind
from hmt.contracts.machine import Machine
from hmt.contracts.plan import Plan, Tier
from hmt.planner.cost.demand import Demand

_DENSE = (BlockKind.ATTENTION, BlockKind.FFN, BlockKind.ROUTER)


def reasons(plan: Plan, demand: Demand, machine: Machine) -> list[str]:
    """A sentence for each sort of block, the nearest memory first."""
    found = [*_on_device(plan, demand, machine), *_experts(plan, demand), *_dense(plan, demand)]
    return [*found, *_head(plan, demand), *_keys(plan, demand)]


def _on_device(plan: Plan, demand: Demand, machine: Machine) -> list[str]:
    layers, share, device = demand.spec.layers, plan.device, machine.device
    if device is None or not device.memory_bytes:
        return []
    count = sum(stage < layers for stage in share.stages)
    if not count:
        return [
            "the GPU computes nothing: it has no room for a layer's attention with its keys and "
            "values, or was found to be slower than the CPU alone"
        ]
    found = []
    if count == layers:
        found.append(
            "attention of all layers is on the GPU with its keys and values: it is read for every "
            "token, and reads most where the context is long"
        )
    else:
        found.append(
            f"attention of {count} of {layers} layers is on the GPU, evenly spread; of the others "
            "weights, keys and values stay in host memory, where the CPU computes them"
        )
    networks = [block.id for block in demand.of_kind(BlockKind.FFN)]
    beside = [b for b in networks if plan.homes[b] is not Tier.DEVICE and b.layer in share.stages]
    copied = [b for b in beside if b in share.computes]
    if beside:
        found.append(
            f"{len(networks) - len(beside)} of {len(networks)} networks are there, too, which fills"
            f" it; of the others {len(copied)} are copied to it in every step and the CPU computes "
            f"{len(beside) - len(copied)}: the link gives {format_rate(device.link_rate)}, memory "
            f"{format_rate(machine.cpu.read_rate)}"
        )
    return found


def _experts(plan: Plan, demand: Demand) -> list[str]:
    experts = demand.of_kind(BlockKind.EXPERT)
    away = [block for block in experts if plan.homes[block.id] is not Tier.DEVICE]
    if not away:
        return []
    each = len(experts) // max(1, len({block.id.layer for block in experts}))
    chosen = demand.spec.experts_per_token
    text = (
        f"experts come last: a token chooses {chosen} of {each}, so a byte of them is read "
        f"{each / max(1, chosen):.0f} times less often than one of anything else"
    )
    if plan.device.staging_slots:
        text += (
            f"; the GPU caches {plan.device.expert_slots} of each layer's and brings up to "
            f"{plan.device.staging_slots} that are missing, the CPU computes the rest"
        )
    on_disk = sum(block.slot_bytes for block in away if plan.homes[block.id] is Tier.DISK)
    if on_disk:
        text += (
            f"; {format_bytes(on_disk)} of them live on the disk, and host memory has slots for "
            f"{format_bytes(plan.reserved['slots'])}"
        )
    return [text]


def _dense(plan: Plan, demand: Demand) -> list[str]:
    dense = demand.of_kind(*_DENSE)
    away = [block for block in dense if plan.homes[block.id] is Tier.DISK]
    if Tier.DISK not in (plan.homes[block.id] for block in demand.blocks):
        return ["nothing is read from the disk: all weights have room in memory"]
    if not away:
        return []
    return [
        f"{len(away)} of {len(dense)} dense blocks, {format_bytes(sum(b.slot_bytes for b in away))}"
        ", have no room in memory and are read in every step; they are spread over the model, so "
        "that the disk reads while the others compute"
    ]


def _head(plan: Plan, demand: Demand) -> list[str]:
    others = demand.spec.row_lookups
    tables = [t for t in demand.of_kind(BlockKind.EMBEDDING) if t.id not in others]
    heads = demand.of_kind(BlockKind.HEAD)
    found = []
    if any(plan.homes[block.id] is Tier.HOST for block in tables):
        found.append("the embedding is in host memory: a token reads one row of it")
    elif tables:
        found.append("the embedding stays on the disk: a token reads one row of it")
    for block in demand.blocks:
        if block.id in others:
            place = "in host memory" if plan.homes[block.id] is Tier.HOST else "on the disk"
            found.append(
                f"the table {block.id}, {format_bytes(block.slot_bytes)}, is {place}: a token "
                f"reads {others[block.id]} rows of it, which are asked for once its id is known"
            )
    if heads and plan.device.stages and demand.spec.layers not in plan.device.stages:
        size = format_bytes(sum(block.slot_bytes for block in heads))
        found.append(
            f"the head, {size}, is the CPU's: the GPU's memory is worth more to something else"
        )
    return found


def _keys(plan: Plan, demand: Demand) -> list[str]:
    levels = plan.kv_tiers
    if levels is None:
        return []
    found = []
    if levels.ring_pages:
        windows = ", ".join(str(window) for window in sorted(levels.ring_pages))
        found.append(f"layers with a window ({windows} positions) keep no more than they see")
    if levels.host_pages or levels.disk_groups:
        found.append(
            f"keys and values of {levels.device_pages} of {levels.pages} pages are where layers "
            "compute; the rest is attended to where it lies"
        )
    return found

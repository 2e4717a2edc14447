"""The plan in words and figures, for people."""

from collections.abc import Sequence

from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockKind, BlockSize
from hmt.contracts.machine import Machine
from hmt.contracts.plan import DevicePlan, Plan, Tier
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.demand import Demand
from hmt.planner.cost.workload import workload_of
from hmt.planner.placement.encoder import encoder_remark
from hmt.planner.placement.layer_split import rates_of

_MEANING = {
    "resident": "weights that stay",
    "slots": "weights that come and go",
    "experts": "experts, cached or brought",
    "kv": "keys and values",
    "activations": "activations",
    "mapping": "page tables of host memory",
    "staging": "conversion on load",
    "rows": "embedding rows",
    "prefixes": "pages on their way",
    "images": "images",
    "adapters": "adapters",
    "encoder": "encoder of images",
}

LIMITS = {
    "GPU": "the GPU",
    "CPU": "the CPU and its memory",
    "link": "the link to the GPU",
    "disk": "the disk",
    "overhead": "overheads that depend on no bytes",
}
"""What bounds a step, for people: by the parts of a StepCost."""

_PLACES = {Tier.DEVICE: "GPU", Tier.HOST: "host", Tier.DISK: "disk"}


def explain(plan: Plan, demand: Demand, machine: Machine) -> str:
    """What lives where, what a token costs, and why: a few lines of plain text."""
    lines: list[str | None] = [
        f"{demand.spec.architecture}: {demand.spec.layers} layers, "
        f"{format_bytes(demand.weight_bytes)} of weights in memory form",
        "",
        f"host memory, {format_bytes(plan.budgets[Tier.HOST])}:",
    ]
    for purpose, nbytes in plan.reserved.items():
        if nbytes:
            detail = _kv_detail(plan, demand) if purpose == "kv" else ""
            lines.append(f"  {_MEANING[purpose]:<26}{format_bytes(nbytes):>10}{detail}")
    free = plan.budgets[Tier.HOST] - sum(plan.reserved.values())
    lines.append(f"  {'free':<26}{format_bytes(free):>10}")
    if machine.process_bytes:
        taken = format_bytes(machine.process_bytes)
        lines.append(f"beside it {taken} of the process itself")
    lines.append("")
    lines += _device_lines(plan, demand, machine)
    tiers = [Tier.DEVICE] * bool(plan.device.stages) + [Tier.HOST, Tier.DISK]
    lines.append(f"{'blocks':<10}" + "".join(f"{_PLACES[tier]:>18}" for tier in tiers))
    tables = [block for block in demand.blocks if block.id in demand.spec.row_lookups]
    lines.append(_kind_line("n-grams", plan, tables, tiers))
    for kind in BlockKind:
        others = [block for block in demand.of_kind(kind) if block not in tables]
        lines.append(_kind_line(kind.value, plan, others, tiers))
    costs = _cost_lines(plan, demand, machine)
    remarks = [f"it {remark}" for remark in demand.spec.remarks]
    if remark := encoder_remark(plan, demand):
        remarks.append(remark)
    lines += ["", *costs, *remarks]
    return "\n".join(line for line in lines if line is not None)


def _kv_detail(plan: Plan, demand: Demand) -> str:
    """What the KV cache has room for."""
    if not demand.sequence_bytes:
        return f"  ({plan.kv_tokens} positions)"
    state = f"{demand.state_slots} recurrent states of {format_bytes(demand.sequence_bytes)}"
    return f"  ({plan.kv_tokens} positions, {state})"


def _device_lines(plan: Plan, demand: Demand, machine: Machine) -> list[str | None]:
    """What each GPU does."""
    taking_part = (share for share in plan.devices if share.stages)
    return [line for share in taking_part for line in _share_lines(share, plan, demand, machine)]


def _share_lines(
    device: DevicePlan, plan: Plan, demand: Demand, machine: Machine
) -> list[str | None]:
    rates, alone = rates_of(machine, device.index), len(plan.devices) == 1
    name = "GPU" if rates is None else rates.name
    nbytes = plan.budgets[Tier.DEVICE] if alone else sum(device.reserved.values())
    number = "" if alone else f"GPU {device.index + 1} of {len(plan.devices)}, "
    lines: list[str | None] = [f"{number}{name}, {format_bytes(nbytes)}:"]
    for purpose, nbytes in device.reserved.items():
        if nbytes:
            lines.append(f"  {_MEANING[purpose]:<26}{format_bytes(nbytes):>10}")
    layers = sum(stage < demand.spec.layers for stage in device.stages)
    copied = {b.layer for b in device.computes if plan.homes[b] is not Tier.DEVICE}
    text = f"  computes {layers} of {demand.spec.layers} layers"
    if not alone and layers:
        own = sorted(device.stages - {demand.spec.layers})
        text += f" (from {own[0]} to {own[-1]})"
    if copied:
        text += f", of which {len(copied)} are copied there in every step"
    sizes = {block.id: block.slot_bytes for block in demand.blocks}
    brought = [b for b in device.computes_prompts if plan.homes[b] is not Tier.DEVICE]
    if brought:
        size = format_bytes(sum(sizes[block] for block in brought))
        text += (
            f"\n  a prompt copies {size} there for each {plan.max_prefill_tokens} of its tokens; "
            "more at a time (--max-prefill-tokens) are faster and take more memory"
        )
    return [*lines, text, ""]


def _kind_line(
    name: str, plan: Plan, blocks: Sequence[BlockSize], tiers: Sequence[Tier]
) -> str | None:
    if not blocks:
        return None
    cells = []
    for tier in tiers:
        here = [block for block in blocks if plan.homes[block.id] is tier]
        size = format_bytes(sum(block.slot_bytes for block in here))
        cells.append(f"{len(here)} · {size}" if here else "-")
    return f"  {name:<10}" + "".join(f"{cell:>18}" for cell in cells)


def _cost_lines(plan: Plan, demand: Demand, machine: Machine) -> list[str]:
    lines = [
        f"one decoded token reads {format_bytes(plan.host_bytes_per_token)} of weights from memory "
        f"and {format_bytes(plan.disk_bytes_per_token)} from disk"
    ]
    if plan.disk_bytes_per_token:
        lines.append(f"reads run {plan.prefetch_distance} layers ahead of the computation")
    if plan.predicted_token_s:
        limit = CostModel(workload_of(demand, plan), machine).decode(1, 0).limit
        text = f"{1 / plan.predicted_token_s:.1f} tokens/s for one user, bound by {LIMITS[limit]}"
        if machine.cpu.step_overhead_s:
            lines.append(f"that allows {text}, before there is any context")
        else:
            lines.append(f"the links allow {text}; small models stay far below that")
    return lines

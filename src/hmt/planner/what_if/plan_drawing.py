"""A plan as a drawing in text: one column for each layer, and how full each memory is."""

from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockKind
from hmt.contracts.plan import Plan, Tier
from hmt.planner.cost.demand import Demand

_COLUMNS = 64
_BAR = 48
_LEGEND = (
    "G on the GPU   l copied to the GPU in every step   c in host memory, for the CPU\n"
    "d on the disk   1-9 of ten experts, cached on the GPU (or in host memory, if on the disk)"
)
_LETTERS = {
    "resident": "w",
    "slots": "s",
    "experts": "e",
    "kv": "k",
    "activations": "a",
    "mapping": "m",
    "staging": "a",
    "rows": "a",
    "prefixes": "a",
    "images": "a",
    "encoder": "s",
}


def draw(plan: Plan, demand: Demand) -> str:
    """What goes where: memories as bars, and layers as columns; plain text."""
    lines = ["w weights   s slots   e experts   k keys and values   a activations and buffers", ""]
    if plan.device.stages:
        budget = plan.budgets[Tier.DEVICE]
        lines.append(_bar("GPU", dict(plan.device.reserved), budget))
    lines.append(_bar("host", dict(plan.reserved), plan.budgets[Tier.HOST]))
    lines += ["", *_layers(plan, demand), "", _LEGEND]
    return "\n".join(lines)


def _bar(name: str, reserved: dict[str, int], budget: int) -> str:
    cells, total = "", 0
    for purpose, nbytes in reserved.items():
        total += nbytes
        wanted = round(_BAR * total / max(1, budget))
        cells += _LETTERS.get(purpose, "a") * (wanted - len(cells))
    return f"{name:<10}[{cells[:_BAR]:<{_BAR}}] {format_bytes(total)} of {format_bytes(budget)}"


def _layers(plan: Plan, demand: Demand) -> list[str]:
    """A row for each kind of blocks; where there are many layers, a column stands for several."""
    layers = demand.spec.layers
    step = -(-layers // _COLUMNS)
    shown = range(0, layers, step)
    first = {(block.id.layer, block.id.kind): block for block in reversed(demand.blocks)}
    each = f", a column for {step}" if step > 1 else ""
    lines = [f"layers 0 to {layers - 1}{each}"]
    for kind, name in (
        (BlockKind.ATTENTION, "attention"),
        (BlockKind.FFN, "network"),
        (BlockKind.ROUTER, "router"),
        (BlockKind.EXPERT, "experts"),
    ):
        cells = ""
        for layer in shown:
            block = first.get((layer, kind))
            cells += " " if block is None else _letter(plan, demand, layer, kind)
        if cells.strip():
            lines.append(f"{name:<10} {cells}")
    return lines


def _letter(plan: Plan, demand: Demand, layer: int, kind: BlockKind) -> str:
    blocks = [b.id for b in demand.blocks if b.id.layer == layer and b.id.kind is kind]
    home = plan.homes[blocks[0]]
    if home is Tier.DEVICE:
        return "G"
    if kind is BlockKind.EXPERT:
        share = plan.device.expert_slots / len(blocks) if layer in plan.device.stages else 0.0
        if home is Tier.DISK and not share:
            away = sum(
                b.slot_bytes
                for b in demand.blocks
                if b.id.kind is kind and plan.homes[b.id] is home
            )
            share = plan.reserved["slots"] / away
        tenths = min(9, int(10 * share))
        return str(tenths) if tenths else ("d" if home is Tier.DISK else "c")
    if blocks[0] in plan.device.computes:
        return "l"
    return "d" if home is Tier.DISK else "c"

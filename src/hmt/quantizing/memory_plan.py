"""How budgets of memory are shared between weights, statistics and activations.

On a GPU are statistics, activations, the weight at work and copies of the blocks that a layer
computes with; blocks come from host memory, and codes go there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod

from hmt.base.errors import BudgetError
from hmt.base.units import MIB, format_bytes
from hmt.contracts.blocks import TRUNK, BlockId
from hmt.contracts.model import CHUNK_TOKENS, ModelSpec
from hmt.contracts.plan import Tier
from hmt.kernels.ops import ATTENTION_WORKSPACE_BYTES
from hmt.memory import Ledger
from hmt.quant.methods.interface import Needs
from hmt.quantizing.measures import sampled_bytes
from hmt.quantizing.methods import Procedure
from hmt.quantizing.statistics import nbytes as statistics_bytes
from hmt.quantizing.stores import store_bytes
from hmt.quantizing.structure import ParamId
from hmt.quantizing.units import LayerWork, Unit
from hmt.weights import BlockLayout

Layouts = Mapping[BlockId, BlockLayout]

# Weights that are rounded at once where rows do not depend on each other.
ROWS_NUMBERS = 4 * MIB
# Copies of a weight in f32, its codes, its error, and what that gives: GPTQ is measured to take 20.
_WEIGHT_BYTES = 24
# Copies of a Hessian in f64: damped, its factor, the inverse of that; GPTQ is measured to take 37.
_HESSIAN_BYTES = 40
# Of a GPU's budget: the rest is for what lies between torch's buffers and for workspaces of its
# libraries.  Assumed; torch is held to the whole budget, and ends a run that takes more.
_PLANNED = 0.85
_ACTIVATION_COPIES = 3  # plain torch joins parts that kernels write side by side


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Shares of a budget.

    stores        for blocks, of the checkpoint or of what was quantised
    work          for one weight while it is quantised
    statistics    for sums over inputs of as many layers as fit
    activations   for a step of `batch` sequences
    batch         0 where no sequences are read
    copies        on a GPU, of blocks that a layer computes with; 0: the CPU computes
    staging       of host memory for what comes from a GPU and goes there
    """

    stores: int
    work: int
    statistics: int
    activations: int
    batch: int
    copies: int = 0
    staging: int = 0

    @property
    def total(self) -> int:
        """Of host memory."""
        return self.stores + (self.staging if self.copies else self._computed)

    @property
    def device_total(self) -> int:
        """Of a GPU's memory."""
        return self.copies + self._computed if self.copies else 0

    @property
    def _computed(self) -> int:
        return self.work + self.statistics + self.activations

    @contextmanager
    def charged(self, ledger: Ledger) -> Iterator[None]:
        """In the body, what torch allocates is charged; stores charge their own.

        Raises BudgetError.
        """
        with ExitStack() as stack:
            computing = Tier.DEVICE if self.copies else Tier.HOST
            tiers = dict.fromkeys(("work", "statistics", "activations"), computing)
            if self.copies:
                tiers |= {"copies": Tier.DEVICE, "staging": Tier.HOST}
            for purpose, tier in tiers.items():
                account = ledger.open(tier, purpose, getattr(self, purpose))
                stack.callback(account.close)
            yield


def plan_memory(
    budget: int,
    spec: ModelSpec,
    layouts: Layouts,
    works: Sequence[LayerWork],
    procedure: Procedure,
    sequences: Sequence[Sequence[int]],
    begun: "MemoryPlan | None" = None,
    *,
    measures: bool = False,
    device: int | None = None,
) -> MemoryPlan:
    """Shares for quantising all `works`.  Raises BudgetError where a budget holds too little.

    budget     of host memory
    device     of a GPU's memory; None: the CPU computes
    measures   whether weights are measured before: see `measuring.py`
    begun      shares of the run that this one goes on for: statistics and activations stay, as in
            which order inputs are summed up is seen in the last bits
    """
    device = None if device is None else int(device * _PLANNED)
    needs, changed = procedure.needs, procedure.changes_weights
    # Codes, scales and what they become while they are written, of one weight.
    staging = max(4 * unit.numbers for layer in works for unit in layer.units)
    stores = max(_store_bytes(work, layouts) for work in works)
    copies = 0 if device is None else stores + changed * changed_bytes(spec)
    stores += changed * changed_bytes(spec) if device is None else 0
    work = max(work_bytes(unit, needs, whole=changed) for layer in works for unit in layer.units)
    if measures:
        work = max(work, *(measuring_bytes(unit) for layer in works for unit in layer.units))
    if not needs and not measures:
        plan = MemoryPlan(stores, work, 0, 0, 0, copies, staging if copies else 0)
        return _checked(plan, budget, device)
    longest = max(map(len, sequences))
    one_step = _step_bytes(spec, longest)
    rows = 2 * 4 * spec.hidden_size * longest  # what goes into a layer, and what comes out

    def size(columns: int) -> int:
        return max(statistics_bytes(needs, columns), sampled_bytes(columns) if measures else 0)

    most = max(_of_layer(layer, size) for layer in works)
    least = max(size(unit.shape[1]) for layer in works for unit in layer.units)
    minimum = MemoryPlan(stores, work, least, one_step, 1, copies, staging + rows)
    _checked(minimum, budget, device)
    if begun is not None:
        return _checked(replace(begun, stores=stores, work=work, copies=copies), budget, device)
    free = budget - stores - work if device is None else device - copies - work
    statistics = min(most, max(least, (free - one_step) // 2))
    batch = min(len(sequences), (free - statistics) // one_step)
    if device is not None:
        batch = min(batch, (budget - stores - staging) // rows)
    batch = max(1, batch)
    staging += batch * rows
    return MemoryPlan(stores, work, statistics, batch * one_step, batch, copies, staging)


def layer_layouts(layouts: Layouts, layer: int, *, tables: bool) -> dict[BlockId, BlockLayout]:
    """Of one layer's blocks, and with `tables` of those that belong to no layer."""
    members = {layer, TRUNK} if tables else {layer}
    return {block: layout for block, layout in layouts.items() if block.layer in members}


def changed_bytes(spec: ModelSpec) -> int:
    """What the blocks of a layer take in f32, of which two may be leased at a time."""
    sizes = [
        4 * sum(prod(param.shape) for param in block.params)
        for block in spec.blocks
        if block.id.layer != TRUNK
    ]
    return sum(sorted(sizes, reverse=True)[:2])


def work_bytes(unit: Unit, needs: Needs, *, whole: bool = False) -> int:
    """What quantising a weight takes besides its block and statistics.

    whole   its rows cannot come apart, as they are changed before
    """
    if by_rows(unit, needs) and not whole:
        rows = max(1, ROWS_NUMBERS // unit.shape[1])
        return _WEIGHT_BYTES * min(unit.numbers, rows * unit.shape[1]) + 2 * unit.numbers
    hessian = unit.shape[1] ** 2 if Needs.HESSIAN in needs else 0
    return _WEIGHT_BYTES * unit.numbers + _HESSIAN_BYTES * hessian


def measuring_bytes(unit: Unit) -> int:
    """What measuring a weight takes besides its block and some inputs.

    The weight in f32, another that is rounded whole, and copies of the rows that are rounded.
    """
    return 12 * unit.numbers + _WEIGHT_BYTES * min(unit.numbers, ROWS_NUMBERS)


def by_rows(unit: Unit, needs: Needs) -> bool:
    """Whether rows of a weight are quantised apart, with the same result."""
    return not needs and unit.target.kind != "nvfp4"


def statistics_groups(work: LayerWork, needs: Needs, most: int) -> list[list[Unit]]:
    """A layer's units, in groups of which the statistics take `most` bytes."""
    return groups_within(work, most, lambda columns: statistics_bytes(needs, columns))


def groups_within(work: LayerWork, most: int, size: Callable[[int], int]) -> list[list[Unit]]:
    """A layer's units in groups: what `size` says of their inputs' widths is `most` together."""
    groups: list[list[Unit]] = []
    held: dict[ParamId, int] = {}
    for unit in work.units:
        own = size(unit.shape[1])
        if not groups or (unit.input not in held and sum(held.values()) + own > most):
            groups.append([])
            held = {}
        held[unit.input] = own
        groups[-1].append(unit)
    return groups


def _of_layer(work: LayerWork, size: Callable[[int], int]) -> int:
    return sum(map(size, {unit.input: unit.shape[1] for unit in work.units}.values()))


def _store_bytes(work: LayerWork, layouts: Layouts) -> int:
    mine = layer_layouts(layouts, work.index, tables=True)
    read = sum(store_bytes(mine).values())
    # What was quantised is read again, in the form that kernels have for it.
    numbers = {
        block: sum(_in_memory(unit) for unit in work.units if unit.input.block == block)
        for block in {unit.input.block for unit in work.units}
    }
    largest = sorted(numbers.values(), reverse=True)[:2]
    others = max((mine[block].slot_bytes for block in mine if block.layer != TRUNK), default=0)
    return max(read, 2 * sum(largest) + others)


def _in_memory(unit: Unit) -> int:
    target = unit.target
    as_floats = target.kind == "int" and target.bits > 4 and not target.symmetric
    return 4 * unit.numbers if as_floats else unit.numbers * 5 // 4


def _step_bytes(spec: ModelSpec, tokens: int) -> int:
    """Activations of one sequence in plain torch, f32, with what goes in and comes out."""
    width = _ACTIVATION_COPIES * spec.activation_width + 4 * spec.hidden_size
    scores = 4 * spec.attention_heads * tokens * tokens
    pieces = 4 * spec.piece_width * min(tokens, CHUNK_TOKENS)
    return 4 * width * tokens + 2 * min(scores, ATTENTION_WORKSPACE_BYTES) + pieces


def _checked(plan: MemoryPlan, budget: int, device: int | None) -> MemoryPlan:
    parts = f"{format_bytes(plan.work)} for a weight"
    if plan.batch:
        parts += f", {format_bytes(plan.statistics)} for statistics of its inputs"
        parts += f", {format_bytes(plan.activations)} for one sequence"
    if device is not None and plan.device_total > device:
        raise BudgetError(
            f"{format_bytes(device)} of the GPU's memory are left for tensors, and quantising this "
            f"model there takes {format_bytes(plan.device_total)} ({format_bytes(plan.copies)} for "
            f"blocks, {parts}): give so much more of --gpu-memory, or 0 for the CPU alone"
        )
    if plan.total > budget:
        if plan.copies:
            parts = f"{format_bytes(plan.staging)} for what comes from the GPU and goes there"
        parts = f"{format_bytes(plan.stores)} for blocks, {parts}"
        raise BudgetError(
            f"{format_bytes(budget)} of host memory were given, and quantising this model takes "
            f"{format_bytes(plan.total)} ({parts}): give --host-memory {plan.total} or more"
        )
    return plan

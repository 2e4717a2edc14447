"""Whether a loaded model speculates, and with which proposer."""

from collections.abc import Callable
from typing import Final

from hmt.base.trace import Tracer
from hmt.contracts.blocks import BlockKind
from hmt.contracts.model import MOST_DRAFTS
from hmt.contracts.plan import Tier
from hmt.engine.config import EngineConfig
from hmt.engine.loading.draft_journal import may_verify
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prepare import Prepared
from hmt.engine.scheduling.sequence import SequenceState
from hmt.engine.speculation.draft import Proposer
from hmt.engine.speculation.draft_opening import open_draft_model
from hmt.engine.speculation.gate import FIRST_COST
from hmt.engine.speculation.model_proposers import FirstOf
from hmt.engine.speculation.prompt_lookup import PromptLookup
from hmt.engine.speculation.speculator import Speculator

# Of a token's experts, those that the token before it did not have: 71% to 79% in the traces of
# mini-moe (benchmarks/traces).
_NEW_EXPERTS: Final = 0.75


def open_speculator(
    prepared: Prepared,
    config: EngineConfig,
    memory: Memory,
    scope: Callable[[SequenceState], str],
    tracer: Tracer,
    verifies: Callable[[int], bool],
) -> Speculator:
    """What drafts for a model, if anything does.

    scope      who may learn from whose tokens
    verifies   whether steps of so many sequences take draft tokens
    """
    if not _can_verify(prepared, config):
        return Speculator(None, scope)
    has_state = bool(prepared.model.spec.state_bytes)
    # A fork costs no more than the copy of a page there: elsewhere rings and states are copied as
    # well, pages move to make room, and captured steps have one segment of each request.
    allocator = memory.kv.allocator
    branches = allocator.keeps_all_positions and not allocator.pool.pages_move
    branches = branches and memory.on_device is None
    proposer: Proposer = PromptLookup()
    notes: tuple[str, ...] = ()
    if memory.draft is not None:
        own, notes = open_draft_model(memory.draft, prepared, memory, tracer, branches=branches)
        if memory.on_device is not None and not verifies(1):
            notes += ("nothing is drafted: a GPU verifies draft tokens in captured steps only",)
        proposer = FirstOf(proposer, own)
    most = prepared.demand.draft_tokens if has_state else MOST_DRAFTS
    first_cost = max(FIRST_COST, _cost_of_experts(prepared))
    speculator = Speculator(
        proposer, scope, most, verifies, branches=branches, first_cost=first_cost
    )
    speculator.notes = notes
    return speculator


def _cost_of_experts(prepared: Prepared) -> float:
    """Share of a step's time that it takes to read the experts of one token more."""
    machine, spec = prepared.machine, prepared.model.spec
    rates = {Tier.DISK: machine.disk_read_rate, Tier.HOST: machine.cpu.read_rate}
    seconds = {True: 0.0, False: 0.0}  # whether they are experts: of all of them
    count = 0
    for block, home in prepared.plan.homes.items():
        is_expert = block.kind is BlockKind.EXPERT
        count += is_expert
        if rate := rates.get(home, 0.0):
            seconds[is_expert] += prepared.layouts[block].read_bytes / rate
    if not seconds[True]:
        return 0.0
    layers = len({block.layer for block in prepared.plan.homes if block.kind is BlockKind.EXPERT})
    token = seconds[True] * spec.experts_per_token * layers / count
    return _NEW_EXPERTS * token / (token + seconds[False])


def _can_verify(prepared: Prepared, config: EngineConfig) -> bool:
    """Whether steps can verify draft tokens without changing an answer, and gain by it."""
    demand = prepared.demand
    if demand.spec.state_bytes and not demand.draft_tokens:  # it has no journal to go back by
        return False
    return may_verify(demand.spec, config)

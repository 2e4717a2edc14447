"""Whether a loaded model speculates, and with which proposer."""

from collections.abc import Callable

from hmt.base.trace import Tracer
from hmt.contracts.model import MOST_DRAFTS
from hmt.engine.config import EngineConfig
from hmt.engine.loading.draft_journal import may_verify
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prepared import Prepared
from hmt.engine.scheduling.sequence import SequenceState
from hmt.engine.speculation.draft import Proposer
from hmt.engine.speculation.draft_opening import open_draft_model
from hmt.engine.speculation.gate import FIRST_COST
from hmt.engine.speculation.model_proposers import FirstOf
from hmt.engine.speculation.prompt_lookup import PromptLookup
from hmt.engine.speculation.speculator import Speculator
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.workload import workload_of


def open_speculator(
    prepared: Prepared,
    config: EngineConfig,
    memory: Memory,
    scope: Callable[[SequenceState], str],
    tracer: Tracer,
    verifies: Callable[[int], bool],
    kv_of: Callable[[int], int],
) -> Speculator:
    """What drafts for a model, if anything does.

    scope      who may learn from whose tokens
    verifies   whether steps of so many sequences take draft tokens
    kv_of      the handle in the KV cache that a running request's sequence has
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
        own, notes = open_draft_model(
            memory.draft, prepared, memory, tracer, kv_of, branches=branches
        )
        if memory.on_device is not None and not verifies(1):
            notes += ("nothing is drafted: a GPU verifies draft tokens in captured steps only",)
        proposer = FirstOf(proposer, own)
    most = prepared.demand.draft_tokens if has_state else MOST_DRAFTS
    costs = CostModel(workload_of(prepared.demand, prepared.plan), prepared.machine)
    first_cost = max(FIRST_COST, costs.token_share(0))
    speculator = Speculator(
        proposer, scope, most, verifies, branches=branches, first_cost=first_cost
    )
    speculator.notes = notes
    return speculator


def _can_verify(prepared: Prepared, config: EngineConfig) -> bool:
    """Whether steps can verify draft tokens without changing an answer, and gain by it."""
    demand = prepared.demand
    if demand.spec.state_bytes and not demand.draft_tokens:  # it has no journal to go back by
        return False
    return may_verify(demand.spec, config)

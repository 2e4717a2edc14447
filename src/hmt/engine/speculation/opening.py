"""Whether a loaded model speculates, and with which proposer."""

from collections.abc import Callable

from hmt.base.trace import Tracer
from hmt.contracts.model import MOST_DRAFTS
from hmt.engine.config import EngineConfig
from hmt.engine.loading.draft_journal import may_verify
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prepare import Prepared
from hmt.engine.model_runner import ModelRunner
from hmt.engine.scheduling.sequence import SequenceState
from hmt.engine.speculation.draft import Proposer
from hmt.engine.speculation.draft_model import DraftModel
from hmt.engine.speculation.model_proposers import DraftModelProposer, FirstOf, NextTokenProposer
from hmt.engine.speculation.prompt_lookup import PromptLookup
from hmt.engine.speculation.speculator import Speculator
from hmt.models.drafter import Drafter


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
    proposer: Proposer = PromptLookup()
    if (draft := memory.draft) is not None:
        runner = ModelRunner(draft.prepared, draft.config, draft.memory, tracer)
        chunk = draft.prepared.plan.max_prefill_tokens
        model = DraftModel(runner, draft.memory.kv.allocator, chunk)
        if isinstance(draft.prepared.model, Drafter):
            draft.prepared.model.borrow(memory.weights)
        own: Proposer = DraftModelProposer(model, prepared.model.spec.vocab_size)
        if draft.inputs is not None:
            own = NextTokenProposer(model, prepared.model.spec.vocab_size, draft.inputs)
        proposer = FirstOf(proposer, own)
    has_state = bool(prepared.model.spec.state_bytes)
    most = prepared.demand.draft_tokens if has_state else MOST_DRAFTS
    return Speculator(proposer, scope, most, verifies)


def _can_verify(prepared: Prepared, config: EngineConfig) -> bool:
    """Whether steps can verify draft tokens without changing an answer, and gain by it."""
    demand = prepared.demand
    if demand.spec.state_bytes and not demand.draft_tokens:  # it has no journal to go back by
        return False
    return may_verify(demand.spec, config)

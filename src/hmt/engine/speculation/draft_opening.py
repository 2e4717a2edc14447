"""A loaded draft model as a proposer: with its own runner, and with what it borrows."""

from collections.abc import Callable

from hmt.base.errors import ConfigError
from hmt.base.trace import Tracer
from hmt.contracts.blocks import BlockKind
from hmt.engine.execution.warmup import is_slow_at_first, prompts_to_warm
from hmt.engine.loading.draft import has_head_on_device
from hmt.engine.loading.memory import LoadedDraft, Memory
from hmt.engine.loading.prepared import Prepared
from hmt.engine.model_runner import ModelRunner
from hmt.engine.speculation.assistant import Assistant, AssistantProposer
from hmt.engine.speculation.block_proposer import BlockProposer
from hmt.engine.speculation.draft import Proposer
from hmt.engine.speculation.draft_model import DraftModel
from hmt.engine.speculation.model_proposers import DraftModelProposer, NextTokenProposer
from hmt.kvcache import PagedKV
from hmt.models.drafter import Drafter
from hmt.models.gemma4_assistant import Gemma4Assistant


def open_draft_model(
    draft: LoadedDraft,
    prepared: Prepared,
    memory: Memory,
    tracer: Tracer,
    kv_of: Callable[[int], int],
    *,
    branches: bool,
) -> tuple[Proposer, tuple[str, ...]]:
    """A draft model of the one that was `prepared` and has `memory`, and notes on how it runs.

    kv_of      handles of requests' sequences in the KV cache of `memory`
    branches   whether steps may verify alternatives

    Raises ConfigError where steps cannot hold what it drafts at once.
    """
    _borrow(draft, prepared, memory)
    runner = ModelRunner(draft.prepared, draft.config, draft.memory, tracer)
    plan, allocator = draft.prepared.plan, draft.memory.kv.allocator
    there = draft.memory.on_device
    model = DraftModel(runner, allocator, plan.max_prefill_tokens, captured=there is not None)
    block = None if draft.inputs is None else draft.inputs.block
    if block is not None and block.tokens > plan.max_prefill_tokens:
        raise ConfigError(
            f"max_prefill_tokens={plan.max_prefill_tokens}, but {draft.prepared.source.path} "
            f"drafts blocks of {block.tokens} tokens: raise it to that at least"
        )
    if there is not None and block is None and is_slow_at_first(there.device.where):
        prompts = prompts_to_warm(plan, allocator.capacity_tokens)
        model.warm_up(prompts, _widths(draft, prepared))
    notes = [f"draft model: {note}" for note in runner.notes]
    if draft.remark:
        notes.insert(0, draft.remark)
    vocab = prepared.model.spec.vocab_size
    if draft.inputs is not None and draft.inputs.shares_kv:
        assistant = Assistant(runner, kv_of)
        return AssistantProposer(assistant, vocab, draft.inputs, branches=branches), tuple(notes)
    if draft.inputs is None:
        return DraftModelProposer(model, vocab, branches=branches), tuple(notes)
    kind = NextTokenProposer if block is None else BlockProposer
    return kind(model, vocab, draft.inputs, branches=branches), tuple(notes)


def _borrow(draft: LoadedDraft, prepared: Prepared, memory: Memory) -> None:
    """Let it use what it borrows where the model that verifies has it."""
    if isinstance(draft.prepared.model, Gemma4Assistant):
        if not isinstance(memory.kv, PagedKV):
            raise ConfigError(
                f"{draft.prepared.source.path} attends to the KV cache of the model that verifies, "
                "whose pages are at several levels here: leave it out, or keep all pages in memory"
            )
        draft.prepared.model.lend_kv(memory.kv)
    model, there, own = draft.prepared.model, memory.on_device, draft.memory.on_device
    if not isinstance(model, Drafter):
        return
    if there is None or not has_head_on_device(prepared.plan):
        model.borrow(memory.weights)
        return
    model.borrow(there.weights, there.device.where)
    if own is not None and BlockKind.EMBEDDING in model.borrows:
        own.weights.find_tokens_of(there.weights)


def _widths(draft: LoadedDraft, prepared: Prepared) -> tuple[int, ...]:
    """Of hidden states that come in beside its tokens: the verifier's, and its own."""
    if draft.inputs is None:
        return ()
    count = max(1, len(draft.inputs.layers))
    return count * prepared.model.spec.hidden_size, draft.prepared.model.spec.hidden_size

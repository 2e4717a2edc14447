"""How many drafts recurrent state can go back by: the journal that the plan has room for."""

from dataclasses import replace
from typing import Final

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes
from hmt.contracts.model import ModelSpec
from hmt.engine.config import EngineConfig
from hmt.kernels.cpu import extension

_DRAFTS: Final = 8  # of a sequence, in a step
_FEWEST: Final = 2  # with fewer a step with drafts seldom gains anything
_SHARE: Final = 64  # of the host memory, a journal may have one of so many parts


def journaled_drafts(
    spec: ModelSpec, config: EngineConfig, spare_states: int
) -> tuple[int, ModelSpec]:
    """Drafts that a journal has room for, of each sequence; 0: states cannot go back.

    spare_states   recurrent states besides those of `max_batch` sequences

    Returns `spec` as well, with a remark where too little memory is the reason that there is no
    journal.  Raises ConfigError where `draft_tokens` asks for what the model cannot do.
    """
    if not spec.state_bytes:
        return config.draft_tokens or 0, spec
    if config.draft_tokens is not None:
        if config.draft_tokens and not spec.state_inputs:
            raise ConfigError(
                f"draft_tokens={config.draft_tokens}, but layers of {spec.architecture} have "
                "recurrent state that cannot go back by a token: leave it at 0"
            )
        return config.draft_tokens, spec
    if not spec.state_inputs or not may_verify(spec, config):
        return 0, spec
    each = spec.journal_bytes(range(spec.layers), 1) * (config.max_batch + spare_states)
    drafts = min(_DRAFTS, config.host_memory_bytes // _SHARE // each)
    return (drafts, spec) if drafts >= _FEWEST else (0, without_journal(spec, _FEWEST * each))


def without_journal(spec: ModelSpec, nbytes: int) -> ModelSpec:
    """`spec` with the remark that there is no journal, which takes `nbytes` bytes at least."""
    remark = (
        f"drafts no tokens: to take them back, recurrent state needs {format_bytes(nbytes)} more "
        "host memory (fewer with a smaller --max-batch)"
    )
    return replace(spec, remarks=(*spec.remarks, remark))


def may_verify(spec: ModelSpec, config: EngineConfig) -> bool:
    """Whether steps verify drafts, as far as options and the model say."""
    if config.speculate == "off" or not spec.exact_runs or extension.load() is None:
        return False
    # A trace is of the experts that answers need, and not drafts; what a token selects of its
    # pages depends on when it is decoded.
    if config.expert_trace is not None or config.kv_policy != "exact":
        return False
    # Recurrent state that goes back is not captured, and slow on a GPU; nor is what reads n-grams.
    return not (config.on_gpu and (spec.state_bytes or spec.token_window))

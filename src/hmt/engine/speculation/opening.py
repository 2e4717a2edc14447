"""Whether a loaded model speculates, and with which proposer."""

from collections.abc import Callable

from hmt.engine.config import EngineConfig
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prepare import Prepared
from hmt.engine.scheduling.sequence import SequenceState
from hmt.engine.speculation.prompt_lookup import PromptLookup
from hmt.engine.speculation.speculator import Speculator
from hmt.kernels.cpu import extension


def open_speculator(
    prepared: Prepared,
    config: EngineConfig,
    memory: Memory,
    scope: Callable[[SequenceState], str],
) -> Speculator:
    """What guesses for a model, if anything does.  `scope`: who may learn from whose tokens."""
    return Speculator(PromptLookup() if _speculates(prepared, config, memory) else None, scope)


def _speculates(prepared: Prepared, config: EngineConfig, memory: Memory) -> bool:
    """Whether steps can verify guesses without changing an answer, and can be faster with them."""
    spec = prepared.model.spec
    if config.speculate == "off" or not spec.exact_runs or extension.load() is None:
        return False
    if spec.state_bytes and not config.draft_tokens:  # it has no journal to go back by
        return False
    # Steps of several tokens are not captured, and take a GPU longer than the tokens one by one;
    # what a token selects of its pages depends on when it is decoded.
    return memory.on_device is None and config.kv_policy == "exact"

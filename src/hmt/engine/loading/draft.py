"""Loading's part for speculation: the small draft model, in a share of the budget."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from hmt.base.errors import BudgetError, ConfigError
from hmt.contracts.blocks import BlockKind
from hmt.engine.config import EngineConfig
from hmt.engine.loading.demand import dtype_for
from hmt.engine.loading.drafter import drafter_kind, prepare_drafter
from hmt.engine.loading.prepare import (
    DraftInputs,
    Prepared,
    PreparedDraft,
    prepare,
    prepare_model,
)
from hmt.engine.loading.source import open_source
from hmt.formats import located
from hmt.models import open_predictor
from hmt.text import Tokenizer
from hmt.weights import named

# Captured steps do not show hidden states, and others have other bits there.
_ON_CPU: Final = (
    "what drafts from hidden states does so for models on CPUs only: leave --speculate out, choose "
    "a smaller model with draft=PATH, or run without a GPU"
)
_SHARE: Final = 4  # of the budget, a draft model may have one of so many parts
_KEPT: Final = (
    "host_memory_bytes", "quantization", "dtype", "activations", "executor", "context",
    "max_prefill_tokens", "max_batch", "threads", "numa", "disk_reader", "disk_depth",
    "disk_chunk_bytes", "verify_reads", "check_weights", "spill_dir", "expert_cache_policy",
)  # fmt: skip


def prepare_draft(
    path: Path, config: EngineConfig, host_bytes: int, *, on_device: bool
) -> PreparedDraft | None:
    """The draft model of the one in `path`; None: none was asked for.

    host_bytes   that are left for both
    on_device    whether layers of the other one may be on a device

    Raises ConfigError where there is none or it does not suit, else as `prepare`.
    """
    kept = {name: getattr(config, name) for name in _KEPT}
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    own = replace(config, **{**defaults, **kept, "speculate": "off"})
    way, _, folder = config.speculate.partition("=")
    try:
        if way == "mtp":
            if on_device:
                raise ConfigError(_ON_CPU)
            predictor = _prepare_predictor(path, own, host_bytes // _SHARE)
            return PreparedDraft(predictor, own, DraftInputs("mtp"))
        if way == "draft":
            source = open_source(located(folder))
            if (kind := drafter_kind(source.checkpoint)) is not None:
                if on_device:
                    raise ConfigError(_ON_CPU)
                return prepare_drafter(kind, path, source, own, host_bytes // _SHARE)
            return PreparedDraft(_prepare_model(path, folder, own, host_bytes // _SHARE), own)
    except BudgetError as error:
        raise BudgetError(
            f"a draft model (speculate={config.speculate}) may have 1/{_SHARE} of the "
            f"budget: {error}"
        ) from error
    return None


def _prepare_predictor(path: Path, config: EngineConfig, host_bytes: int) -> Prepared:
    source = open_source(path)
    dtype = dtype_for(config, source, on_gpu=False)
    borrows = (BlockKind.EMBEDDING, BlockKind.HEAD)
    model = open_predictor(source.config, source.path, dtype, borrows)
    if source.pack is not None:
        raise ConfigError(
            f"speculate=mtp, but {path} is a pack, which holds the layers that answers need and no "
            "multi-token prediction layer: load the checkpoint that it was made of, or leave it out"
        )
    if model is None:
        raise ConfigError(
            f"speculate=mtp, but {path} has no multi-token prediction layers that HMT runs "
            "(DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5; GGUF files where they were converted "
            "with them): leave it out"
        )
    # Names are found by that of the embedding, which a model that borrows it does not have.
    whole = open_predictor(source.config, source.path, dtype)
    assert whole is not None
    source = replace(source, checkpoint=named(whole.spec, source.checkpoint).checkpoint)
    return prepare_model(source, model, config, host_bytes)


def _prepare_model(path: Path, folder: str, config: EngineConfig, host_bytes: int) -> Prepared:
    draft = prepare(located(folder), config, host_bytes)
    if draft.model.spec.state_bytes:
        raise ConfigError(
            f"speculate=draft={folder}, but layers of {draft.model.spec.architecture} have "
            "recurrent state, which does not go back by a token: choose a model with attention only"
        )
    own, other = open_source(path).tokenizer(), draft.source.tokenizer()
    if not _alike(own, other):
        raise ConfigError(
            f"speculate=draft={folder}, but its tokens are not those of {path}: choose a smaller "
            "model of the same family"
        )
    return draft


def _alike(own: Tokenizer, other: Tokenizer) -> bool:
    """Whether both give the same numbers to the same tokens.

    Sizes may differ by what is only padded.
    """
    count = min(own.vocab_size, other.vocab_size)
    sampled = range(0, count, max(1, count // 2000))
    return all(own.token_bytes(n) == other.token_bytes(n) for n in sampled)

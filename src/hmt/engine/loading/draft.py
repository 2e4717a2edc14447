"""Loading's part for speculation: the small draft model, in a share of the budgets."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final, NamedTuple

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockKind
from hmt.contracts.model import Model
from hmt.contracts.plan import Plan, Tier
from hmt.engine.config import EngineConfig
from hmt.engine.loading.demand import dtype_for, is_gpu
from hmt.engine.loading.drafter import drafter_kind, open_drafter
from hmt.engine.loading.prepare import open_parts, prepare, prepare_model
from hmt.engine.loading.prepared import DraftInputs, Prepared, PreparedDraft
from hmt.engine.loading.source import Source, open_source
from hmt.formats import located
from hmt.memory.device import Device
from hmt.models import open_predictor
from hmt.models.drafter import Drafter
from hmt.text import Tokenizer
from hmt.weights import named

_SHARE: Final = 4  # of each budget, a draft model may have one of so many parts
_KEPT: Final = (
    "host_memory_bytes", "quantization", "dtype", "activations", "executor", "context",
    "max_prefill_tokens", "max_batch", "threads", "numa", "disk_reader", "disk_depth",
    "disk_chunk_bytes", "verify_reads", "check_weights", "spill_dir", "expert_cache_policy",
)  # fmt: skip
# What a device need not hold for a model to compute there in captured steps.
_OUTSIDE: Final = (BlockKind.EMBEDDING, BlockKind.VISION)


class _Opened(NamedTuple):
    """A draft model that was not planned for; `inputs` as in PreparedDraft."""

    source: Source
    model: Model
    inputs: DraftInputs | None = None


def prepare_both(
    path: Path,
    config: EngineConfig,
    host_bytes: int,
    devices: Sequence[Device],
    device_bytes: Sequence[int],
) -> tuple[Prepared, PreparedDraft | None]:
    """The model in `path`, and the one that drafts for it; None: none was asked for.

    host_bytes, device_bytes   that are left for both

    The draft model computes on the device where its share holds all of it, and the other model's
    output layer is there if it uses that.  Raises ConfigError where there is none or it does not
    suit, else as `prepare`.
    """
    device, room = next(iter(devices), None), sum(device_bytes)
    if device is not None and room and config.speculate.startswith(("mtp", "draft")):
        _check_verifies(path, config)
    opened, own = _open(path, config, on_gpu=is_gpu(devices)), _options(config)

    def verifying(draft: PreparedDraft | None) -> Prepared:
        if draft is None:
            return prepare(path, config, host_bytes, devices, device_bytes)
        left = [nbytes - draft.device_bytes for nbytes in device_bytes]  # of the one there is
        return prepare(path, config, host_bytes - draft.host_bytes, devices, left)

    if opened is None:
        return verifying(None), None
    remark = ""
    if device is not None and room:
        _check_kv(config, opened)
        share = room // _SHARE
        there = _placed(opened, own, host_bytes, device, share)
        if there is None:
            why = f"1/{_SHARE} of the GPU budget, {format_bytes(share)}, does not hold all of it"
        else:
            try:
                whole = verifying(there)
                why = _obstacle(whole, there)
                if not why and not _is_all_there(whole) and _is_all_there(verifying(None)):
                    why = "the model that verifies is all on the GPU without it only"
                if not why:
                    return whole, there
            except BudgetError:
                why = "the model that verifies would not fit beside it"
        remark = f"the draft model computes on the CPU: {why}"
        if not isinstance(opened.model, Drafter):  # which shares its dtype with the other model
            opened = _open(path, config, on_gpu=False) or opened
    try:
        prepared = prepare_model(opened.source, opened.model, own, host_bytes // _SHARE)
    except BudgetError as error:
        raise BudgetError(
            f"a draft model (speculate={config.speculate}) may have 1/{_SHARE} of the "
            f"budget: {error}"
        ) from error
    draft = PreparedDraft(prepared, own, opened.inputs, remark)
    return verifying(draft), draft


def _options(config: EngineConfig) -> EngineConfig:
    """Of the draft model."""
    kept = {name: getattr(config, name) for name in _KEPT}
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    return replace(config, **{**defaults, **kept, "speculate": "off"})


def _placed(
    opened: _Opened, config: EngineConfig, host_bytes: int, device: Device, share: int
) -> PreparedDraft | None:
    """A draft model with all of it on the device, in a `share` of that; None: it does not fit."""
    source, model, inputs = opened
    try:
        prepared = prepare_model(source, model, config, host_bytes // _SHARE, [device], [share])
    except BudgetError:
        return None
    return PreparedDraft(prepared, config, inputs) if _is_all_there(prepared) else None


def _is_all_there(prepared: Prepared) -> bool:
    """Whether a device has all that it can compute a model with."""
    plan = prepared.plan
    homes = {home for block, home in plan.homes.items() if block.kind not in _OUTSIDE}
    stages = set(range(prepared.model.spec.layers + 1))
    return homes == {Tier.DEVICE} and plan.device.stages >= stages


def _check_verifies(path: Path, config: EngineConfig) -> None:
    """Raise ConfigError where steps on a GPU cannot verify draft tokens: see `may_verify`."""
    spec = open_parts(path, config, on_gpu=False)[1].spec
    what = "recurrent state" if spec.state_bytes else "n-grams" if spec.token_window else ""
    if what:
        raise ConfigError(
            f"speculate={config.speculate}, but layers of {spec.architecture} have {what}, and "
            "steps of these verify no draft tokens on a GPU: leave it out, or run without a GPU"
        )


def _check_kv(config: EngineConfig, opened: _Opened) -> None:
    """Raise ConfigError for a draft model that cannot compute beside a KV cache on a GPU."""
    if opened.inputs is not None and opened.inputs.shares_kv:
        raise ConfigError(
            f"speculate={config.speculate} attends to the KV cache of the model that verifies, "
            "which HMT lets it do in host memory only: leave it out, or run without a GPU"
        )


def _obstacle(prepared: Prepared, draft: PreparedDraft) -> str:
    """Why a draft model on the device is of no use to the one that verifies, for people; or ""."""
    model = draft.prepared.model
    borrows = isinstance(model, Drafter) and BlockKind.HEAD in model.borrows
    if borrows and not has_head_on_device(prepared.plan):
        return "the output layer that it uses is not on the GPU"
    # Draft tokens are verified in captured steps.
    if not prepared.plan.device.stages >= set(range(prepared.model.spec.layers)):
        return "beside it, attention of some layers would not be on the GPU"
    return ""


def has_head_on_device(plan: Plan) -> bool:
    """Whether a device has all of a model's output layer."""
    return all(home is Tier.DEVICE for b, home in plan.homes.items() if b.kind is BlockKind.HEAD)


def _open(path: Path, config: EngineConfig, *, on_gpu: bool) -> _Opened | None:
    """The draft model that `config` asks for; None: it asks for none."""
    way, _, folder = config.speculate.partition("=")
    if way == "mtp":
        return _open_predictor(path, config, on_gpu=on_gpu)
    if way != "draft":
        return None
    source = open_source(located(folder))
    if (kind := drafter_kind(source.checkpoint)) is not None:
        return _Opened(*open_drafter(kind, path, source, _options(config), on_gpu=on_gpu))
    return _open_model(path, folder, config, on_gpu=on_gpu)


def _open_predictor(path: Path, config: EngineConfig, *, on_gpu: bool) -> _Opened:
    source = open_source(path)
    dtype = dtype_for(config, source, on_gpu=on_gpu)
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
    return _Opened(source, model, DraftInputs("mtp"))


def _open_model(path: Path, folder: str, config: EngineConfig, *, on_gpu: bool) -> _Opened:
    source, model = open_parts(located(folder), _options(config), on_gpu=on_gpu)
    if model.spec.state_bytes:
        raise ConfigError(
            f"speculate=draft={folder}, but layers of {model.spec.architecture} have "
            "recurrent state, which does not go back by a token: choose a model with attention only"
        )
    own, other = open_source(path).tokenizer(), source.tokenizer()
    if not _alike(own, other):
        raise ConfigError(
            f"speculate=draft={folder}, but its tokens are not those of {path}: choose a smaller "
            "model of the same family"
        )
    return _Opened(source, model)


def _alike(own: Tokenizer, other: Tokenizer) -> bool:
    """Whether both give the same numbers to the same tokens.

    Sizes may differ by what is only padded.
    """
    count = min(own.vocab_size, other.vocab_size)
    sampled = range(0, count, max(1, count // 2000))
    return all(own.token_bytes(n) == other.token_bytes(n) for n in sampled)

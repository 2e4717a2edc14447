"""Loading's part for drafters that were trained for one model: EAGLE-3 and others.

They compute from hidden states of the model that verifies, may have an output layer of fewer
tokens, and use the verifier's embedding where they have none.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from hmt.base.errors import CheckpointError, ConfigError, DiskReadError, os_reason
from hmt.contracts.blocks import BlockKind
from hmt.contracts.checkpoint import Checkpoint, Form, TensorRecord
from hmt.contracts.model import ModelSpec
from hmt.engine.config import EngineConfig
from hmt.engine.loading.demand import dtype_for
from hmt.engine.loading.prepared import DraftInputs
from hmt.engine.loading.source import Source, open_source
from hmt.models import (
    ASSISTANTS,
    DFLASH_ARCHITECTURES,
    EAGLE3_ARCHITECTURES,
    TOKEN_ORDER,
    VERIFIER_HEAD,
    VERIFIER_TABLE,
    open_dflash,
    open_eagle3,
    open_gemma4_assistant,
    open_model,
)
from hmt.models.decoder import Decoder
from hmt.models.dflash import DFlash
from hmt.models.eagle3 import Eagle3
from hmt.models.gemma4_assistant import Gemma4Assistant
from hmt.weights import named

_KINDS: Final[dict[str, Callable[..., Eagle3 | DFlash | Gemma4Assistant]]] = {
    "eagle3": open_eagle3,
    "dflash": open_dflash,
    "assistant": open_gemma4_assistant,
}
_TOKENS: Final = "d2t"  # how far each of the drafter's tokens is from the verifier's
_INTEGERS: Final = {"I64": torch.int64, "I32": torch.int32}


def drafter_kind(checkpoint: Checkpoint) -> str | None:
    """What kind of drafter a checkpoint holds, as `speculators` calls it; None: an ordinary model.

    Names of tensors tell as well: some EAGLE-3 checkpoints call themselves LlamaForCausalLM.
    """
    kind = checkpoint.config.get("speculators_model_type")
    if isinstance(kind, str):
        return kind
    if checkpoint.config.get("model_type") in ASSISTANTS:
        return "assistant"
    names = checkpoint.config.get("architectures")
    names = names if isinstance(names, list) else []
    if any(name in DFLASH_ARCHITECTURES for name in names):
        return "dflash"
    said = any(name in EAGLE3_ARCHITECTURES for name in names)
    return "eagle3" if said or "midlayer.hidden_norm.weight" in checkpoint.records else None


def open_drafter(
    kind: str, path: Path, source: Source, config: EngineConfig, *, on_gpu: bool
) -> tuple[Source, Eagle3 | DFlash | Gemma4Assistant, DraftInputs]:
    """The drafter in `source` for the model in `path`, with what it finds of that one's tensors.

    It computes with the bytes of that model's embedding and output layer where it has none.

    on_gpu   whether that model computes on a GPU

    Raises ConfigError where it is none that HMT runs or drafts for another model, else as
    `prepare`.
    """
    folder = source.path
    if kind not in _KINDS:
        raise ConfigError(
            f"speculate=draft={folder} is a drafter of kind {kind!r:.60}; HMT runs "
            f"{' and '.join(_KINDS)}, and ordinary models with the same tokenizer"
        )
    verifier = open_source(path)
    dtype = dtype_for(config, verifier, on_gpu=on_gpu)
    verifying = open_model(verifier.config, path, dtype)
    spec = verifying.spec
    _check_architecture(source, verifier)
    if kind == "assistant":
        _check_gemma(folder, spec)
    borrows = _missing(source.checkpoint) if isinstance(verifying, Decoder) else ()
    # In the verifier's dtype, since it may compute with that one's weights.
    model = _KINDS[kind](source.config, folder, dtype, spec, borrows)
    block = model.block if isinstance(model, DFlash) else None
    if isinstance(model, Gemma4Assistant) and model.clusters:
        model.set_order(_order(source.checkpoint, spec.vocab_size))
    joined = replace(source, checkpoint=_with_verifier(source.checkpoint, verifier, spec))
    tokens = _verifier_tokens(source.checkpoint, model.spec.vocab_size, spec.vocab_size)
    return joined, model, DraftInputs(kind, model.layers, tokens, block, kind == "assistant")


def _check_gemma(folder: Path, verifier: ModelSpec) -> None:
    """Raise ConfigError where an assistant drafts for another family."""
    if verifier.architecture != "Gemma4ForCausalLM":
        raise ConfigError(
            f"{folder} is an assistant of Gemma 4, and this model a {verifier.architecture}: "
            "choose a drafter that was trained for it"
        )


def _order(checkpoint: Checkpoint, vocab: int) -> torch.Tensor:
    """The tokens of an assistant's clusters.  Raises CheckpointError where any is missing."""
    record = checkpoint.records.get(TOKEN_ORDER)
    if record is None or record.dtype not in _INTEGERS or record.shape != (vocab,):
        said = "is missing" if record is None else f"is {record.dtype} {list(record.shape)}"
        raise CheckpointError(
            f"{TOKEN_ORDER} of {checkpoint.path} {said}; it must be whole numbers, one for each of "
            f"the {vocab} tokens"
        )
    order = _read(record)
    if not torch.equal(order.sort().values, torch.arange(vocab)):
        raise CheckpointError(
            f"{TOKEN_ORDER} of {checkpoint.path} does not name each of the {vocab} tokens once: "
            "download it again"
        )
    return order


def _check_architecture(source: Source, verifier: Source) -> None:
    """Raise ConfigError where a drafter names another architecture than the verifier has.

    GGUF files name that of a text model, whatever it was published as.
    """
    said = source.config.get("speculators_config")
    asked = said.get("verifier") if isinstance(said, dict) else None
    if not isinstance(asked, dict) or not isinstance(names := asked.get("architectures"), list):
        return
    own = verifier.config.get("architectures")
    if names and verifier.checkpoint.vocabulary is None and not set(own or ()) & set(names):
        raise ConfigError(
            f"{source.path} drafts for {asked.get('name_or_path')!r:.100}, a model of type "
            f"{', '.join(map(str, names)):.100}; {verifier.path} is of type "
            f"{', '.join(own or ('unknown',))}: choose a drafter that was trained for it"
        )


def _missing(checkpoint: Checkpoint) -> list[BlockKind]:
    """What of the verifier's a drafter computes with, since it has none of its own."""
    names = {BlockKind.EMBEDDING: "embed_tokens.weight", BlockKind.HEAD: "lm_head.weight"}
    there = {name.removeprefix("model.") for name in checkpoint.records}
    return [kind for kind, name in names.items() if name not in there]


def _with_verifier(checkpoint: Checkpoint, verifier: Source, spec: ModelSpec) -> Checkpoint:
    """A drafter's checkpoint with the verifier's embedding and output layer, by names of theirs."""
    theirs = named(spec, verifier.checkpoint).checkpoint
    there: dict[str, Form] = {**theirs.records, **theirs.forms}
    found: dict[str, Form] = {}
    for block in spec.blocks:
        name = {BlockKind.EMBEDDING: VERIFIER_TABLE, BlockKind.HEAD: VERIFIER_HEAD}.get(
            block.id.kind
        )
        weight = next((param for param in block.params if param.name == "weight"), None)
        if name is None or weight is None or block.id.index:
            continue
        form = next((there[source] for source in weight.sources if source in there), None)
        if form is not None:
            found[name] = form
    return replace(checkpoint, forms={**found, **checkpoint.forms})


def _verifier_tokens(checkpoint: Checkpoint, own: int, theirs: int) -> torch.Tensor | None:
    """See DraftInputs.tokens.  Raises CheckpointError where a token would be none of `theirs`."""
    record = checkpoint.records.get(_TOKENS)
    if record is None:
        if own != theirs:
            raise CheckpointError(
                f"{checkpoint.path} drafts {own} of {theirs} tokens and has no tensor {_TOKENS} "
                "that says which: download it again"
            )
        return None
    if record.dtype not in _INTEGERS or record.shape != (own,):
        raise CheckpointError(
            f"{_TOKENS} of {checkpoint.path} is {record.dtype} {list(record.shape)}; it must be "
            f"whole numbers, one for each of the {own} tokens of the drafter"
        )
    tokens = torch.arange(own) + _read(record)
    if int(tokens.min()) < 0 or int(tokens.max()) >= theirs:
        raise CheckpointError(
            f"{_TOKENS} of {checkpoint.path} names tokens from {int(tokens.min())} to "
            f"{int(tokens.max())}; the model that verifies has {theirs}"
        )
    return tokens


def _read(record: TensorRecord) -> torch.Tensor:
    """A tensor of whole numbers: int64, of the record's shape.  Raises DiskReadError."""
    try:
        with record.file.open("rb") as file:
            file.seek(record.offset)
            data = bytearray(file.read(record.nbytes))
    except OSError as error:
        raise DiskReadError(
            f"{record.file} cannot be read ({os_reason(error)}): check its permissions and the disk"
        ) from error
    return torch.frombuffer(data, dtype=_INTEGERS[record.dtype]).view(record.shape).long()

"""What checkpoints of drafters say, and how they call their tensors.

In the format of the `speculators` library, and as their authors publish them.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.model import ModelSpec

# Names under which a drafter finds what its checkpoint lacks: the embedding and the output layer
# of the model that it drafts for.
VERIFIER_TABLE: Final = "verifier.embed_tokens.weight"
VERIFIER_HEAD: Final = "verifier.lm_head.weight"


def layers_config(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """What a drafter's config.json says of its layers.  Raises CheckpointError."""
    if "speculators_model_type" not in config:
        return config
    found = config.get("transformer_layer_config")
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}/config.json has no transformer_layer_config")
    return {"model_type": "qwen3", **found}  # what the library takes where it is not said


def drafting_config(
    config: Mapping[str, Any], layers: Mapping[str, Any], architecture: str, verifier: ModelSpec
) -> dict[str, Any]:
    """A config.json of a model whose output layer has the drafter's vocabulary.

    Drafters are trained on short sequences and see positions relative to each other: they may be
    asked about as many as the verifier knows.
    """
    most = layers.get("max_position_embeddings", 0)
    most = max(most, verifier.max_context) if isinstance(most, int) else most
    return {
        **layers,
        "architectures": [architecture],
        "vocab_size": config.get("draft_vocab_size") or verifier.vocab_size,
        "max_position_embeddings": most,
        "tie_word_embeddings": False,
    }


def check_verifier(path: Path, verifier: ModelSpec, sizes: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the drafter in `path` was trained for a model of these sizes."""
    there = {"hidden_size": verifier.hidden_size, "vocab_size": verifier.vocab_size}
    wrong = [name for name, value in sizes.items() if value != there[name]]
    if wrong:
        raise ConfigError(
            f"{path} drafts for a model with "
            + " and ".join(f"{name} {sizes[name]!r:.40}" for name in wrong)
            + f", and this one, {verifier.architecture}, has "
            + " and ".join(str(there[name]) for name in wrong)
            + ": choose a drafter that was trained for it"
        )


def hidden_layers(path: Path, verifier: ModelSpec, asked: object) -> tuple[int, ...]:
    """How many layers come before each hidden state that a drafter in `path` asks for, ascending.

    Without `asked` those of the paper: low, middle, high.  Raises ConfigError.
    """
    count = verifier.layers
    layers = [2, count // 2, count - 3] if asked is None else asked
    numbers = isinstance(layers, list) and all(
        type(layer) is int and 0 <= layer <= count for layer in layers
    )
    if not isinstance(layers, list) or not numbers or not 0 < len(layers) == len(set(layers)):
        raise ConfigError(
            f"{path} drafts from hidden states at layers {layers!r:.80}, and this model, "
            f"{verifier.architecture}, has {count} layers: choose a drafter that was trained for it"
        )
    return tuple(sorted(layers))


def drafter_block(block: BlockSpec, table_rows: int) -> BlockSpec:
    """A block of a family's model by the names of drafters' checkpoints.

    table_rows   tokens of the model that verifies, whose embedding it may be
    """
    params = tuple(replace(param, sources=_sources(param, block.id)) for param in block.params)
    if block.id.kind is BlockKind.EMBEDDING:
        [table] = params
        params = (replace(table, shape=(table_rows, table.shape[1])),)
    return replace(block, params=params)


def _sources(param: ParamSpec, block: BlockId) -> tuple[str, ...]:
    """Names that drafters' checkpoints have for a parameter of a family's model."""
    names = tuple(name.removeprefix("model.") for name in param.sources)
    if block.layer == 0:
        names += tuple(name.replace("layers.0.", "midlayer.") for name in names)
    if block.layer == TRUNK and param.name == "weight":
        names += (VERIFIER_TABLE if block.kind is BlockKind.EMBEDDING else VERIFIER_HEAD,)
    return names

"""transformers' module tree of a configuration, without a number in it, and what is where in it."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hmt.base.errors import CheckpointError, UnknownArchitectureError
from hmt.base.log import logger
from hmt.models.config import Config, as_transformers_reads, check_counts, first_line
from hmt.models.fallback import interfaces
from hmt.models.fallback.call_context import current_place
from hmt.models.fallback.features import uncomputed


@dataclass
class Tree:
    """A model on the meta device; buffers that no checkpoint has hold their numbers.

    base      what computes hidden states, without the output layer
    layers    the layers in it
    path      of the layers in the model, such as "model.layers"
    own_attention     the model's code computes attention itself: it does not ask by name
    takes_positions   it is told positions; else it counts what its cache holds
    """

    model: PreTrainedModel
    config: Config
    base: nn.Module
    layers: nn.ModuleList
    path: str
    own_attention: bool
    takes_positions: bool

    def at(self, index: int) -> str:
        """What the names of a layer's parameters begin with."""
        return f"{self.path}.{index}."


def architectures() -> frozenset[str]:
    """Architectures that make text: what transformers calls causal, or of images and text."""
    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) | _of_images()


def _of_images() -> frozenset[str]:
    return frozenset(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())


def read(config: Mapping[str, Any]) -> Config:
    """transformers' configuration of a parsed config.json.

    Raises UnknownArchitectureError for models that make no text of text, and CheckpointError.
    """
    model_type, architecture = str(config.get("model_type")), config["architectures"][0]
    if model_type not in CONFIG_MAPPING:
        raise UnknownArchitectureError(
            f"model_type is {model_type!r}, which transformers {transformers.__version__} does not "
            "know: a newer one may"
        )
    own = getattr(getattr(transformers, architecture).config_class, "model_type", None)
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    known = [names.get(model_type) for names in kinds]
    if architecture not in known and model_type != own:
        raise CheckpointError(f"model_type {model_type!r} is not that of a {architecture}")
    read = as_transformers_reads(config, model_type)
    if getattr(read, "is_encoder_decoder", False):
        raise refused(architecture, "it has an encoder beside its decoder")
    text = read.get_text_config()
    if getattr(text, "cross_attention_layers", None):
        why = "some of its layers attend to an encoder's states (cross_attention_layers)"
        raise refused(architecture, why)
    check_counts(text, no_window=0)
    return read


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config.json of a model's causal language model, where its type has a class for it."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return None
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(text.get("model_type")))
    if architecture in (None, config["architectures"][0]):
        return None
    tied = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
    return {**text, **tied, "architectures": [architecture]}


def refuse_others(config: Config, architecture: str) -> None:
    """Raise UnknownArchitectureError for models whose layers cannot be called one by one.

    As far as their configuration tells.
    """
    if getattr(getattr(transformers, architecture), "_is_stateful", False):
        raise refused(architecture, "it has a state besides the KV cache")
    why = uncomputed(config)
    if why is not None:
        raise refused(architecture, why)


def build(
    config: Config, architecture: str, dtype: torch.dtype, *, by_name: bool, listed: bool = True
) -> Tree:
    """The modules of `config`.  Raises CheckpointError or UnknownArchitectureError.

    by_name   attention is HMT's, if the model asks for it by name
    listed    its layers must be found in one list
    """
    interfaces.register()
    kind = getattr(transformers, architecture)
    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            model = kind._from_config(
                config,
                dtype=dtype,
                attn_implementation=interfaces.NAME if by_name else None,
                experts_implementation=interfaces.NAME,
            )
    except Exception as error:
        logger.debug("%s cannot be made", architecture, exc_info=error)
        said = first_line(error)
        if isinstance(error, AttributeError | LookupError | TypeError):
            said = f"version {transformers.__version__} fails at a field that it lacks or misreads"
        raise CheckpointError(f"transformers cannot make a {architecture} of it: {said}") from error
    model.eval()
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            _tell_place(module, dtype)
    _fill_buffers(model, architecture)
    base = _find_base(model)
    path, layers = _find_layers(model, architecture) if listed else ("", nn.ModuleList())
    takes = "position_ids" in inspect.signature(base.forward).parameters
    return Tree(model, config, base, layers, path, not by_name, takes)


def _tell_place(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let a model without numbers say that it is where the call at hand computes, and in what."""
    kind = type(model)
    own = {
        "__module__": kind.__module__,
        "device": property(lambda _: current_place()),
        "dtype": property(lambda _: dtype),
    }
    model.__class__ = type(kind.__name__, (kind,), own)


def _find_base(model: PreTrainedModel) -> nn.Module:
    """What computes hidden states: the model itself where no child of it does."""
    if model.base_model is not model:
        return model.base_model
    inputs = model.get_input_embeddings()
    for child in model.children():
        if child is not inputs and any(module is inputs for module in child.modules()):
            return child
    return model


def _find_layers(model: PreTrainedModel, architecture: str) -> tuple[str, nn.ModuleList]:
    text = model.config.get_text_config()
    count = getattr(text, "num_hidden_layers", 0)
    if not count:
        raise refused(architecture, "its configuration has no number of layers")
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise refused(architecture, f"its {count} layers are not in one list")
    return min(found, key=lambda pair: pair[0].count("."))


def _fill_buffers(model: PreTrainedModel, architecture: str) -> None:
    """Compute buffers that checkpoints do not have, such as rotary frequencies."""
    kept = {name for name, _ in model.state_dict().items()}
    for path, module in model.named_modules():
        missing = [
            name
            for name, buffer in module.named_buffers(recurse=False)
            if f"{path}.{name}".lstrip(".") not in kept and buffer.is_meta
        ]
        for name in missing:
            buffer = getattr(module, name)
            empty = torch.full_like(buffer, _unset(buffer.dtype), device="cpu")
            module.register_buffer(name, empty, persistent=False)
        if missing:
            _owner(model, path)._init_weights(module)
        for name in missing:
            buffer = getattr(module, name)
            unset = buffer == _unset(buffer.dtype)
            if bool(unset.all() if buffer.dtype is torch.bool else unset.any()):
                where = f"{path}.{name}"
                raise refused(architecture, f"what its buffer {where} holds is not known")


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost of transformers' models around a module, which knows how it begins."""
    owner: nn.Module = model
    module: nn.Module = model
    for name in path.split(".") if path else ():
        module = module.get_submodule(name)
        owner = module if isinstance(module, PreTrainedModel) else owner
    assert isinstance(owner, PreTrainedModel)
    return owner


def _unset(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).min
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def refused(architecture: str, why: str) -> UnknownArchitectureError:
    """The error that says why a model cannot run."""
    return UnknownArchitectureError(
        f"{architecture} is not one of HMT's own families, and cannot run through transformers' "
        f"modules either: {why}"
    )

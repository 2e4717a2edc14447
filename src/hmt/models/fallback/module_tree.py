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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hmt.base.errors import CheckpointError, UnknownArchitectureError
from hmt.base.log import logger
from hmt.models.config import Config, as_transformers_reads, check_counts, first_line
from hmt.models.fallback import interfaces
from hmt.models.fallback.features import uncomputed


@dataclass(frozen=True)
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


def architectures() -> frozenset[str]:
    """Architectures that transformers calls causal language models."""
    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def read(config: Mapping[str, Any]) -> Config:
    """transformers' configuration of a parsed config.json.  Raises CheckpointError."""
    model_type, architecture = str(config.get("model_type")), config["architectures"][0]
    if getattr(getattr(transformers, architecture), "_is_stateful", False):
        raise refused(architecture, "it has a state besides the KV cache")
    if model_type not in CONFIG_MAPPING:
        raise UnknownArchitectureError(
            f"model_type is {model_type!r}, which transformers {transformers.__version__} does not "
            "know: a newer one may"
        )
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) != architecture:
        raise CheckpointError(f"model_type {model_type!r} is not that of a {architecture}")
    return as_transformers_reads(config, model_type)


def refuse_others(config: Config) -> None:
    """Raise UnknownArchitectureError for models that are not text after text, token by token.

    And CheckpointError for sizes that no model has.
    """
    why = uncomputed(config)
    if why is not None:
        raise refused(config.architectures[0], why)
    check_counts(config.get_text_config(), no_window=0)


def build(config: Config, architecture: str, dtype: torch.dtype, *, by_name: bool) -> Tree:
    """The modules of `config`.  Raises CheckpointError or UnknownArchitectureError.

    by_name   attention is HMT's, if the model asks for it by name
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
    _fill_buffers(model, architecture)
    base = model.base_model
    path, layers = _find_layers(model, architecture)
    takes = "position_ids" in inspect.signature(base.forward).parameters
    return Tree(model, config, base, layers, path, not by_name, takes)


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
            model._init_weights(module)
        for name in missing:
            buffer = getattr(module, name)
            unset = buffer == _unset(buffer.dtype)
            if bool(unset.all() if buffer.dtype is torch.bool else unset.any()):
                where = f"{path}.{name}"
                raise refused(architecture, f"what its buffer {where} holds is not known")


def _unset(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return torch.finfo(dtype).min
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def refused(architecture: str, why: str) -> UnknownArchitectureError:
    """The error that says why a model cannot run."""
    return UnknownArchitectureError(
        f"{architecture} is not one of HMT's own families, and cannot run through transformers' "
        f"modules either: {why}"
    )

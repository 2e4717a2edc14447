"""Adapters as llama.cpp's convert_lora_to_gguf.py writes them.

Keys general.type = "adapter", adapter.type = "lora", adapter.lora.alpha; tensors NAME.lora_a
[rank, in] and NAME.lora_b [out, rank], where NAME is the adapted tensor's.  What the converter does
to the rows of a weight, it does to those of lora_b.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import AdapterError, HeaderError, HMTError, ShapeError
from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.adapters.contents import AdapterFile, AdapterMatrices, checked
from hmt.formats.gguf.architecture import Architecture
from hmt.formats.gguf.architectures import ARCHITECTURES
from hmt.formats.gguf.header import GgufHeader, read_gguf
from hmt.formats.gguf.keys import Keys
from hmt.formats.gguf.names import AdaptedPart, Names, adapted_parts, names_of

_DOWN, _UP = ".lora_a", ".lora_b"
_MOST_ALPHA: Final = 1e9


def open_gguf_adapter(path: Path, config: Mapping[str, Any]) -> AdapterFile:
    """The adapter in a GGUF file; see `open_adapter`."""
    header = read_gguf(path)
    alpha, names = _read_metadata(header, config)
    matrices = []
    for name, down, up in _pairs(header):
        if not down.shape or not up.shape or down.shape[:-2] != up.shape[:-2]:
            raise ShapeError(
                f"{path}: {down.name!r} is {list(down.shape)} and {up.name!r} {list(up.shape)}; "
                "wanted are [rank, in] and [out, rank], of as many experts"
            )
        rank = up.shape[-1]
        scale = alpha / rank if alpha and rank else 1.0
        parts = list(adapted_parts(replace(up, name=name), names))
        if not parts:
            raise AdapterError(
                f"{path}: {name!r} is no linear layer of a layer of {names.architecture.causal}; "
                "HMT adapts these alone"
            )
        for part in parts:
            own = _down_of(down, part)
            pair = AdapterMatrices(part.module, own, replace(part.rows, name=up.name), scale)
            matrices.append(checked(replace(pair, turned=part.turned), path))
    base = header.metadata.get("general.base_model.0.name")
    return AdapterFile(path, tuple(matrices), base if isinstance(base, str) else "")


def _read_metadata(header: GgufHeader, config: Mapping[str, Any]) -> tuple[float, Names]:
    """Its alpha, and the names of what it adapts.  Raises AdapterError."""
    path, metadata = header.path, header.metadata
    kind, way = metadata.get("general.type"), metadata.get("adapter.type")
    if kind != "adapter" or way != "lora":
        raise AdapterError(
            f"{path} is no LoRA adapter: its general.type is {str(kind)[:40]!r} and its "
            f"adapter.type {str(way)[:40]!r}"
        )
    if metadata.get("adapter.alora.invocation_tokens"):
        raise AdapterError(f"{path} cannot be used: it begins only behind some tokens (aLoRA)")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not abs(alpha) <= _MOST_ALPHA
    ):
        raise HeaderError(f"{path}: adapter.lora.alpha is {str(alpha)[:40]!r}; it must be a number")
    architecture = _architecture(path, str(metadata.get("general.architecture")), config)
    if architecture.model_type != config.get("model_type"):
        raise AdapterError(
            f"{path} is an adapter for {architecture.model_type}, and the model is "
            f"{config.get('model_type')}"
        )
    return float(alpha), names_of(architecture, config)


def _architecture(path: Path, name: str, config: Mapping[str, Any]) -> Architecture:
    """What is known of the adapted model's GGUF files.  Raises AdapterError."""
    row = ARCHITECTURES.get(name)
    if isinstance(row, Architecture):
        return row
    if row is not None:  # decided by what files of the model say
        said = {
            f"{name}.expert_count": config.get("num_local_experts") or 0,
            f"{name}.attention.sliding_window": config.get("sliding_window") or 0,
        }
        with contextlib.suppress(HMTError):
            return row(Keys(said, name, str(path)))
    raise AdapterError(
        f"{path} is for the architecture {name[:40]!r}, of which HMT reads no adapters: give "
        "peft's own folder"
    )


def _pairs(header: GgufHeader) -> Iterator[tuple[str, TensorRecord, TensorRecord]]:
    """(name of the adapted tensor, lora_a, lora_b) of each."""
    found: dict[str, dict[str, TensorRecord]] = {}
    for name, record in header.records.items():
        stem, suffix = name[: -len(_DOWN)], name[-len(_DOWN) :]
        if suffix not in (_DOWN, _UP):
            raise AdapterError(
                f"{header.path}: tensor {name!r} is none of an adapter's, which end in {_DOWN} and "
                f"{_UP}"
            )
        found.setdefault(stem, {})[suffix] = record
    if not found:
        raise AdapterError(f"{header.path} holds no tensor: the adapter changes nothing")
    for stem, pair in found.items():
        if len(pair) != 2:
            raise HeaderError(f"{header.path}: {stem!r} has {min(pair)} alone: download it again")
        yield stem, pair[_DOWN], pair[_UP]


def _down_of(down: TensorRecord, part: AdaptedPart) -> TensorRecord:
    """lora_a of one expert, or as it is."""
    if len(down.shape) != 3:
        return down
    return replace(down.rows(part.expert, 1), shape=down.shape[1:])

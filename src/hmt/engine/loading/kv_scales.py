"""Scales of keys and values that are found once for a model, and kept beside its weights."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from hmt.base.errors import ConfigError
from hmt.base.log import logger
from hmt.contracts.model import KVLayer, Model
from hmt.engine.config import KV_ENCODINGS
from hmt.engine.loading.source import Source
from hmt.kvcache import KeyRange
from hmt.kvcache.codecs import (
    STATIC,
    Calibration,
    CodecName,
    DiskCodecName,
    positions_of,
    read_ranges,
    weights_of,
)

SCALES = "kv-scales.hmt"  # not .safetensors: of those all in a checkpoint's folder are read
_HELD_OUT = 4  # of so many texts one
_WITH_SCALES, _WITHOUT_SCALES = ("int8", "int8-channel", "int4"), ("exact", "fp8")
_TENSORS, _SAMPLE_BYTES = 64, 4096


class _Prepared(Protocol):
    """What a model was loaded from."""

    @property
    def model(self) -> Model:
        """The model's layers."""
        ...


class KVSource(Protocol):
    """What computes the KV of sequences: a `LoadedModel`."""

    @property
    def prepared(self) -> _Prepared:
        """What it was loaded from."""
        ...

    def keys_and_values(
        self, tokens: Sequence[int], see: Callable[[int, torch.Tensor, torch.Tensor], None], /
    ) -> None:
        """Call `see` with each layer's index, keys and values of the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Scales, and what they would have cut off.

    tokens   that were read
    rows     of every fourth text: one for each token, head, layer, and side (keys, values)
    beyond   of these, with a number beyond what was seen in the texts before
    """

    scales: Calibration
    tokens: int
    rows: int
    beyond: int


def calibrate(model: KVSource, texts: Sequence[Sequence[int]]) -> Calibrated:
    """Scales that hold for all of `texts`: token ids, of at most the model's context each.

    Every fourth is read after all others.  Raises ConfigError where there is nothing to read, and
    what `LoadedModel.keys_and_values` raises.
    """
    held_out = [text for n, text in enumerate(texts) if n % _HELD_OUT == _HELD_OUT - 1]
    others = [text for n, text in enumerate(texts) if n % _HELD_OUT != _HELD_OUT - 1]
    if not any(map(len, texts)):
        raise ConfigError("there is nothing to calibrate with: give a longer --text")
    found, counted = Calibration(), [0, 0]

    def count(layer: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
        beyond, rows = found.beyond(layer, key, value)
        counted[0] += beyond
        counted[1] += rows

    for text in others:
        see_text(model, text, found.see)
    for text in held_out:
        see_text(model, text, count, found.see)
    return Calibrated(found, sum(map(len, texts)), counted[1], counted[0])


def see_text(model: KVSource, text: Sequence[int], *see: Callable[..., None]) -> None:
    """Call each of `see` with (layer, keys, values) of a text; values None where keys are both.

    Layers with a window are left out: theirs are never far.
    """
    layers = model.prepared.model.spec.kv_layers

    def look(index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if not layers[index].window:
            for one in see:
                one(index, key, value if layers[index].has_values else None)

    if text:
        model.keys_and_values(text, look)


def with_scales(quant: tuple[str, str, str], source: Source) -> tuple[str, str, str]:
    """What `kv_quant` says, with the file of scales where the disk's codec has static ones.

    Without a file of its own it is the one beside the weights.  Raises ConfigError where that is
    missing, or was made for other weights.
    """
    on_device, on_host, on_disk = quant
    kept = DiskCodecName.parse(on_disk)
    if kept.usual in KV_ENCODINGS:
        return quant
    name = CodecName.parse(kept.usual)
    if STATIC not in (name.keys, name.values):
        return quant
    file = name.file or scales_beside(source.path)
    if not file.is_file():
        raise ConfigError(
            f"{STATIC} needs scales, and {file} is not there: `hmt calibrate kv {source.path}` "
            "makes it"
        )
    made_for = weights_of(file)
    if made_for not in (None, identity(source)):
        raise ConfigError(
            f"{file} was made for other weights than those of {source.path}: "
            f"`hmt calibrate kv {source.path}` makes it anew"
        )
    return on_device, on_host, str(replace(kept, usual=f"{kept.usual.partition('@')[0]}@{file}"))


def key_ranges(
    quant: tuple[str, str, str], source: Source, layers: Mapping[int, KVLayer], context: int
) -> dict[int, KeyRange]:
    """Where keys of `layers` lie, by index, from the file beside the weights.

    Empty where no level keeps keys in 8 or 4 bits with scales of its pages, or there is no file.
    One of other weights, or of shorter sequences than `context`, is left out, and a warning says
    so: keys that turn slowly lie elsewhere at later positions, and lose more then than without.
    Raises ConfigError where it is damaged.
    """
    file = scales_beside(source.path)
    if not _gain_by_ranges(quant) or not file.is_file():
        return {}
    if weights_of(file) not in (None, identity(source)):
        logger.warning(
            "%s was made for other weights, and is not used: `hmt calibrate kv %s` makes it anew",
            file, source.path,
        )  # fmt: skip
        return {}
    if (positions := positions_of(file)) < context:
        logger.warning(
            "%s was made of sequences of up to %d tokens, and is not used for keys at %d "
            "positions: `hmt calibrate kv %s --length %d` makes it anew, or give a smaller "
            "--context",
            file, positions, context, source.path, context,
        )  # fmt: skip
        return {}
    gaining = {n: one for n, one in layers.items() if one.relative and not one.window}
    return read_ranges(file, gaining)


def _gain_by_ranges(quant: tuple[str, str, str]) -> bool:
    """Whether some keys are in codes that get scales as they come, and none in static ones."""
    _, on_host, on_disk = quant
    disk = DiskCodecName.parse(on_disk)
    names = {on_host, disk.usual, disk.low or "exact"} - set(_WITHOUT_SCALES)
    codecs = list(map(CodecName.parse, names))
    is_static = any(STATIC in (codec.keys, codec.values) for codec in codecs)
    return not is_static and any(codec.keys in _WITH_SCALES for codec in codecs)


def scales_beside(path: Path) -> Path:
    """Where scales of the model in a folder or GGUF file are looked for."""
    return path / SCALES if path.is_dir() else path.with_name(f"{path.stem}-{SCALES}")


def identity(source: Source) -> str:
    """What tells a model's weights from others: sizes, names, and bytes of some of them."""
    seen = hashlib.blake2b(json.dumps(dict(source.config), default=str, sort_keys=True).encode())
    for part in _parts(source):
        seen.update(repr(part).encode())
    return seen.hexdigest()


def _parts(source: Source) -> Iterator[Any]:
    if source.pack is not None:
        yield from source.pack.manifest.extents()
        return
    records = sorted(source.checkpoint.records.items())
    for name, record in records:
        yield name, record.dtype, record.shape
    for _, record in records[:: max(1, len(records) // _TENSORS)]:
        with record.file.open("rb") as file:
            file.seek(record.offset + record.nbytes // 2)
            yield file.read(min(_SAMPLE_BYTES, record.nbytes - record.nbytes // 2))

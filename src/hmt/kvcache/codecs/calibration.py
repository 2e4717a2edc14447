"""Scales of keys and values that are found beforehand, from text that is like what will come."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.contracts.model import KVLayer
from hmt.kvcache.codecs.integers import static_scales
from hmt.kvcache.key_ranges import KeyRange

_WEIGHTS, _POSITIONS = "weights", "positions"  # in a file's metadata


class _Channels:
    """What is known of numbers f32 [heads, dim] of many tokens."""

    def __init__(self, rows: Tensor) -> None:
        """Of rows [tokens, heads, dim]."""
        self.low, self.high = rows.amin(0).cpu(), rows.amax(0).cpu()
        self.total, self.count = rows.sum(0, dtype=torch.float64).cpu(), len(rows)

    def add(self, other: "_Channels") -> None:
        """Those of other tokens."""
        self.low = torch.minimum(self.low, other.low)
        self.high = torch.maximum(self.high, other.high)
        self.total += other.total
        self.count += other.count

    @property
    def largest(self) -> Tensor:
        """Magnitudes."""
        return torch.maximum(self.high, -self.low)

    @property
    def middle(self) -> Tensor:
        """Means."""
        return (self.total / self.count).float()

    @property
    def furthest(self) -> Tensor:
        """Distances from the mean, at most."""
        return torch.maximum(self.high - self.middle, self.middle - self.low)


class Calibration:
    """The largest magnitudes that were seen, for each layer, head and channel; means of keys.

    positions   of the longest text: keys turn with their positions, and means with them
    """

    def __init__(self) -> None:
        self.positions = 0
        self._seen: dict[str, _Channels] = {}

    def see(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        """Count rows [tokens, heads, dim] of a whole text in a layer; value None: keys are all."""
        self.positions = max(self.positions, len(key))
        for side, rows in (("key", key), ("value", value)):
            if rows is not None and len(rows):
                found, name = _Channels(rows.float()), f"{layer}.{side}"
                if name in self._seen:
                    self._seen[name].add(found)
                else:
                    self._seen[name] = found

    def beyond(self, layer: int, key: Tensor, value: Tensor | None) -> tuple[int, int]:
        """Of such rows, how many have a number beyond all that were seen; and how many there are.

        A row is a token's of one head.
        """
        found = rows_seen = 0
        for side, rows in (("key", key), ("value", value)):
            if rows is not None:
                known = self._seen.get(f"{layer}.{side}")
                largest = torch.zeros(rows.shape[1:]) if known is None else known.largest
                found += int((rows.float().cpu().abs() > largest).any(-1).sum())
                rows_seen += rows.shape[0] * rows.shape[1]
        return found, rows_seen

    @property
    def ranges(self) -> dict[int, KeyRange]:
        """Where keys lie, by layer."""
        return {layer: KeyRange.of(keys.middle, keys.furthest) for layer, keys in self._keys()}

    def _keys(self) -> Iterator[tuple[int, _Channels]]:
        for name, seen in self._seen.items():
            layer, _, side = name.partition(".")
            if side == "key":
                yield int(layer), seen

    def write(self, file: Path, weights: str | None = None) -> None:
        """Keep what was seen: f32 tensors [heads, dim], as a safetensors file.

        "0.key" and "0.value" of layer 0 are the largest magnitudes, "0.key.middle" the means of
        keys, and "0.key.furthest" the largest distances from these.

        weights   what tells those apart that this is for.  The file is complete or not there.
        """
        tensors = {name: seen.largest for name, seen in self._seen.items()}
        for layer, keys in self._keys():
            tensors[f"{layer}.key.middle"] = keys.middle
            tensors[f"{layer}.key.furthest"] = keys.furthest
        metadata = {_POSITIONS: str(self.positions)}
        metadata |= {} if weights is None else {_WEIGHTS: weights}
        new = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            new.write_bytes(save(tensors, metadata))
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)


def weights_of(file: Path) -> str | None:
    """For which weights a calibration was written; None where it does not say.

    Raises ConfigError where the file is none.
    """
    return _metadata(file).get(_WEIGHTS)


def positions_of(file: Path) -> int:
    """How long the sequences of a calibration were; 0 where it does not say.

    Raises as `weights_of`.
    """
    return int(_metadata(file).get(_POSITIONS, 0))


def _metadata(file: Path) -> Mapping[str, str]:
    content, _ = _read(file)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata: Mapping[str, str] = header.get("__metadata__", {})
    return metadata


def read_scales(file: Path, layers: Mapping[int, KVLayer]) -> dict[str, Tensor]:
    """Scales [heads, dim] of keys ("0.key") and values ("0.value") from a written calibration.

    Raises ConfigError where the file is none, or is not of `layers`.
    """
    _, found = _read(file)
    wanted = {}
    for index, layer in layers.items():
        wanted[f"{index}.key"] = layer.heads, layer.key_dim
        if layer.has_values:
            wanted[f"{index}.value"] = layer.heads, layer.value_dim
    for name, shape in wanted.items():
        there = tuple(found[name].shape) if name in found else None
        if there != shape:
            raise ConfigError(
                f"{file} has scales of the shape {there} for {name}, and the model needs {shape}: "
                "calibrate with this model"
            )
    return {name: static_scales(found[name]) for name in wanted}


def read_ranges(file: Path, layers: Mapping[int, KVLayer]) -> dict[int, KeyRange]:
    """Where keys of those of `layers` lie that a written calibration has, by index.

    Raises ConfigError where the file is none, or is of another model.
    """
    _, found = _read(file)
    ranges = {}
    for index, layer in layers.items():
        middle, furthest = (found.get(f"{index}.key.{part}") for part in ("middle", "furthest"))
        if middle is None or furthest is None:  # files of earlier versions have none
            continue
        if not middle.shape == furthest.shape == (layer.heads, layer.key_dim):
            raise ConfigError(
                f"{file} has ranges of the shape {tuple(middle.shape)} for keys of layer {index}, "
                f"and the model needs {(layer.heads, layer.key_dim)}: calibrate with this model"
            )
        ranges[index] = KeyRange.of(middle, furthest)
    return ranges


def _read(file: Path) -> tuple[bytes, dict[str, Tensor]]:
    """What a file holds, and its tensors.  Not mapped: one that is cut short would be a SIGBUS."""
    try:
        content = file.read_bytes()
        return content, load(content)
    except (OSError, SafetensorError) as error:
        raise _no_scales(file, error) from error


def _no_scales(file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{file} does not hold scales of keys and values ({error}); `hmt calibrate kv` writes "
        "such files"
    )

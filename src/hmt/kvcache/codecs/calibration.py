"""Scales of keys and values that are found beforehand, from text that is like what will come."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.contracts.model import KVLayer
from hmt.kvcache.codecs.integers import static_scales

_WEIGHTS = "weights"  # in a file's metadata


class Calibration:
    """The largest magnitudes that were seen, for each layer, head and channel."""

    def __init__(self) -> None:
        self._largest: dict[str, Tensor] = {}

    def see(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        """Count rows [tokens, heads, dim] of a layer; value None where keys are all there is."""
        for side, rows in (("key", key), ("value", value)):
            if rows is not None:
                largest, name = rows.float().abs().amax(0).cpu(), f"{layer}.{side}"
                self._largest[name] = torch.maximum(self._largest.get(name, largest), largest)

    def beyond(self, layer: int, key: Tensor, value: Tensor | None) -> tuple[int, int]:
        """Of such rows, how many have a number beyond all that were seen; and how many there are.

        A row is a token's of one head.
        """
        found = rows_seen = 0
        for side, rows in (("key", key), ("value", value)):
            if rows is not None:
                largest = self._largest.get(f"{layer}.{side}", torch.zeros(rows.shape[1:]))
                found += int((rows.float().cpu().abs() > largest).any(-1).sum())
                rows_seen += rows.shape[0] * rows.shape[1]
        return found, rows_seen

    def write(self, file: Path, weights: str | None = None) -> None:
        """Keep what was seen: f32 tensors [heads, dim], as a safetensors file.

        weights   what tells those apart that this is for.  The file is complete or not there.
        """
        metadata = None if weights is None else {_WEIGHTS: weights}
        new = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            new.write_bytes(save(self._largest, metadata))
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)


def weights_of(file: Path) -> str | None:
    """For which weights a calibration was written; None where it does not say.

    Raises ConfigError where the file is none.
    """
    content, _ = _read(file)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    weights: str | None = header.get("__metadata__", {}).get(_WEIGHTS)
    return weights


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

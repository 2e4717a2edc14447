"""Scales of keys and values that are found beforehand, from text that is like what will come."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.contracts.model import KVKind, KVLayer
from hmt.kvcache.codecs.integers import static_scales


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

    def write(self, file: Path) -> None:
        """Keep what was seen: f32 tensors [heads, dim], as a safetensors file."""
        save_file(self._largest, file)


def read_scales(file: Path, layers: Mapping[int, KVLayer]) -> dict[str, Tensor]:
    """Scales [heads, dim] of keys ("0.key") and values ("0.value") from a written calibration.

    Raises ConfigError where the file is none, or is not of `layers`.
    """
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{file} does not hold scales of keys and values ({error}); `hmt bench kv` writes such "
            "files"
        ) from error
    wanted = {}
    for index, layer in layers.items():
        wanted[f"{index}.key"] = layer.heads, layer.key_dim
        if layer.kind is not KVKind.LATENT:
            wanted[f"{index}.value"] = layer.heads, layer.value_dim
    for name, shape in wanted.items():
        there = tuple(found[name].shape) if name in found else None
        if there != shape:
            raise ConfigError(
                f"{file} has scales of the shape {there} for {name}, and the model needs {shape}: "
                "calibrate with this model"
            )
    return {name: static_scales(found[name]) for name in wanted}

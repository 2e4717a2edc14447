"""Packs of any size that take little of the drive: all layers lie at the same place.

The manifest of a pack says where each block lies.  Here the layers of a small pack stand for all
layers of a large model, by turns: it is read, placed and computed like any other, block by block
into memory of its own, and only the drive's own cache could tell the difference.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hmt.bench.random_model import Shape, write_random_model
from hmt.contracts.blocks import TRUNK
from hmt.engine import EngineConfig
from hmt.engine.packs import convert
from hmt.weights.checksum import checksum
from hmt.weights.pack import MANIFEST, CopiedFile, Manifest, PackedBlock, encode, read_manifest

_CONFIG = "config.json"


def write_tiled_pack(
    folder: Path,
    shape: Shape,
    quantization: str,
    *,
    written_layers: int = 2,
    progress: Callable[[str], None] = lambda what: None,
) -> None:
    """A pack of `shape` in `folder`/pack, whose layers are those of a model of `written_layers`.

    The small model's checkpoint is left in `folder`/checkpoint.
    """
    small = replace(shape, layers=min(written_layers, shape.layers))
    progress("writing random weights")
    write_random_model(folder / "checkpoint", small, four_bits=True)
    progress("converting")
    convert(folder / "checkpoint", folder / "pack", EngineConfig.resolve(quantization=quantization))
    tile(folder / "pack", small.layers, shape.layers)


def tile(pack: Path, written: int, layers: int) -> None:
    """Let the pack of a model of `written` layers be one of `layers`; changes its small files."""
    manifest = read_manifest(pack)
    config = json.loads((pack / _CONFIG).read_text())
    config["num_hidden_layers"] = layers
    text = json.dumps(config, indent=1).encode()
    (pack / _CONFIG).write_bytes(text)
    copies = dict(manifest.copies)
    if _CONFIG in copies:
        copies[_CONFIG] = CopiedFile(len(text), checksum(text))
    tiled = replace(
        manifest,
        copies=copies,
        blocks=_tiled(manifest, written, layers),
        published_bytes=manifest.published_bytes * layers // written,
    )
    (pack / MANIFEST).write_bytes(encode(tiled))


def _tiled(manifest: Manifest, written: int, layers: int) -> tuple[PackedBlock, ...]:
    own: dict[int, list[PackedBlock]] = {}
    for block in manifest.blocks:
        own.setdefault(block.id.layer, []).append(block)
    first = manifest.blocks[0].id.layer
    before = own[TRUNK][:1] if first == TRUNK else []
    middle = [
        replace(block, id=block.id._replace(layer=layer))
        for layer in range(layers)
        for block in own[layer % written]
    ]
    return (*before, *middle, *own[TRUNK][len(before) :])

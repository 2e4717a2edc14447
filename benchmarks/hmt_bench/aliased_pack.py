"""Packs of any size that take little of the disk: all layers lie at the same place.

The manifest of a pack says where each block lies.  Here the layers of a small pack stand for all
layers of a large model, in turn: it is read, placed and computed like any other, block by block
into its own memory, and only the disk's own cache could tell the difference.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hmt.contracts.blocks import TRUNK, BlockKind
from hmt.engine import EngineConfig
from hmt.engine.loading.packs import convert
from hmt.formats.gguf import FILE_TYPES
from hmt.profiling.random_model import RandomShape, Shape
from hmt.weights.checksum import checksum
from hmt.weights.pack import MANIFEST, CopiedFile, Manifest, PackedBlock, encode, read_manifest
from hmt_bench.four_bits import write_four_bit_model
from hmt_bench.gguf_deepseek import GgufDeepSeek, kinds_of_layers
from hmt_bench.random_deepseek import DeepSeekShape
from hmt_bench.random_gguf import write_random_gguf

_CONFIG = "config.json"
_NARROW = 32
_WRITTEN_EXPERTS = 8  # of a DeepSeek; the others lie where these do


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
    _write(folder, small, quantization, progress)
    tile(folder / "pack", [layer % small.layers for layer in range(shape.layers)], shape)


def write_tiled_deepseek(
    folder: Path,
    shape: DeepSeekShape,
    quantization: str,
    *,
    progress: Callable[[str], None] = lambda what: None,
) -> None:
    """A pack of `shape` in `folder`/pack; a layer's experts lie at a few places, too.

    Two models are written: one with a dense layer and one with experts, all of them as narrow as
    may be, and one with a few experts as wide as they are.  With one of FILE_TYPES for the
    `quantization` they are GGUF files, with a layer for each choice of types.
    """
    if quantization in FILE_TYPES:
        _write_gguf_deepseek(folder, shape, quantization, progress)
        return
    width = shape.moe_intermediate_size
    narrow = replace(
        shape,
        layers=2,
        dense_layers=1,
        moe_intermediate_size=_NARROW,
        shared_experts=shape.shared_experts * width // _NARROW,
    )
    wide = replace(
        shape, layers=1, dense_layers=0, heads=1, q_rank=_NARROW, vocab_size=None,
        experts=_WRITTEN_EXPERTS, experts_per_token=1, groups=1, kept_groups=1,
    )  # fmt: skip
    _write(folder, narrow, quantization, progress)
    _write(folder / "experts", wide, quantization, progress)
    _take_experts(folder / "pack", folder / "experts" / "pack", shape.experts, 1)
    dense = shape.dense_layers
    tile(folder / "pack", [0] * dense + [1] * (shape.layers - dense), shape)


def _write_gguf_deepseek(
    folder: Path, shape: DeepSeekShape, file_type: str, progress: Callable[[str], None]
) -> None:
    kinds = kinds_of_layers(shape, file_type)
    written = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    dense = sum(layer < shape.dense_layers for layer in written)
    width = shape.moe_intermediate_size
    narrow = replace(
        shape,
        layers=len(written),
        dense_layers=dense,
        moe_intermediate_size=_NARROW,
        shared_experts=shape.shared_experts * width // _NARROW,
    )
    wide = replace(
        shape, layers=len(written) - dense, dense_layers=0, heads=1, q_rank=_NARROW,
        vocab_size=None, experts=_WRITTEN_EXPERTS, experts_per_token=1, groups=1, kept_groups=1,
    )  # fmt: skip
    for place, some, stands_for in (
        (folder, narrow, written),
        (folder / "experts", wide, written[dense:]),
    ):
        progress("writing random blocks")
        place.mkdir(parents=True, exist_ok=True)
        file = place / "model.gguf"
        write_random_gguf(file, GgufDeepSeek(some, file_type, tuple(stands_for), shape.layers))
        progress("converting")
        convert(file, place / "pack", EngineConfig.resolve())
        file.unlink()
    _take_experts(folder / "pack", folder / "experts" / "pack", shape.experts, dense)
    first = {kinds[layer]: number for number, layer in enumerate(written)}
    tile(folder / "pack", [first[kind] for kind in kinds], shape)


def _write(
    folder: Path, shape: RandomShape, quantization: str, progress: Callable[[str], None]
) -> None:
    progress("writing random weights")
    write_four_bit_model(folder / "checkpoint", shape)
    progress("converting")
    convert(folder / "checkpoint", folder / "pack", EngineConfig.resolve(quantization=quantization))


def _take_experts(pack: Path, other: Path, count: int, dense: int) -> None:
    """Let the `count` experts of each layer of `pack` be those of `other`, again and again.

    dense   layers of `pack` before those with experts, which `other` lacks

    Moves `other`'s data into `pack`.
    """
    manifest, source = read_manifest(pack), read_manifest(other)
    files = dict(manifest.files)
    for name, nbytes in source.files.items():
        shutil.move(other / name, pack / f"experts-{name}")
        files[f"experts-{name}"] = nbytes
    given: dict[int, list[PackedBlock]] = {}
    for block in source.blocks:
        if block.id.kind is BlockKind.EXPERT:
            given.setdefault(block.id.layer + dense, []).append(block)

    def taken(block: PackedBlock) -> PackedBlock:
        if block.id.kind is not BlockKind.EXPERT:
            return block
        among = given[block.id.layer]
        instead = among[block.id.index % len(among)]
        assert instead.extent is not None
        extent = replace(instead.extent, file=instead.extent.file + len(manifest.files))
        return replace(instead, id=block.id, extent=extent)

    experts = sum(block.id.kind is BlockKind.EXPERT for block in manifest.blocks)
    assert experts == count * len(given)
    blocks = tuple(map(taken, manifest.blocks))
    (pack / MANIFEST).write_bytes(encode(replace(manifest, files=files, blocks=blocks)))


def tile(pack: Path, sources: Sequence[int], shape: RandomShape) -> None:
    """Let the pack of a small model be one of `shape`; changes its small files.

    sources   for each layer the one of the small model that it repeats
    """
    manifest = read_manifest(pack)
    config = json.loads((pack / _CONFIG).read_text())
    config |= shape.config(config["vocab_size"])
    text = json.dumps(config, indent=1).encode()
    (pack / _CONFIG).write_bytes(text)
    copies = dict(manifest.copies)
    if _CONFIG in copies:
        copies[_CONFIG] = CopiedFile(len(text), checksum(text))
    tiled = replace(
        manifest,
        copies=copies,
        blocks=_tiled(manifest, sources),
        published_bytes=manifest.published_bytes * len(sources) // len(set(sources)),
    )
    (pack / MANIFEST).write_bytes(encode(tiled))


def _tiled(manifest: Manifest, sources: Sequence[int]) -> tuple[PackedBlock, ...]:
    own: dict[int, list[PackedBlock]] = {}
    for block in manifest.blocks:
        own.setdefault(block.id.layer, []).append(block)
    first = manifest.blocks[0].id.layer
    before = own[TRUNK][:1] if first == TRUNK else []
    middle = [
        replace(block, id=block.id._replace(layer=layer))
        for layer, source in enumerate(sources)
        for block in own[source]
    ]
    return (*before, *middle, *own[TRUNK][len(before) :])

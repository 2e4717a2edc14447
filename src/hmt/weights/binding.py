"""Binding: which bytes of which file hold each parameter that a model declares."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from hmt.base.errors import MissingFileError, ShapeError
from hmt.base.log import warn_once
from hmt.contracts.blocks import BlockId, BlockSpec, ParamSpec, Role
from hmt.contracts.checkpoint import Checkpoint, TensorRecord
from hmt.contracts.encoding import Encoding
from hmt.contracts.model import ModelSpec

_ENCODINGS = {
    "F32": Encoding.F32,
    "F16": Encoding.F16,
    "BF16": Encoding.BF16,
    "F8_E4M3": Encoding.FP8_BLOCK,
}
_SCALE_SUFFIX = "_scale_inv"  # DeepSeek: NAME.weight_scale_inv, to be multiplied with


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [offset, offset + nbytes) of a file."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BoundParam:
    """One parameter and its bytes as published.

    scales   of FP8_BLOCK: f32 [ceil(out / tile[0]), ceil(in / tile[1])]
    """

    spec: ParamSpec
    source: str
    encoding: Encoding
    data: FileRange
    scales: FileRange | None = None
    tile: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class BoundBlock:
    """A block whose parameters have all been found."""

    id: BlockId
    params: tuple[BoundParam, ...]


def bind(spec: ModelSpec, checkpoint: Checkpoint) -> dict[BlockId, BoundBlock]:
    """Find every parameter of `spec` in `checkpoint`, in model order.

    Raises MissingFileError for a tensor that is nowhere, ShapeError where shape or dtype contradict
    the configuration.  Tensors that nobody asked for are reported once through the log.
    """
    bound = {block.id: _bind_block(block, checkpoint) for block in spec.blocks}
    used = {param.source for block in bound.values() for param in block.params}
    used |= {name + _SCALE_SUFFIX for name in used}
    ignored = [re.compile(pattern) for pattern in spec.ignored]
    extra = [
        name
        for name in checkpoint.records
        if name not in used and not any(pattern.search(name) for pattern in ignored)
    ]
    if extra:
        shown = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
        warn_once(
            f"extra tensors {checkpoint.path}",
            f"{len(extra)} tensors of {checkpoint.path} are not used by "
            f"{spec.architecture}: {shown}",
        )
    return bound


def _bind_block(block: BlockSpec, checkpoint: Checkpoint) -> BoundBlock:
    return BoundBlock(
        block.id, tuple(_bind_param(param, block.id, checkpoint) for param in block.params)
    )


def _bind_param(param: ParamSpec, block: BlockId, checkpoint: Checkpoint) -> BoundParam:
    source = next((name for name in param.sources if name in checkpoint.records), None)
    if source is None:
        raise MissingFileError(
            f"{block} needs tensor {' or '.join(param.sources)}, and none of the "
            f"{len(checkpoint.records)} tensors in {checkpoint.path} is called that; "
            "a shard may be missing: download the checkpoint again"
        )
    record = checkpoint.records[source]
    _check_shape(param, record, checkpoint)
    encoding = _ENCODINGS.get(record.dtype)
    if encoding is None or (encoding is Encoding.FP8_BLOCK and param.role is not Role.LINEAR):
        expected = "F32, F16 or BF16" + (" or F8_E4M3" if param.role is Role.LINEAR else "")
        raise ShapeError(
            f"{source} has dtype {record.dtype}; as a {param.role} it must be {expected}"
        )
    data = _rows_of(record, param.rows)
    if encoding is not Encoding.FP8_BLOCK:
        return BoundParam(param, source, encoding, data)
    scales, tile = _fp8_scales(param, record, checkpoint)
    return BoundParam(param, source, encoding, data, scales, tile)


def _check_shape(param: ParamSpec, record: TensorRecord, checkpoint: Checkpoint) -> None:
    expected = param.shape
    if param.rows is None:
        fits = record.shape == expected
    else:
        count, width = _as_rows(record)
        fits = width == (expected[1:] or (1,)) and param.rows[1] <= count
    if not fits:
        rows = f" for rows {param.rows[0]} to {param.rows[1]}" if param.rows else ""
        raise ShapeError(
            f"{record.name} has shape {list(record.shape)}, but config.json says "
            f"{list(expected)}{rows}; config and weights of {checkpoint.path} "
            "do not belong together"
        )


def _as_rows(record: TensorRecord) -> tuple[int, tuple[int, ...]]:
    """How many rows a tensor has, and how wide they are: all dimensions but the last are one."""
    if len(record.shape) < 2:
        return prod(record.shape), (1,)
    return prod(record.shape[:-1]), record.shape[-1:]


def _rows_of(record: TensorRecord, rows: tuple[int, int] | None) -> FileRange:
    if rows is None:
        return FileRange(record.file, record.offset, record.nbytes)
    row_bytes = record.nbytes // _as_rows(record)[0]
    first, end = rows
    return FileRange(record.file, record.offset + first * row_bytes, (end - first) * row_bytes)


def _fp8_scales(
    param: ParamSpec, record: TensorRecord, checkpoint: Checkpoint
) -> tuple[FileRange, tuple[int, int]]:
    tile, scales = checkpoint.fp8_tile, checkpoint.records.get(record.name + _SCALE_SUFFIX)
    if tile is None or scales is None:
        raise MissingFileError(
            f"{record.name} is stored in FP8, but "
            + ("config.json has no weight_block_size" if tile is None else "its scales ")
            + (f"{record.name}{_SCALE_SUFFIX} are not in the checkpoint" if tile else "")
        )
    full = (-(-record.shape[0] // tile[0]), -(-record.shape[1] // tile[1]))
    if scales.shape != full or scales.dtype != "F32":
        raise ShapeError(
            f"{scales.name} is {scales.dtype} {list(scales.shape)}; FP8 weight "
            f"{list(record.shape)} in tiles of {list(tile)} needs F32 {list(full)}"
        )
    if param.rows is None:
        return _rows_of(scales, None), tile
    first, end = param.rows
    if first % tile[0] or (end % tile[0] and end != record.shape[0]):
        raise ShapeError(f"rows {first} to {end} of {record.name} cut through an FP8 tile")
    return _rows_of(scales, (first // tile[0], -(-end // tile[0]))), tile


def published_bytes(blocks: Mapping[BlockId, BoundBlock]) -> int:
    """Bytes of all distinct parameters as published, scales included."""
    params = [param for block in blocks.values() for param in block.params]
    multiplied = {param.source for param in params if param.spec.role is not Role.TABLE}
    ranges = {
        part
        for param in params
        # A tied embedding is the head's tensor under another name: count it once.
        if param.spec.role is not Role.TABLE or param.source not in multiplied
        for part in (param.data, param.scales)
        if part is not None
    }
    return sum(part.nbytes for part in ranges)

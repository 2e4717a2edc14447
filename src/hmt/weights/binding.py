"""Binding: which bytes of which file hold each parameter that a model declares."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from hmt.base.errors import CheckpointError, MissingFileError, ShapeError
from hmt.base.log import warn_once
from hmt.contracts.blocks import BlockId, BlockSpec, ParamSpec, Role
from hmt.contracts.checkpoint import (
    Checkpoint,
    FileRange,
    FormName,
    Joined,
    Published,
    PublishedPart,
    TensorRecord,
)
from hmt.contracts.encoding import Encoding
from hmt.contracts.model import ModelSpec
from hmt.quant import Format
from hmt.quant.repacking import (
    DequantizedImporter,
    InPlaceImporter,
    JoinedPieces,
    Piece,
    WeightImporter,
    open_importer,
)
from hmt.weights.naming import beginnings, named

_ENCODINGS = {
    "F32": Encoding.F32,
    "F16": Encoding.F16,
    "BF16": Encoding.BF16,
    "F8_E4M3": Encoding.FP8_BLOCK,
}
_SCALE_SUFFIX = "_scale_inv"  # DeepSeek: NAME.weight_scale_inv, to be multiplied with


@dataclass(frozen=True, slots=True)
class BoundPart:
    """One array of a parameter: its bytes, and how many of them a row takes.

    row_bytes   0 where there is no telling
    """

    name: str
    file: FileRange
    row_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BoundParam:
    """One parameter and its bytes as published.

    format    how it lies in memory where nothing else is asked for: without loss
    parts     of a form what the form calls so, else the components of the format in their order
    form      what brings it there; None where it is published in that very format
    first     row of the published parameter, or of `table`, that is the first one here
    tensors   of the records, that it is made of
    table     of a shard: the name of the table that it has rows of
    """

    spec: ParamSpec
    source: str
    format: Format
    parts: tuple[BoundPart, ...]
    form: WeightImporter | None = None
    first: int = 0
    tensors: tuple[str, ...] = ()
    table: str = ""

    @property
    def data(self) -> FileRange:
        """The bytes of its first part: numbers, or codes."""
        return self.parts[0].file


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
    checkpoint = named(spec, checkpoint).checkpoint
    bound = {block.id: _bind_block(block, checkpoint) for block in spec.blocks}
    used = {name for block in bound.values() for param in block.params for name in param.tensors}
    used |= checkpoint.spare
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
    bound = (part for param in block.params for part in _bind_whole(param, block.id, checkpoint))
    return BoundBlock(block.id, tuple(bound))


def _bind_whole(param: ParamSpec, block: BlockId, checkpoint: Checkpoint) -> Iterator[BoundParam]:
    """A parameter; of a table that is published in shards, each as one, which is read as it is."""
    found = next((checkpoint.forms[n] for n in param.sources if n in checkpoint.forms), None)
    if param.role is not Role.TABLE or not isinstance(found, Joined):
        yield _bind_param(param, block, checkpoint)
        return
    _check_shape(param, param.sources[0], found.shape, checkpoint)
    first = 0
    for number, piece in enumerate(found.pieces):
        assert isinstance(piece, TensorRecord)
        own = replace(
            param, name=f"{param.name}.{number}", shape=piece.shape, sources=(piece.name,)
        )
        yield replace(_bind_param(own, block, checkpoint), first=first, table=param.name)
        first += piece.shape[0]


def _bind_param(param: ParamSpec, block: BlockId, checkpoint: Checkpoint) -> BoundParam:
    forms, records = checkpoint.forms, checkpoint.records
    source = next((name for name in param.sources if name in forms or name in records), None)
    if source is None:
        raise MissingFileError(
            f"{block} needs tensor {' or '.join(param.sources)}, and none of the "
            f"{len(records)} tensors in {checkpoint.path} is called that, or begins otherwise and "
            f"ends so; their names begin with {beginnings(checkpoint)}: "
            "a shard may be missing: download the checkpoint again"
        )
    found = forms.get(source) or records[source]
    shape = found.shape
    if isinstance(found, Published) and shape == (prod(param.shape),) and param.rows is None:
        shape = param.shape  # the file says how many numbers there are, and not in which rows
    elif param.shape[:1] == (1,) and shape == param.shape[1:]:
        shape = param.shape  # llama.cpp's quantiser writes a matrix of one row as a vector
    _check_shape(param, source, shape, checkpoint)
    if isinstance(found, Joined):
        return _bind_joined(param, source, found)
    if isinstance(found, Published):
        return _bind_published(param, source, found)
    encoding = _ENCODINGS.get(found.dtype)
    if encoding is Encoding.FP8_BLOCK and param.role is Role.VECTOR and len(param.shape) == 2:
        return _bind_published(param, source, _fp8_numbers(found, checkpoint))
    if encoding is None or (encoding is Encoding.FP8_BLOCK and param.role is not Role.LINEAR):
        expected = "F32, F16 or BF16" + (" or F8_E4M3" if param.role is Role.LINEAR else "")
        raise ShapeError(
            f"{source} has dtype {found.dtype}; as a {param.role} it must be {expected}"
        )
    if encoding is Encoding.FP8_BLOCK:
        return _bind_fp8(param, source, found, checkpoint)
    data = BoundPart("data", _rows_of(found, param.rows), _row_bytes(found))
    return BoundParam(param, source, Format(encoding), (data,), tensors=(found.name,))


def _bind_published(param: ParamSpec, source: str, found: Published) -> BoundParam:
    form = open_importer(found.form)
    try:
        wanted = form.format(param.shape)
    except CheckpointError as error:
        raise type(error)(f"{source}: {error}") from error
    if param.role is Role.VECTOR and not wanted.encoding.is_float and len(param.shape) > 1:
        # A matrix that transformers' code multiplies with, as Falcon's.
        form = DequantizedImporter(form) if isinstance(form, WeightImporter) else form
        wanted = form.format(param.shape)
    by_rows = all(part.row_bytes and part.row_step == 1 for part in found.parts.values())
    if param.role is Role.VECTOR and not wanted.encoding.is_float:
        raise ShapeError(
            f"{source} is published as {found.form.scheme!r}; as a {param.role} it must be numbers"
        )
    if param.role is Role.TABLE and not by_rows:
        raise ShapeError(
            f"{source} is published as {found.form.scheme!r}, whose rows cannot be read one by "
            f"one; as a {param.role} they must be"
        )
    parts = tuple(
        BoundPart(name, _rows_of_part(part, param, found), part.row_bytes)
        for name, part in found.parts.items()
    )
    tensors = tuple(part.tensor for part in found.parts.values())
    first = 0 if param.rows is None else param.rows[0]
    unpacks = None if isinstance(form, InPlaceImporter) else form
    return BoundParam(param, source, wanted, parts, unpacks, first, tensors)


def _bind_joined(param: ParamSpec, source: str, found: Joined) -> BoundParam:
    """Rows of pieces that lie one after the other; of each as many as belong to `param`."""
    first, end = param.rows or (0, _as_rows(found.shape)[0])
    bound: list[BoundParam] = []
    at = 0
    for piece in found.pieces:
        rows = _as_rows(piece.shape)[0]
        low, high = max(first - at, 0), min(end - at, rows)
        at += rows
        if low >= high:
            continue
        shape = (high - low, *found.shape[-1:])
        own = replace(param, shape=shape, rows=(low, high))
        if isinstance(piece, TensorRecord):
            data = PublishedPart(piece.name, _rows_of(piece, None), _row_bytes(piece))
            floats = FormName("floats", (("dtype", piece.dtype),))
            piece = Published(floats, piece.shape, {"data": data})
        bound.append(_bind_published(own, source, piece))
    pieces = tuple(
        Piece(one.form, one.first, one.spec.shape) for one in bound if one.form is not None
    )
    form = JoinedPieces(pieces)
    parts = tuple(
        BoundPart(f"{number}.{part.name}", part.file)
        for number, one in enumerate(bound)
        for part in one.parts
    )
    tensors = tuple(name for one in bound for name in one.tensors)
    return BoundParam(param, source, form.format(param.shape), parts, form, 0, tensors)


def _check_shape(
    param: ParamSpec, source: str, shape: tuple[int, ...], checkpoint: Checkpoint
) -> None:
    expected = param.shape
    if param.rows is None:
        fits = shape == expected
    else:
        count, width = _as_rows(shape)
        fits = width == expected[1:] and param.rows[1] <= count
    if not fits:
        rows = f" for rows {param.rows[0]} to {param.rows[1]}" if param.rows else ""
        raise ShapeError(
            f"{source} has shape {list(shape)}, but config.json says "
            f"{list(expected)}{rows}; config and weights of {checkpoint.path} "
            "do not belong together"
        )


def _as_rows(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """How many rows a tensor has, and how wide they are: all dimensions but the last are one."""
    return prod(shape[:-1] or shape), shape[1:] and shape[-1:]


def _row_bytes(record: TensorRecord) -> int:
    rows, _ = _as_rows(record.shape)
    return record.nbytes // rows if rows else 0


def _rows_of(record: TensorRecord, rows: tuple[int, int] | None) -> FileRange:
    if rows is None:
        return FileRange(record.file, record.offset, record.nbytes)
    row_bytes = _row_bytes(record)
    first, end = rows
    return FileRange(record.file, record.offset + first * row_bytes, (end - first) * row_bytes)


def _rows_of_part(part: PublishedPart, param: ParamSpec, whole: Published) -> FileRange:
    if param.rows is None or part.row_bytes == 0:
        return part.file
    first, end = param.rows
    _check_tiles(part.tensor, param.rows, part.row_step, whole.shape[0])
    begin = part.file.offset + first // part.row_step * part.row_bytes
    return FileRange(part.file.path, begin, -(-(end - first) // part.row_step) * part.row_bytes)


def _check_tiles(name: str, rows: tuple[int, int], height: int, all_rows: int) -> None:
    """Raise ShapeError unless rows are whole tiles; the last one may have fewer rows.

    Of a tile that all rows lie in, any rows are: they share its scales on every rank.
    """
    first, end = rows
    if height >= all_rows:
        return
    if first % height or (end % height and end != all_rows):
        raise ShapeError(f"rows {first} to {end} of {name} cut through an FP8 tile")


def _bind_fp8(
    param: ParamSpec, source: str, record: TensorRecord, checkpoint: Checkpoint
) -> BoundParam:
    tile, scales = _fp8_scales(record, checkpoint)
    tiles = None
    if param.rows is not None:
        first, end = param.rows
        _check_tiles(record.name, param.rows, tile[0], record.shape[0])
        tiles = (first // tile[0], -(-end // tile[0]))
    parts = (
        BoundPart("data", _rows_of(record, param.rows), _row_bytes(record)),
        BoundPart("scales", _rows_of(scales, tiles)),
    )
    form = Format(Encoding.FP8_BLOCK, tile=tile)
    return BoundParam(param, source, form, parts, tensors=(record.name, scales.name))


def _fp8_numbers(record: TensorRecord, checkpoint: Checkpoint) -> Published:
    """A small matrix that is multiplied with as it is, and was published in FP8 all the same."""
    tile, scales = _fp8_scales(record, checkpoint)
    form = FormName("fp8", (("scale_dtype", scales.dtype), ("tile", tile)))
    parts = {
        "weight": PublishedPart(record.name, _rows_of(record, None), 0),
        "scales": PublishedPart(scales.name, _rows_of(scales, None), 0),
    }
    return Published(form, record.shape, parts)


def _fp8_scales(
    record: TensorRecord, checkpoint: Checkpoint
) -> tuple[tuple[int, int], TensorRecord]:
    """The tile that shares a scale, and the scales.  Raises where they do not fit the matrix."""
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
    return tile, scales


def published_bytes(blocks: Mapping[BlockId, BoundBlock]) -> int:
    """Bytes of all distinct parameters as published, scales included."""
    params = [param for block in blocks.values() for param in block.params]
    multiplied = {param.source for param in params if param.spec.role is not Role.TABLE}
    ranges = {
        part.file
        for param in params
        # A tied embedding is the head's tensor under another name: count it once.
        if param.spec.role is not Role.TABLE or param.source not in multiplied
        for part in param.parts
    }
    return sum(part.nbytes for part in ranges)

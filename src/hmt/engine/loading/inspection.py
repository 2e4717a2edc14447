"""What a checkpoint or pack holds, and how it would run here; no weight is read."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from hmt.base.errors import CheckpointError, MissingFileError
from hmt.base.units import GIB
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.checkpoint import FileRange, Joined, Published, TensorRecord
from hmt.contracts.encoding import Encoding
from hmt.contracts.model import PAGE_TOKENS, Model, ModelSpec
from hmt.engine.loading.source import Source, open_source
from hmt.kernels.describe import kernel_name
from hmt.kvcache import page_bytes
from hmt.models import open_model, with_vision
from hmt.quant import Format, empty_weight
from hmt.weights import BlockLayout, named
from hmt.weights.binding import BoundParam

_MATRIX = (128, 512)  # every group and tile in use divides it


@dataclass(frozen=True, slots=True)
class Stored:
    """Parameters of one kind of blocks that are stored in one way.

    kind             of blocks, or where these are not known "tensors"
    encoding         in memory, with what goes with it, such as "int4, groups of 32"
    count            of parameters
    numbers          that they hold
    nbytes           in memory, scales and what else goes with them included
    kernel           what multiplies with them here; "" where nothing does
    published        how the file holds them, such as "Q4_K" or "awq"
    published_bytes  in the file, scales included
    """

    kind: str
    encoding: str
    count: int
    numbers: int
    nbytes: int
    kernel: str
    published: str
    published_bytes: int

    @property
    def bits(self) -> float:
        """Per number, in memory."""
        return 8 * self.nbytes / self.numbers if self.numbers else 0.0

    @property
    def published_bits(self) -> float:
        """Per number, in the file."""
        return 8 * self.published_bytes / self.numbers if self.numbers else 0.0


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found.

    architecture    as config.json names it
    problem         why it cannot be run; "" if it can
    remark          what there is to know of how it runs
    missing, extra  names of tensors
    largest         the largest block, and its bytes in memory
    kv_token_bytes  keys and values of one position
    """

    path: Path
    is_pack: bool
    architecture: str
    published_bytes: int
    stored: tuple[Stored, ...]
    problem: str = ""
    remark: str = ""
    layers: int = 0
    max_context: int = 0
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    largest: tuple[str, int] | None = None
    kv_token_bytes: int = 0

    @property
    def kv_tokens_per_gib(self) -> int:
        """Positions whose keys and values take one GiB; 0 where that is not known."""
        return GIB // self.kv_token_bytes if self.kv_token_bytes else 0


def inspect(path: Path) -> Inspection:
    """Look at the checkpoint or pack in `path`.

    What cannot be run is described as far as it can be.  Raises CheckpointError for what cannot be
    opened at all.
    """
    source = open_source(path)
    dtype = torch.bfloat16 if "BF16" in source.dtypes else torch.float32
    try:
        model = open_model(source.config, source.path, dtype)
        model = with_vision(model, source.config, source.path, source.tensors)
    except CheckpointError as error:
        return _unknown(source, str(error))
    spec = model.spec
    try:
        layouts = source.weights(spec, None).layouts
    except CheckpointError as error:
        absent = _missing(spec, source) if isinstance(error, MissingFileError) else ()
        found = _unknown(source, str(error))
        return _with_sizes(dataclasses.replace(found, missing=absent), model)
    largest = max(layouts.values(), key=lambda layout: layout.slot_bytes)
    return _with_sizes(
        Inspection(
            path=source.path,
            is_pack=source.pack is not None,
            architecture=spec.architecture,
            published_bytes=source.published_bytes,
            stored=tuple(_stored(layouts, source)),
            extra=_extra(spec, source, layouts),
            largest=(str(largest.id), largest.slot_bytes),
        ),
        model,
    )


def _with_sizes(found: Inspection, model: Model) -> Inspection:
    spec = model.spec
    return dataclasses.replace(
        found,
        remark=", ".join(spec.remarks),
        layers=spec.layers,
        max_context=spec.max_context,
        kv_token_bytes=page_bytes(spec.kv_layers.values(), model.dtype) // PAGE_TOKENS,
    )


def _unknown(source: Source, problem: str) -> Inspection:
    """Tensors by dtype, where it is not known what they are for."""
    names = source.config.get("architectures")
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for record in source.checkpoint.records.values():
        for place, number in enumerate((1, prod(record.shape), record.nbytes)):
            sizes[record.dtype.lower()][place] += number
    return Inspection(
        path=source.path,
        is_pack=source.pack is not None,
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        published_bytes=source.published_bytes,
        stored=tuple(
            Stored("tensors", dtype, count, numbers, nbytes, "", dtype, nbytes)
            for dtype, (count, numbers, nbytes) in sorted(sizes.items())
        ),
        problem=problem,
    )


@dataclass(slots=True)
class _Sum:
    """What several parameters take; those that share bytes of a file count these once."""

    count: int = 0
    numbers: int = 0
    nbytes: int = 0
    ranges: set[FileRange] = dataclasses.field(default_factory=set)


def _stored(layouts: Mapping[BlockId, BlockLayout], source: Source) -> Iterator[Stored]:
    """What lies in blocks, by kind and form; a table that another block holds counts there."""
    sums: dict[tuple[BlockKind, str, Format], _Sum] = defaultdict(_Sum)
    for block, layout in layouts.items():
        for placed in layout.placed:
            shape, param = placed.param.spec.shape, placed.param
            one = sums[block.kind, _published(param, source), placed.format]
            one.count += 1
            one.numbers += prod(shape)
            one.nbytes += sum(part.nbytes for part in placed.format.components(shape))
            one.ranges |= {part.file for part in param.parts}
    order = list(BlockKind)
    for (kind, published, form), one in sorted(
        sums.items(), key=lambda item: (order.index(item[0][0]), -item[1].nbytes)
    ):
        # Rows of a table are looked up, not multiplied with.
        kernel = "" if kind is BlockKind.EMBEDDING else _kernel(form)
        in_file = sum(part.nbytes for part in one.ranges)
        yield Stored(
            kind.value, describe(form), one.count, one.numbers, one.nbytes, kernel, published,
            one.nbytes if source.pack is not None else in_file,
        )  # fmt: skip


def _published(param: BoundParam, source: Source) -> str:
    """How a file holds a parameter, in a word or two."""
    found = source.checkpoint.forms.get(param.source)
    if param.form is None or found is None:
        return param.format.encoding.value
    pieces = found.pieces if isinstance(found, Joined) else (found,)
    return " and ".join(dict.fromkeys(map(_name_of, pieces)))


def _name_of(found: TensorRecord | Published) -> str:
    if isinstance(found, TensorRecord):
        return found.dtype.lower()
    scheme, options = found.form.scheme, dict(found.form.options)
    if scheme.startswith("gguf"):
        kinds = dict.fromkeys(str(options[n]) for n in ("kind", "keys", "values") if n in options)
        return " and ".join(kinds)
    if scheme == "floats":
        return str(options["dtype"]).lower()
    return f"{scheme}, {options['bits']} bits" if "bits" in options else scheme


def describe(form: Format) -> str:
    """A format in words."""
    text = form.encoding.value
    if form.encoding is Encoding.FP8_BLOCK:
        return f"{text}, tiles of {form.tile[0]} x {form.tile[1]}"
    text += f", groups of {form.group_size}" if form.group_size else ""
    text += ", zero points" if form.zeros else ""
    return f"{text}, minima" if form.minima else text


def _kernel(form: Format) -> str:
    return kernel_name(empty_weight(form, _MATRIX))


def _missing(spec: ModelSpec, source: Source) -> tuple[str, ...]:
    checkpoint = named(spec, source.checkpoint).checkpoint
    there = {*checkpoint.records, *checkpoint.forms}
    return tuple(
        param.sources[0]
        for block in spec.blocks
        for param in block.params
        if not any(name in there for name in param.sources)
    )


def _extra(
    spec: ModelSpec, source: Source, layouts: Mapping[BlockId, BlockLayout]
) -> tuple[str, ...]:
    """Tensors of which no parameter has a byte, and that the model does not expect either."""
    used: dict[Path, list[FileRange]] = defaultdict(list)
    for layout in layouts.values():
        params = [placed.param for placed in layout.placed]
        params += [table.param for table in layout.tables.values()]
        for part in (part for param in params for part in _ranges(param)):
            used[part.path].append(part)
    starts = {(path, part.offset) for path, parts in used.items() for part in parts}
    known = [re.compile(pattern) for pattern in spec.ignored]
    return tuple(
        record.name
        for record in source.checkpoint.records.values()
        if (record.file, record.offset) not in starts
        and not any(_overlap(record, part) for part in used[record.file])
        and record.name not in source.checkpoint.spare
        and not any(pattern.search(record.name) for pattern in known)
    )


def _overlap(record: TensorRecord, part: FileRange) -> bool:
    return part.offset < record.offset + record.nbytes and record.offset < part.offset + part.nbytes


def _ranges(found: Any) -> Iterator[FileRange]:
    """All ranges of files in a bound parameter, whatever it is made of."""
    if isinstance(found, FileRange):
        yield found
    elif isinstance(found, tuple):
        for one in found:
            yield from _ranges(one)
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        for field in dataclasses.fields(found):
            yield from _ranges(getattr(found, field.name))

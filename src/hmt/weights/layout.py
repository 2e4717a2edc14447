"""Layout: how a block lies in its slot, and which reads fill it.

Parameters that are kept as published are read straight into the slot: the slot holds the aligned
file ranges themselves, so that O_DIRECT needs no copy, and neighbours in the file become one read.
Parameters that are re-encoded on load go through a staging buffer, one after the other.
A pack holds slots as they are laid out without any range read in place: see hmt.weights.pack.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from hmt.base.units import KIB, MIB, round_down, round_up
from hmt.contracts.blocks import BlockId, BlockSize, ParamSpec, Role
from hmt.contracts.checkpoint import FileRange
from hmt.contracts.encoding import PANEL_ROWS, Activations, Encoding, WeightTensor
from hmt.memory import PAGE_BYTES, size_classes
from hmt.quant import Format, component_bytes, row_slice, view_weight
from hmt.weights.binding import BoundBlock, BoundParam

_MERGE_GAP_BYTES = 64 * KIB  # reading this much for nothing costs less than another request
_COMPONENT_ALIGNMENT = 64
# Tables in a form of their own come into memory so many published bytes at a time: they are the
# largest parameters, and staging memory for one of them whole would be missing elsewhere.
_TABLE_PIECE_BYTES = 16 * MIB
MOST_KEPT_SUM_BYTES = 4 * MIB  # of a table of 2 GiB


@dataclass(frozen=True, slots=True)
class AlignedRead:
    """A 4 KiB-aligned file range and its place in a buffer.

    useful_end     file offset behind the last byte that is needed
    useful_bytes   of parameters, without padding and what lies between them; None: all of them
    """

    file: FileRange
    at: int
    useful_end: int
    useful_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedParam:
    """Where a parameter's components (as `Format.components` lists them) lie in the slot."""

    param: BoundParam
    format: Format
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagedParam:
    """A parameter that is converted on load: what to read into staging, and where it goes.

    reads    none where those of the one before have brought its bytes, too
    source   its components in the staging buffer, as published or unpacked; None where it is
             unpacked straight into the slot
    parts    of one in a form of its own: (offset, bytes) of its parts in the staging buffer
    rows     (first, past last) of the parameter's rows that come with this one; None: all
    """

    placed: PlacedParam
    reads: tuple[AlignedRead, ...]
    source: PlacedParam | None
    staging_bytes: int
    parts: tuple[tuple[int, int], ...] = ()
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class RowHolder:
    """A block's parameter that holds rows [first, end) of a table."""

    block: BlockId
    name: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [first, end) of one part of a table, one after the other in a file."""

    first: int
    end: int
    file: FileRange


@dataclass(frozen=True, slots=True)
class RowSums:
    """Checksums of the rows of a pack's table, so that single rows can be checked.

    A run is `run_rows` rows of a span (its last run may have fewer).  `file` holds the xxh3_64 of
    each run, u64 little-endian, in the order of the spans, padded to whole pages; `seal` is the
    checksum of `file` itself.
    """

    run_rows: int
    file: FileRange
    seal: int

    @property
    def kept_bytes(self) -> int:
        """Memory for all of them, once a row was read; 0: too many, a page is read with each run.

        Those of 95 GiB of n-grams would take 195 MiB.
        """
        return self.file.nbytes if self.file.nbytes <= MOST_KEPT_SUM_BYTES else 0


@dataclass(frozen=True, slots=True)
class TablePart:
    """One array of a table on disk, as published; in a pack, as it lies there.

    spans   where the rows are, in order
    """

    name: str
    row_bytes: int
    spans: tuple[RowSpan, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A parameter whose rows are looked up, and the blocks that hold them once in memory.

    parts   of numbers there is one
    sums    of a pack's table
    """

    param: BoundParam
    holders: tuple[RowHolder, ...]
    parts: tuple[TablePart, ...]
    sums: RowSums | None = None

    @property
    def width(self) -> int:
        """Numbers per row."""
        return self.param.spec.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes per row, of the largest part."""
        return max(part.row_bytes for part in self.parts)

    @property
    def run_rows(self) -> int:
        """Rows that are read together."""
        return self.sums.run_rows if self.sums is not None else 1


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Everything needed to load a block and to see its parameters.

    seal   of a pack's block: the xxh3_64 of its slot's bytes
    """

    id: BlockId
    slot_bytes: int
    reads: tuple[AlignedRead, ...]
    staged: tuple[StagedParam, ...]
    placed: tuple[PlacedParam, ...]
    tables: Mapping[str, Table]
    seal: int | None = None

    @property
    def staging_bytes(self) -> int:
        """The largest staging buffer that loading needs; 0 when everything is read in place."""
        return max((param.staging_bytes for param in self.staged), default=0)

    @property
    def read_bytes(self) -> int:
        """Bytes that leave the disk when the block is loaded."""
        everything = (*self.reads, *(read for param in self.staged for read in param.reads))
        return sum(read.file.nbytes for read in everything)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, without what lies between and behind them in the slot."""
        return sum(
            part.nbytes
            for placed in self.placed
            for part in placed.format.components(placed.param.spec.shape)
        )

    @property
    def size(self) -> BlockSize:
        """What the planner needs to know."""
        numbers: Counter[str] = Counter()
        rows = 0
        for placed in self.placed:
            shape = placed.param.spec.shape
            if placed.param.spec.role is Role.LINEAR:
                numbers[placed.format.kernel] += prod(shape)
                rows += prod(shape[:-1])
        usual = max(numbers, key=numbers.__getitem__, default="")
        # What is converted is kept as it then is, and read like that from the second time on.
        read = self.parameter_bytes if self.staged else self.read_bytes
        return BlockSize(self.id, self.slot_bytes, read, numbers.total(), usual, rows)

    def views(self, slot: torch.Tensor) -> dict[str, WeightTensor]:
        """The block's parameters in `slot` (uint8 [slot_bytes]); views, nothing is copied."""
        return {placed.param.spec.name: view_placed(placed, slot) for placed in self.placed}


def view_placed(
    placed: PlacedParam, buffer: torch.Tensor, rows: tuple[int, int] | None = None
) -> WeightTensor:
    """A parameter, or `rows` of it, in `buffer` (uint8); copied only if it lies at an odd address.

    Rows (first, past last) begin at a multiple of 16, and are copied nowhere.
    """
    shape = placed.param.spec.shape
    parts = []
    for component, at in zip(placed.format.components(shape), placed.at, strict=True):
        part = buffer[at : at + component.nbytes]
        parts.append(part.clone() if at % component.dtype.itemsize else part)
    whole = view_weight(placed.format, shape, *parts)
    return whole if rows is None else row_slice(whole, *rows)


Target = Callable[[ParamSpec, BlockId], Format | None]


def lay_out(
    blocks: Mapping[BlockId, BoundBlock], target: Target, *, in_place: bool = True
) -> dict[BlockId, BlockLayout]:
    """Decide every block's slot.  `target` names the format to convert a parameter to, or None.

    Without `in_place` every parameter goes through staging, so that slots depend on shapes and
    formats alone, and not on where a file has them: the form of packs.

    A table whose rows are all held, unconverted, by other blocks (a tied embedding, by the chunks
    of the head) takes no memory of its own.  Slots of a checkpoint that are nearly equal are made
    equal; a pack's equal blocks have equal slots anyway.
    """
    layouts = {block.id: _lay_out_block(block, target, in_place) for block in blocks.values()}
    for layout in layouts.values():
        for name, table in layout.tables.items():
            shared = _other_holders(table.param, layout.id, layouts)
            if shared is not None:
                tables = {**layout.tables, name: replace(table, holders=shared)}
                layouts[layout.id] = BlockLayout(layout.id, 0, (), (), (), tables)
    if not in_place:
        return layouts
    # Rounded here and not by the pool, so that plan, ledger and pool count the same bytes.
    slots = size_classes(layout.slot_bytes for layout in layouts.values())
    return {
        b: replace(layout, slot_bytes=slots[layout.slot_bytes]) for b, layout in layouts.items()
    }


def _other_holders(
    param: BoundParam, own: BlockId, layouts: Mapping[BlockId, BlockLayout]
) -> tuple[RowHolder, ...] | None:
    holders = [
        RowHolder(layout.id, placed.param.spec.name, *(placed.param.spec.rows or (0, rows)))
        for layout in layouts.values()
        if layout.id != own
        for placed in layout.placed
        if placed.param.source == param.source
        and _same_bytes(placed.format, param.format)
        and (rows := placed.param.spec.shape[0])
    ]
    holders.sort(key=lambda holder: holder.first)
    covered = 0
    for holder in holders:
        if holder.first != covered:
            return None
        covered = holder.end
    return tuple(holders) if covered == param.spec.shape[0] else None


def _lay_out_block(block: BoundBlock, target: Target, in_place: bool) -> BlockLayout:
    direct, converted = [], []
    for param in block.params:
        wanted = target(param.spec, block.id) if param.spec.role is Role.LINEAR else None
        if wanted is not None or param.form is not None:  # packs have few bits without a form
            wanted = _unless_smaller(param, wanted)
        if wanted is not None:
            converted.append((param, wanted))
        elif in_place and _lies_aligned(param):
            direct.append(param)
        else:
            converted.append((param, param.format))
    reads, where, end = _place_reads(direct)
    placed = [
        PlacedParam(param, param.format, tuple(where[part.file] for part in param.parts))
        for param in direct
    ]
    staged: list[StagedParam] = []
    for param, wanted in converted:
        target_place, end = _place_components(param, wanted, end)
        staged += _stage(target_place)
        placed.append(target_place)
    staged = _read_once(staged)
    shards: dict[str, list[BoundParam]] = {}
    for param in block.params:
        if param.spec.role is Role.TABLE:
            shards.setdefault(param.table or param.spec.name, []).append(param)
    tables = {name: _own_table(block.id, name, params) for name, params in shards.items()}
    return BlockLayout(
        block.id, round_up(end, PAGE_BYTES), reads, tuple(staged), tuple(placed), tables
    )


def _unless_smaller(param: BoundParam, wanted: Format | None) -> Format:
    """The format for a parameter where `wanted` is asked for.

    What is published in few bits is not rounded again to codes of as many, whatever scales may
    save: it stays as it is, and is multiplied with what was asked for.
    """
    own = param.format
    if wanted is None:
        return own
    codes = [component_bytes(form, param.spec.shape)[0] for form in (wanted, own)]
    has_codes = not own.encoding.is_float and own.encoding is not Encoding.FP8_BLOCK
    if codes[0] < codes[1] or not has_codes:
        return wanted
    return own.with_activations(wanted.activations)


def with_int8_activations(layouts: Mapping[BlockId, BlockLayout]) -> dict[BlockId, BlockLayout]:
    """The same blocks, whose linear weights of 8 bits and fewer are multiplied with int8."""

    def rounded(placed: PlacedParam) -> PlacedParam:
        if placed.param.spec.role is not Role.LINEAR:
            return placed
        return replace(placed, format=placed.format.with_activations(Activations.INT8_TOKEN))

    return {
        block: replace(
            layout,
            placed=tuple(map(rounded, layout.placed)),
            staged=tuple(replace(part, placed=rounded(part.placed)) for part in layout.staged),
        )
        for block, layout in layouts.items()
    }


def _same_bytes(one: Format, other: Format) -> bool:
    """Whether they differ in activations at most."""
    return replace(one, activations=Activations.FLOAT) == other


def _stage(placed: PlacedParam) -> list[StagedParam]:
    """How a parameter that is converted comes into memory: at once, or piece by piece."""
    param = placed.param
    if param.form is None:
        reads, where, staging = _place_reads([param])
        source = PlacedParam(param, param.format, tuple(where[part.file] for part in param.parts))
        return [StagedParam(placed, reads, source, staging)]
    if param.spec.role is not Role.TABLE:
        return [_stage_rows(placed, param, None)]
    row_bytes = sum(part.row_bytes for part in param.parts)
    step = round_up(max(1, _TABLE_PIECE_BYTES // row_bytes), PANEL_ROWS)
    height = param.spec.shape[0]
    pieces = [(first, min(first + step, height)) for first in range(0, height, step)]
    return [_stage_rows(placed, _some_rows(param, rows), rows) for rows in pieces]


def _read_once(staged: list[StagedParam]) -> list[StagedParam]:
    """Those whose bytes are the same follow each other, and the first of them reads for all."""
    together: dict[tuple[AlignedRead, ...], list[StagedParam]] = {}
    for stage in staged:
        together.setdefault(stage.reads, []).append(stage)
    return [
        stage if number == 0 else replace(stage, reads=())
        for stages in together.values()
        for number, stage in enumerate(stages)
    ]


def _stage_rows(
    placed: PlacedParam, param: BoundParam, rows: tuple[int, int] | None
) -> StagedParam:
    """`param`, in a form of its own, has the bytes of `rows` of the placed one."""
    reads, where, end = _place_reads([param])
    parts = tuple((where[part.file], part.file.nbytes) for part in param.parts)
    source = None
    if not _same_bytes(placed.format, param.format):
        source, end = _place_components(param, param.format, end)
    return StagedParam(placed, reads, source, end, parts, rows)


def _some_rows(param: BoundParam, rows: tuple[int, int]) -> BoundParam:
    """Some rows of a parameter whose parts are all made of rows."""
    first, end = rows
    parts = tuple(
        replace(
            part,
            file=FileRange(
                part.file.path,
                part.file.offset + first * part.row_bytes,
                (end - first) * part.row_bytes,
            ),
        )
        for part in param.parts
    )
    spec = replace(param.spec, shape=(end - first, *param.spec.shape[1:]))
    return replace(param, spec=spec, parts=parts, first=param.first + first)


def _own_table(block: BlockId, name: str, shards: Sequence[BoundParam]) -> Table:
    """The table `name` of a block, of which each shard holds rows; they are in order."""
    whole = shards[0]
    if whole.table:
        rows = sum(shard.spec.shape[0] for shard in shards)
        spec = replace(whole.spec, name=name, shape=(rows, *whole.spec.shape[1:]))
        whole = replace(whole, spec=spec, table="")
    firsts = [shard.first if shard.table else 0 for shard in shards]
    rows_of = [(first, first + s.spec.shape[0]) for first, s in zip(firsts, shards, strict=True)]
    pairs = list(zip(shards, rows_of, strict=True))
    holders = tuple(RowHolder(block, shard.spec.name, *rows) for shard, rows in pairs)
    parts = []
    for number, part in enumerate(whole.parts):
        spans = tuple(RowSpan(*rows, shard.parts[number].file) for shard, rows in pairs)
        parts.append(TablePart(part.name, part.row_bytes, spans))
    return Table(whole, holders, tuple(parts))


def _lies_aligned(param: BoundParam) -> bool:
    """Whether its numbers start at a multiple of their size, as every writer in use today does."""
    components = param.format.components(param.spec.shape)
    return all(
        part.file.offset % component.dtype.itemsize == 0
        for part, component in zip(param.parts, components, strict=True)
    )


def _place_components(param: BoundParam, wanted: Format, start: int) -> tuple[PlacedParam, int]:
    at, end = [], start
    for component in wanted.components(param.spec.shape):
        at.append(round_up(end, _COMPONENT_ALIGNMENT))
        end = at[-1] + component.nbytes
    return PlacedParam(param, wanted, tuple(at)), end


def _place_reads(
    params: list[BoundParam],
) -> tuple[tuple[AlignedRead, ...], dict[FileRange, int], int]:
    """Aligned reads that cover all parts; where each part is after them; how many bytes that is."""
    parts = sorted(
        {part.file for param in params for part in param.parts},
        key=lambda part: (str(part.path), part.offset),
    )
    merged: list[list[FileRange]] = []
    for part in parts:
        previous = merged[-1][-1] if merged else None
        near = (
            previous is not None
            and previous.path == part.path
            and part.offset - (previous.offset + previous.nbytes) < _MERGE_GAP_BYTES
        )
        if near:
            merged[-1].append(part)
        else:
            merged.append([part])
    reads: list[AlignedRead] = []
    where: dict[FileRange, int] = {}
    end = 0
    for group in merged:
        begin = round_down(group[0].offset, PAGE_BYTES)
        useful_end = max(part.offset + part.nbytes for part in group)
        nbytes = round_up(useful_end, PAGE_BYTES) - begin
        useful = sum(part.nbytes for part in group)
        reads.append(AlignedRead(FileRange(group[0].path, begin, nbytes), end, useful_end, useful))
        where |= {part: end + part.offset - begin for part in group}
        end += nbytes
    return tuple(reads), where, end

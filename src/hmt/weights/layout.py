"""Layout: how a block lies in its slot, and which reads fill it.

Parameters that are kept as published are read straight into the slot: the slot holds the aligned
file ranges themselves, so that O_DIRECT needs no copy, and neighbours in the file become one read.
Parameters that are re-encoded on load go through a staging buffer, one after the other.
A pack holds slots as they are laid out without any range read in place: see hmt.weights.pack.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from hmt.base.units import KIB, round_down, round_up
from hmt.contracts.blocks import BlockId, BlockKind, BlockSize, ParamSpec, Role
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.memory import PAGE_BYTES, size_classes
from hmt.quant import Format, view_weight
from hmt.weights.binding import BoundBlock, BoundParam, FileRange

_MERGE_GAP_BYTES = 64 * KIB  # reading this much for nothing costs less than another request
_COMPONENT_ALIGNMENT = 64
_ELEMENT_BYTES = {Encoding.F32: 4, Encoding.F16: 2, Encoding.BF16: 2, Encoding.FP8_BLOCK: 1}


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
    """A parameter that is converted on load: what to read into staging, and where it goes."""

    placed: PlacedParam
    reads: tuple[AlignedRead, ...]
    source: PlacedParam  # its components as published, in the staging buffer
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class RowHolder:
    """A block's parameter that holds rows [first, end) of a table."""

    block: BlockId
    name: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [first, end) of a table, one after the other in a file."""

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


@dataclass(frozen=True, slots=True)
class Table:
    """A parameter whose rows are looked up, and the blocks that hold them once in memory.

    spans   where the rows are on disk, in order
    sums    of a pack's table
    """

    param: BoundParam
    holders: tuple[RowHolder, ...]
    spans: tuple[RowSpan, ...]
    sums: RowSums | None = None

    @property
    def width(self) -> int:
        """Numbers per row."""
        return self.param.spec.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.width * _ELEMENT_BYTES[self.param.encoding]

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
        """Bytes that leave the drive when the block is loaded."""
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
        for placed in self.placed:
            if placed.param.spec.role is Role.LINEAR:
                numbers[placed.format.kernel] += prod(placed.param.spec.shape)
        usual = max(numbers, key=numbers.__getitem__, default="")
        return BlockSize(self.id, self.slot_bytes, self.read_bytes, numbers.total(), usual)

    def views(self, slot: torch.Tensor) -> dict[str, WeightTensor]:
        """The block's parameters in `slot` (uint8 [slot_bytes]); views, nothing is copied."""
        return {placed.param.spec.name: view_placed(placed, slot) for placed in self.placed}


def view_placed(placed: PlacedParam, buffer: torch.Tensor) -> WeightTensor:
    """A parameter as it lies in `buffer` (uint8); copied only if it lies at an odd address."""
    shape = placed.param.spec.shape
    parts = []
    for component, at in zip(placed.format.components(shape), placed.at, strict=True):
        part = buffer[at : at + component.nbytes]
        parts.append(part.clone() if at % component.dtype.itemsize else part)
    return view_weight(placed.format, shape, *parts)


def published_format(param: BoundParam) -> Format:
    """The format in which the checkpoint holds `param`."""
    return Format(param.encoding, tile=param.tile)


Target = Callable[[ParamSpec, BlockKind], Format | None]


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
        and placed.format == published_format(param)
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
        wanted = target(param.spec, block.id.kind) if param.spec.role is Role.LINEAR else None
        if wanted is not None:
            converted.append((param, wanted))
        elif in_place and _lies_aligned(param):
            direct.append(param)
        else:
            converted.append((param, published_format(param)))
    reads, placed, end = _place_reads(direct)
    staged = []
    for param, wanted in converted:
        target_place, end = _place_components(param, wanted, end)
        own_reads, own_placed, staging = _place_reads([param])
        staged.append(StagedParam(target_place, own_reads, own_placed[0], staging))
        placed.append(target_place)
    tables = {
        param.spec.name: _own_table(block.id, param)
        for param in block.params
        if param.spec.role is Role.TABLE
    }
    return BlockLayout(
        block.id, round_up(end, PAGE_BYTES), reads, tuple(staged), tuple(placed), tables
    )


def _own_table(block: BlockId, param: BoundParam) -> Table:
    rows = param.spec.shape[0]
    return Table(
        param,
        (RowHolder(block, param.spec.name, 0, rows),),
        (RowSpan(0, rows, param.data),),
    )


def _lies_aligned(param: BoundParam) -> bool:
    """Whether its numbers start at a multiple of their size, as every writer in use today does."""
    aligned = param.data.offset % _ELEMENT_BYTES[param.encoding] == 0
    return aligned and (param.scales is None or param.scales.offset % 4 == 0)


def _place_components(param: BoundParam, wanted: Format, start: int) -> tuple[PlacedParam, int]:
    at, end = [], start
    for component in wanted.components(param.spec.shape):
        at.append(round_up(end, _COMPONENT_ALIGNMENT))
        end = at[-1] + component.nbytes
    return PlacedParam(param, wanted, tuple(at)), end


def _place_reads(
    params: list[BoundParam],
) -> tuple[tuple[AlignedRead, ...], list[PlacedParam], int]:
    """Aligned reads that cover all components, and where each component is after them."""
    parts = sorted(
        {part for param in params for part in (param.data, param.scales) if part is not None},
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
    placed = [
        PlacedParam(
            param,
            published_format(param),
            tuple(where[part] for part in (param.data, param.scales) if part is not None),
        )
        for param in params
    ]
    return tuple(reads), placed, end

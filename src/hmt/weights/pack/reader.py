"""Opening a pack: layouts whose blocks are one read each, with nothing to convert."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hmt.base.errors import DamagedPackError, MissingFileError, PackError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.checkpoint import FileRange
from hmt.contracts.encoding import Activations
from hmt.contracts.model import ModelSpec
from hmt.weights.binding import BoundBlock, BoundParam, BoundPart
from hmt.weights.checksum import checksum
from hmt.weights.layout import (
    AlignedRead,
    BlockLayout,
    PlacedParam,
    RowSpan,
    RowSums,
    Table,
    Target,
    lay_out,
)
from hmt.weights.pack.manifest import (
    CONFIG,
    MANIFEST,
    VOCABULARY,
    Manifest,
    PackedBlock,
    PackedParam,
    read_manifest,
)
from hmt.weights.pack.partial_pack import is_partial


@dataclass(frozen=True)
class Pack:
    """An opened pack; no block has been read.

    config       the checkpoint's parsed config.json
    vocabulary   what the GGUF file said of its tokenizer; None where there are files
    """

    path: Path
    manifest: Manifest
    config: Mapping[str, Any]
    vocabulary: Mapping[str, Any] | None = None

    def layouts(self, spec: ModelSpec, target: Target) -> dict[BlockId, BlockLayout]:
        """The blocks of `spec`, converted as `target` says, as they lie in the pack.

        Raises PackError where this HMT would lay out a block in another way.
        """
        # A machine that cannot run the tower (no Pillow, other transformers) reads text from here.
        sees = any(block.id.kind is BlockKind.VISION for block in spec.blocks)
        packed = {
            block.id: block
            for block in self.manifest.blocks
            if sees or block.id.kind is not BlockKind.VISION
        }
        if list(packed) != [block.id for block in spec.blocks]:
            raise self._other_layout(f"{len(packed)} blocks, not {len(spec.blocks)}")
        bound = {block.id: self._bind(block, packed[block.id]) for block in spec.blocks}
        wanted = lay_out(bound, target, in_place=False)
        for layout in wanted.values():
            self._check(layout, packed[layout.id])
        return {
            layout.id: self._read_from_here(layout, wanted, packed) for layout in wanted.values()
        }

    def bound(self, spec: ModelSpec, target: Target) -> dict[BlockId, BoundBlock]:
        """The blocks of `spec` as checkpoints have theirs: parameters that can be read one by one.

        They lie as the pack has them.  Checksums are of whole blocks, and these are not compared.
        Raises as `layouts`.
        """
        found = {}
        for layout in self.layouts(spec, target).values():
            params: list[BoundParam] = []
            for placed in layout.placed:
                if placed.param.spec.role is not Role.TABLE:
                    params.append(_as_bound(placed, layout.reads[0].file))
            for name, table in layout.tables.items():
                params += _table_parts(name, table)
            found[layout.id] = BoundBlock(layout.id, tuple(params))
        return found

    def _bind(self, block: BlockSpec, packed: PackedBlock) -> BoundBlock:
        expected = [(param.name, param.shape, param.rows) for param in block.params]
        if [(param.name, param.shape, param.rows) for param in packed.params] != expected:
            raise self._other_layout(f"other parameters in {block.id}")
        params = zip(block.params, packed.params, strict=True)
        return BoundBlock(block.id, tuple(self._bound(spec, param) for spec, param in params))

    def _bound(self, spec: ParamSpec, packed: PackedParam) -> BoundParam:
        """A parameter as it was published; of its bytes, which are not here, only the sizes."""
        parts = tuple(
            BoundPart(
                part.name,
                FileRange(self.path / MANIFEST, 0, part.nbytes),
                part.nbytes // spec.shape[0],
            )
            for part in packed.published.components(spec.shape)
        )
        return BoundParam(spec, packed.source, packed.published, parts)

    def _check(self, layout: BlockLayout, packed: PackedBlock) -> None:
        """Whether the slot that this HMT makes of a block is the one that was written."""
        nbytes = 0 if packed.extent is None else packed.extent.nbytes
        if layout.slot_bytes != nbytes:
            raise self._other_layout(f"{nbytes} bytes of {layout.id}, not {layout.slot_bytes}")
        written = {param.name: param for param in packed.params}
        for placed in layout.placed:
            param = written[placed.param.spec.name]
            form = replace(placed.format, activations=Activations.FLOAT)
            if (form, placed.at) != (param.format, param.at):
                raise self._other_layout(f"{param.name} of {layout.id} in another form or place")

    def _other_layout(self, what: str) -> PackError:
        return PackError(
            f"{self.path} holds {what}, as this HMT would lay it out: another version has made it; "
            "convert the checkpoint again (`hmt convert`)"
        )

    def _read_from_here(
        self,
        layout: BlockLayout,
        layouts: Mapping[BlockId, BlockLayout],
        packed: Mapping[BlockId, PackedBlock],
    ) -> BlockLayout:
        tables = {
            name: self._table(layout.id, name, table, layouts, packed)
            for name, table in layout.tables.items()
        }
        extent = packed[layout.id].extent
        if extent is None:
            return replace(layout, tables=tables)
        file = FileRange(self._file(packed[layout.id]), extent.offset, extent.nbytes)
        end = extent.offset + extent.nbytes
        whole = AlignedRead(file, 0, end, layout.parameter_bytes)
        return replace(layout, reads=(whole,), staged=(), tables=tables, seal=extent.seal)

    def _table(
        self,
        block: BlockId,
        name: str,
        table: Table,
        layouts: Mapping[BlockId, BlockLayout],
        packed: Mapping[BlockId, PackedBlock],
    ) -> Table:
        spans = []
        for holder in table.holders:
            extent = packed[holder.block].extent
            placed = _placed(layouts[holder.block], holder.name)
            assert extent is not None
            nbytes = (holder.end - holder.first) * table.row_bytes
            file = FileRange(self._file(packed[holder.block]), extent.offset + placed.at[0], nbytes)
            spans.append(RowSpan(holder.first, holder.end, file))
        for sums in self.manifest.sums:
            if (sums.block, sums.name) == (block, name):
                where = self.path / self.manifest.file_name(sums.extent)
                file = FileRange(where, sums.extent.offset, sums.extent.nbytes)
                own = RowSums(sums.run_rows, file, sums.extent.seal)
                part = replace(table.parts[0], spans=tuple(spans))
                return replace(table, parts=(part,), sums=own)
        raise self._other_layout(f"no checksums of the rows of {block}")

    def _file(self, packed: PackedBlock) -> Path:
        assert packed.extent is not None
        return self.path / self.manifest.file_name(packed.extent)


def open_pack(path: Path) -> Pack:
    """The pack in folder `path`: its manifest, and its small files, checked.

    Data files are only measured; their bytes are checked as they are read.  Raises PackError for an
    unfinished pack or one of another version, MissingFileError for a missing file, and
    DamagedPackError for one that is not what was written.
    """
    if is_partial(path):
        raise PackError(
            f"{path} is an unfinished conversion: give `hmt convert` the same arguments again, and "
            "it goes on"
        )
    manifest = read_manifest(path)
    for name, size in manifest.files.items():
        check_size(path / name, size)
    for name, copy in manifest.copies.items():
        check_size(path / name, copy.nbytes)
        check_copy(path / name, copy.seal)
    if CONFIG not in manifest.copies:
        raise MissingFileError(f"{path / CONFIG} is missing: the pack was made without it")
    config, vocabulary = json.loads((path / CONFIG).read_bytes()), None
    if VOCABULARY in manifest.copies:
        vocabulary = json.loads((path / VOCABULARY).read_bytes())
    return Pack(path, manifest, config, vocabulary)


def check_size(file: Path, nbytes: int) -> None:
    """Raise MissingFileError without `file`, DamagedPackError where it has other bytes."""
    if not file.is_file():
        raise MissingFileError(
            f"{file} is missing: the pack was copied in part; copy it again, or convert again"
        )
    found = file.stat().st_size
    if found != nbytes:
        raise DamagedPackError(
            f"{file} has {found} bytes, and {nbytes} were written: the pack was copied in part or "
            "truncated; copy it again, or convert again"
        )


def check_copy(file: Path, seal: int) -> None:
    """Raise DamagedPackError where a small file is not what was written."""
    if checksum(file.read_bytes()) != seal:
        raise DamagedPackError(
            f"{file} has changed since the pack was made: put back the checkpoint's own, or change "
            "it there and convert again"
        )


def _as_bound(placed: PlacedParam, extent: FileRange) -> BoundParam:
    """A parameter in the block that lies in `extent`."""
    shape = placed.param.spec.shape
    parts = tuple(
        BoundPart(
            component.name,
            FileRange(extent.path, extent.offset + at, component.nbytes),
            component.nbytes // shape[0] if component.shape[0] == shape[0] else 0,
        )
        for component, at in zip(placed.format.components(shape), placed.at, strict=True)
    )
    return BoundParam(placed.param.spec, placed.param.source, placed.format, parts)


def _table_parts(name: str, table: Table) -> list[BoundParam]:
    """A table's rows, as one that is published in shards: they may lie in several blocks."""
    (part,) = table.parts
    whole = table.param
    return [
        replace(
            whole,
            spec=replace(
                whole.spec,
                name=f"{name}.{number}",
                shape=(span.end - span.first, *whole.spec.shape[1:]),
            ),
            parts=(BoundPart(part.name, span.file, part.row_bytes),),
            first=span.first,
            table=name,
        )
        for number, span in enumerate(part.spans)
    ]


def _placed(layout: BlockLayout, name: str) -> PlacedParam:
    return next(placed for placed in layout.placed if placed.param.spec.name == name)

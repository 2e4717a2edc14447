"""Tables that are published as codes (embeddings of GGUF files) lie in packs as numbers, in f32.

Shards of a table lie one after the other.  A row is then one piece of an extent, found and checked
as every other pack's, whatever the table was published in; where it lies on the disk, a lookup
reads few rows of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from hmt.contracts.blocks import BlockId, Role
from hmt.contracts.checkpoint import FileRange
from hmt.contracts.encoding import Encoding
from hmt.quant import Format
from hmt.quant.repacking import DequantizedImporter
from hmt.weights.binding import BoundBlock, BoundParam, BoundPart
from hmt.weights.layout import BlockLayout, RowHolder, RowSpan, Table, TablePart, Target, lay_out

_NUMBERS: Final = Format(Encoding.F32)


def lay_out_pack(
    blocks: Mapping[BlockId, BoundBlock], target: Target
) -> dict[BlockId, BlockLayout]:
    """`lay_out` without `in_place`, of a checkpoint: the form in which a pack is written."""
    wanted = {
        number: replace(block, params=tuple(map(_as_numbers, _joined(block.params))))
        for number, block in blocks.items()
    }
    layouts = lay_out(wanted, target, in_place=False)
    return {
        number: replace(
            layout,
            tables={name: _of_rows(number, name, one) for name, one in layout.tables.items()},
        )
        for number, layout in layouts.items()
    }


def _joined(params: Sequence[BoundParam]) -> list[BoundParam]:
    """Parameters, those that are shards of one table as that table."""
    joined: dict[str, BoundParam] = {}
    for param in params:
        name = param.table or param.spec.name
        before = joined.get(name)
        if before is not None:
            parts, tensors = (*before.parts, *param.parts), (*before.tensors, *param.tensors)
            rows = before.spec.shape[0] + param.spec.shape[0]
        else:
            parts, tensors, rows = param.parts, param.tensors, param.spec.shape[0]
        if param.table:
            spec = replace(param.spec, name=name, shape=(rows, *param.spec.shape[1:]))
            own = before or param
            param = replace(own, spec=spec, parts=parts, tensors=tensors, first=0, table="")
        joined[name] = param
    return list(joined.values())


def _as_numbers(param: BoundParam) -> BoundParam:
    if param.spec.role is not Role.TABLE or param.form is None or param.format.encoding.is_float:
        return param
    return replace(param, format=_NUMBERS, form=DequantizedImporter(param.form))


def _of_rows(block: BlockId, name: str, table: Table) -> Table:
    """`table` as it will lie in the pack, where that is not how it was published."""
    param = table.param
    sharded = param.form is None and len(param.parts) > 1
    if not sharded and not isinstance(param.form, DequantizedImporter):
        return table
    rows, columns = param.spec.shape
    row_bytes = columns * param.format.dtype.itemsize
    nowhere = FileRange(param.data.path, 0, rows * row_bytes)  # only its size counts
    plain = replace(param, form=None, parts=(BoundPart("data", nowhere, row_bytes),))
    part = TablePart("data", row_bytes, (RowSpan(0, rows, nowhere),))
    return Table(plain, (RowHolder(block, name, 0, rows),), (part,))

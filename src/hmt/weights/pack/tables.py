"""Tables that are published as codes (embeddings of GGUF files) lie in packs as numbers, in f32.

A row is then one piece of an extent, found and checked as every other pack's, whatever the table
was published in; where it lies on the disk, a lookup reads few rows of it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

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
        number: replace(block, params=tuple(map(_as_numbers, block.params)))
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


def _as_numbers(param: BoundParam) -> BoundParam:
    if param.spec.role is not Role.TABLE or param.form is None or param.format.encoding.is_float:
        return param
    return replace(param, format=_NUMBERS, form=DequantizedImporter(param.form))


def _of_rows(block: BlockId, name: str, table: Table) -> Table:
    """`table` as it will lie in the pack, where that is not how it was published."""
    param = table.param
    if not isinstance(param.form, DequantizedImporter):
        return table
    rows, columns = param.spec.shape
    row_bytes = columns * torch.float32.itemsize
    nowhere = FileRange(param.data.path, 0, rows * row_bytes)  # only its size counts
    plain = replace(param, form=None, parts=(BoundPart("data", nowhere, row_bytes),))
    part = TablePart("data", row_bytes, (RowSpan(0, rows, nowhere),))
    return Table(plain, (RowHolder(block, name, 0, rows),), (part,))

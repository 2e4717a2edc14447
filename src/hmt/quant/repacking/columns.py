"""Some columns of a parameter, for a rank that multiplies no others."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm

from torch import Tensor
from typing_extensions import override

from hmt.base.units import MIB, round_up
from hmt.contracts.encoding import BLOCK_SHAPES, PANEL_BLOCK, PANEL_ROWS, Packing, WeightTensor
from hmt.quant.packed import Format, empty_weight, row_slice, view_weight
from hmt.quant.repacking.bits import aligned
from hmt.quant.repacking.interface import WeightImporter

_PIECE_BYTES = 4 * MIB  # of whole rows, that are there while columns are taken out of them


def column_unit(form: Format, columns: int) -> int:
    """Columns that cannot be taken apart: they share a scale, or a word."""
    match form.encoding.packing:
        case Packing.BLOCKS:
            return BLOCK_SHAPES[form.encoding].numbers
        case Packing.PANELS:
            return lcm(PANEL_BLOCK, form.group_size)
    return form.group_size or (form.tile[1] if form.tile[1] < columns else 0) or 1


@dataclass(frozen=True, slots=True)
class ColumnSlice(WeightImporter):
    """Columns [first, end) of `whole`, in the format of that, without loss.

    whole     how all columns are unpacked; None: they lie as `published` says, and parts are its
              components
    columns   of the whole parameter
    by_rows   Each part has as many bytes of each row, in order.
    """

    whole: WeightImporter | None
    published: Format
    first: int
    end: int
    columns: int
    by_rows: bool

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        tile = self.published.tile
        if tile[1] >= self.columns:
            return replace(self.published, tile=(tile[0], self.end - self.first))
        return self.published

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        rows = target.shape[0]
        step = rows
        if self.by_rows:
            row_bytes = max(1, sum(part.nbytes for part in parts.values()) // rows)
            step = round_up(max(1, _PIECE_BYTES // row_bytes), PANEL_ROWS)
        for start in range(0, rows, step):
            end = min(start + step, rows)
            some = parts
            if self.by_rows:
                some = {n: part.view(rows, -1)[start:end].flatten() for n, part in parts.items()}
            whole = self._whole(some, end - start, first + start)
            _copy_columns(whole, row_slice(target, start, end), self.first, self.end)

    def _whole(self, parts: Mapping[str, Tensor], rows: int, first: int) -> WeightTensor:
        """Rows of the parameter with all columns; may be views of `parts`."""
        shape = (rows, self.columns)
        if self.whole is None:
            form = self.published
            components = form.components(shape)
            return view_weight(form, shape, *(aligned(parts[c.name], c.dtype) for c in components))
        found = empty_weight(self.published, shape)
        self.whole.unpack(parts, found, first)
        return found


def _copy_columns(source: WeightTensor, target: WeightTensor, first: int, end: int) -> None:
    """Columns of `source`, which lie along the second dimension of each of its arrays."""
    columns = source.shape[1]
    for name in ("data", "scales", "zeros", "minima", "factor"):
        part, into = getattr(source, name), getattr(target, name)
        if part is None:
            continue
        if part.dim() < 2:  # of whole rows, or of all of it
            into.copy_(part)
            continue
        each = source.tile[1] if name == "scales" and source.tile[1] else columns // part.shape[1]
        into.copy_(part[:, first // each : -(-end // each)])

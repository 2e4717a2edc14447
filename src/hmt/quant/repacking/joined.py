"""A parameter that is published as several, one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import PANEL_ROWS, Encoding, WeightTensor
from hmt.quant.packed import Format, row_slice
from hmt.quant.repacking.dequantized import dequantized
from hmt.quant.repacking.interface import WeightImporter


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a parameter that one importer brings.

    first   of its rows, in what is published
    shape   of the numbers
    """

    importer: WeightImporter
    first: int
    shape: tuple[int, ...]

    @property
    def format(self) -> Format:
        """What it becomes in memory."""
        return self.importer.format(self.shape)


@dataclass(frozen=True, slots=True)
class JoinedPieces(WeightImporter):
    """As published where all pieces are alike; else their numbers.

    Parts: those of each piece, behind its number and a point.
    """

    pieces: tuple[Piece, ...]

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        first, *others = (piece.format for piece in self.pieces)
        whole = all(piece.shape[0] % PANEL_ROWS == 0 for piece in self.pieces[:-1])
        return first if whole and all(own == first for own in others) else Format(Encoding.F32)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        kept, row = self.format(target.shape), 0
        for number, piece in enumerate(self.pieces):
            own = {
                name.removeprefix(f"{number}."): part
                for name, part in parts.items()
                if name.startswith(f"{number}.")
            }
            rows = row_slice(target, row, row + piece.shape[0])
            row += piece.shape[0]
            if piece.format == kept:
                piece.importer.unpack(own, rows, piece.first)
            else:
                rows.data.copy_(dequantized(piece.importer, piece.shape, own, piece.first))

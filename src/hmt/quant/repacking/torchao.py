"""Integers of 4 bits as torchao publishes them (pytorch/ao, Int4Tensor)."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import WeightTensor
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import DTYPES, as_tensor, unpack_nibbles
from hmt.quant.repacking.grouped import fill_minima, minima_format
from hmt.quant.repacking.interface import WeightImporter
from hmt.quant.repacking.row_chunks import row_chunks

_MIDDLE = 8


@dataclass(frozen=True, slots=True)
class TorchaoInt4(WeightImporter):
    """A number is code * scale + zero, with codes from -8 to 7.

    That is code + 8 with a minimum of zero - 8 * scale, which f32 holds unless a zero point is less
    than a 65,536th of its scale.

    groups   scales of a row
    dtype    of scales and zero points: "F32", "F16" or "BF16"

    Parts: qdata uint8 [rows, in / 2], the low nibble first; scale, zero_point [groups, all rows].
    """

    groups: int
    dtype: str

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        return minima_format(4, shape[1], shape[1] // self.groups)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        rows, columns = target.shape
        dtype = DTYPES[self.dtype]
        scales, zeros = (
            as_tensor(parts[name], dtype, self.groups, -1)[:, first : first + rows].T.float()
            for name in ("scale", "zero_point")
        )
        pairs = parts["qdata"].view(rows, columns // 2)
        for some, piece in row_chunks(target):
            codes = unpack_nibbles(pairs[some]) ^ _MIDDLE  # of two's complement
            fill_minima(piece, codes, scales[some], zeros[some] - _MIDDLE * scales[some])

"""What torchao publishes otherwise than others do (pytorch/ao).

Integers of 4 bits (Int4Tensor), and NVFP4 and MXFP8 with scales in the order of cuBLAS.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import WeightTensor
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import DTYPES, as_tensor, unpack_nibbles
from hmt.quant.repacking.fp4 import NVFP4
from hmt.quant.repacking.fp8 import FP8
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


@dataclass(frozen=True, slots=True)
class SwizzledScales(WeightImporter):
    """NVFP4 or MXFP8 with scales in blocks of 128 rows and 4 groups, as tensor cores want them.

    A block has 512 bytes, and blocks of the same rows follow each other.  In a block the scale of
    row r and group g is byte 16 * (r % 32) + 4 * (r // 32) + g (cuBLAS, block scaling factors).

    groups   scales of a row
    nvfp4    else it is MXFP8

    Parts: scales uint8 [ceil(all rows / 128) * ceil(groups / 4) * 512]; codes and factor as NVFP4
    has them with a factor that multiplies, or weight as FP8 has it.
    """

    groups: int
    nvfp4: bool

    @property
    def _plain(self) -> WeightImporter:
        return NVFP4(divides=False) if self.nvfp4 else FP8((1, 32), "F8_E8M0")

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        return self._plain.format(shape)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        row = torch.arange(first, first + target.shape[0])[:, None]
        group = torch.arange(self.groups)
        block = row // 128 * -(-self.groups // 4) + group // 4
        at = 512 * block + 16 * (row % 32) + 4 * (row % 128 // 32) + group % 4
        scales = parts["scales"][at].flatten()
        self._plain.unpack({**parts, "scales": scales}, target, first)

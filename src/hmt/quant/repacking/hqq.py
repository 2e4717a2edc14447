"""HQQ as mobiusml/hqq publishes it: codes with a scale and a zero point that is no integer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import DTYPES, as_tensor, unpack_strips
from hmt.quant.repacking.grouped import fill_minima, minima_format
from hmt.quant.repacking.interface import WeightImporter
from hmt.quant.repacking.row_chunks import row_chunks

_MIDDLE = 128  # what is taken from 8 bits, so that they are signed


@dataclass(frozen=True, slots=True)
class HQQ(WeightImporter):
    """A number is (code - zero) * scale.

    Codes are a matrix of `lines` lines.  A line is a group of inputs (axis 1), and a row of the
    weight is a few lines.  Or a group is a column of that matrix (axis 0), whose lines are many
    rows of the weight; kernels have no groups of rows, and it becomes floats of `dtype`, as hqq
    itself computes them.  Groups of inputs become groups with minima in f32: -zero * scale, a
    product that is exact where scales have 16 bits.

    bits        of a code
    per_word    codes of a word, which belong to strips of lines: the first is in the highest bits
    group_size  numbers that share a scale
    dtype       of scales and zero points: "F32", "F16" or "BF16"

    Parts: W_q uint8 (3 bits: int32) [ceil(lines / per_word), numbers of a line], scale and zero
    [groups].
    """

    bits: int
    per_word: int
    group_size: int
    axis: int
    lines: int
    dtype: str

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        if self.axis == 0:
            return Format(Encoding(self.dtype.lower()))
        return minima_format(self.bits, shape[1], self.group_size)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        columns, dtype = target.shape[1], DTYPES[self.dtype]
        scales, zeros = (as_tensor(parts[name], dtype, -1) for name in ("scale", "zero"))
        word = torch.int32 if self.per_word == 10 else torch.uint8
        words = as_tensor(parts["W_q"], word, -(-self.lines // self.per_word), -1)
        width = words.shape[1]
        shifts = [self.bits * at for at in reversed(range(self.per_word))]
        for some, piece in row_chunks(target):
            begin, end = ((first + row) * columns for row in (some.start, some.stop))
            low, high = begin // width, -(-end // width)
            codes = unpack_strips(words, self.bits, shifts, low, high)
            if self.axis == 0:
                numbers = ((codes.to(dtype) - zeros) * scales).flatten()
                piece.data.copy_(numbers[begin - low * width : end - low * width].view(piece.shape))
                continue
            scale, zero = (
                part[low:high].float().view(piece.shape[0], -1) for part in (scales, zeros)
            )
            codes = codes.view(piece.shape)
            middle = _MIDDLE if piece.encoding is Encoding.INT8_GROUP else 0
            if middle:  # as uint8, which wraps
                codes = (codes - middle).view(torch.int8)
            fill_minima(piece, codes, scale, (middle - zero) * scale)

"""Integers of 2 and 4 bits as optimum-quanto publishes them (huggingface/optimum-quanto)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.encoding import WeightTensor
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import DTYPES, as_tensor, unpack_strips
from hmt.quant.repacking.grouped import fill_minima, minima_format
from hmt.quant.repacking.interface import WeightImporter
from hmt.quant.repacking.row_chunks import row_chunks


@dataclass(frozen=True, slots=True)
class QuantoBits(WeightImporter):
    """A number is code * scale - shift; where shifts are integers, (code - shift) * scale.

    Groups of inputs are the lines of a matrix; the first strip of lines is in a byte's lowest bits.
    Files do not say how many lines a row of the weight has.

    bits        of a code: 2 or 4
    lines       groups of all rows
    group_size  numbers of a line
    dtype       of scales: "F32", "F16" or "BF16"
    integers    shifts are bytes, 0 to 2^bits - 1, and else have the dtype of the scales

    Parts: data uint8 [ceil(lines * bits / 8), group_size], scale and shift [lines].
    """

    bits: int
    lines: int
    group_size: int
    dtype: str
    integers: bool

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        if len(shape) != 2 or shape[1] % self.group_size:
            raise CheckpointError(
                f"its groups of {self.group_size} inputs do not divide rows of {shape[-1]}: config "
                "and weights do not belong together"
            )
        dtype = torch.float32 if self.integers else DTYPES[self.dtype]
        return minima_format(self.bits, shape[1], self.group_size, dtype)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        columns = target.shape[1]
        scales = as_tensor(parts["scale"], DTYPES[self.dtype], -1)
        shift_dtype = torch.uint8 if self.integers else scales.dtype
        shifts = as_tensor(parts["shift"], shift_dtype, -1)
        words = parts["data"].view(-1, self.group_size)
        strips = range(0, 8, self.bits)
        groups = columns // self.group_size
        for some, piece in row_chunks(target):
            low, high = ((first + row) * groups for row in (some.start, some.stop))
            codes = unpack_strips(words, self.bits, strips, low, high)
            scale, shift = (part[low:high].float().view(-1, groups) for part in (scales, shifts))
            minima = -shift * scale if self.integers else -shift
            fill_minima(piece, codes.view(piece.shape), scale, minima)

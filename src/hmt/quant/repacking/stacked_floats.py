"""Floats of several weights in one tensor: transposed, or interleaved."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import DTYPES, as_tensor
from hmt.quant.repacking.interface import WeightImporter


@dataclass(frozen=True, slots=True)
class StackedFloats(WeightImporter):
    """Numbers whose rows are spread over a tensor (gpt-oss in 16 bits, and its biases).

    dtype         "F32", "F16" or "BF16"
    interleaved   rows of this many weights are interleaved
    turn          which of them this one is
    columns       of a transposed weight: how many rows there are in all, so that the part is
                  [in, columns] and comes whole; 0 where rows lie one after the other
    start         of a transposed weight: columns before its own (Qwen3-VL's experts)

    Part: data [interleaved * rows], [interleaved * rows, in], or [in, columns].
    """

    dtype: str
    interleaved: int = 1
    turn: int = 0
    columns: int = 0
    start: int = 0

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        return Format(Encoding(self.dtype.lower()))

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        rows, *inputs = target.shape
        dtype = DTYPES[self.dtype]
        if self.columns:
            data = as_tensor(parts["data"], dtype, *inputs, self.columns)
            mine = data[:, self.start + self.turn :: self.interleaved]
            target.data.copy_(mine[:, first : first + rows].T)
            return
        data = as_tensor(parts["data"], dtype, rows * self.interleaved, *inputs)
        target.data.copy_(data[self.turn :: self.interleaved])

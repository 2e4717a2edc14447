"""Numbers themselves, which others order or shift in another way."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import DTYPES, as_tensor
from hmt.quant.repacking.interface import WeightImporter
from hmt.quant.repacking.row_order import turn_back


@dataclass(frozen=True, slots=True)
class Floats(WeightImporter):
    """F32, F16 or BF16 that do not lie as HMT wants them; integers, which f32 has to hold.

    dtype     as TensorRecord has it
    turned    rows of a head, where they lie in another order: see turn_back; else 0
    minus     is subtracted, in f32: gemma's norms are published with 1 added in GGUF files.  As it
              was added in f32 to no less than -1, subtracting it again is exact.
    decay     they are exp of what is wanted, or that below 0: a delta net's A_log, of which GGUF
              files have that

    Part: data [rows, ...].
    """

    dtype: str
    turned: int = 0
    minus: float = 0.0
    decay: bool = False

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        computed = self.minus or self.decay or self.dtype.startswith("I")
        return Format(Encoding.F32 if computed else Encoding(self.dtype.lower()))

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        numbers = as_tensor(parts["data"], DTYPES[self.dtype], *target.shape)
        if self.turned:
            numbers = turn_back(numbers, self.turned)
        target.data.copy_(numbers)
        if self.decay:
            target.data.abs_().log_()
        if self.minus:
            target.data.sub_(self.minus)

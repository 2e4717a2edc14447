"""What another form unpacks, as numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels import ops
from hmt.quant.importers.interface import WeightImporter
from hmt.quant.packed import Format, empty_weight


@dataclass(frozen=True, slots=True)
class DequantizedImporter:
    """For rows that are looked up, and for matrices that code of others multiplies with."""

    form: WeightImporter

    def format(self, shape: tuple[int, ...]) -> Format:
        """See Form."""
        return Format(Encoding.F32)

    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        """See Form."""
        codes = empty_weight(self.form.format(target.shape), target.shape)
        self.form.unpack(parts, codes, first)
        target.data.copy_(ops.dequantize(codes, torch.float32))

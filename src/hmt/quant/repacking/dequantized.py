"""What another importer unpacks, as numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels import ops
from hmt.quant.packed import Format, empty_weight
from hmt.quant.repacking.interface import WeightImporter


@dataclass(frozen=True, slots=True)
class DequantizedImporter(WeightImporter):
    """For rows that are looked up, and for matrices that code of others multiplies with."""

    form: WeightImporter

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        return Format(Encoding.F32)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        target.data.copy_(dequantized(self.form, target.shape, parts, first))


def dequantized(
    importer: WeightImporter, shape: tuple[int, ...], parts: Mapping[str, Tensor], first: int = 0
) -> Tensor:
    """Rows [first, first + shape[0]) of what `importer` unpacks: f32 `shape`."""
    codes = empty_weight(importer.format(shape), shape)
    importer.unpack(parts, codes, first)
    return ops.dequantize(codes, torch.float32)

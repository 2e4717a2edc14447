"""FP8 (e4m3) with a scale per weight, row, group or block, in f32, f16, bf16 or powers of two.

With f32 scales per row or block it lies in memory as published; `FP8` is for all the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import scales_as_f32
from hmt.quant.repacking.interface import WeightImporter


@dataclass(frozen=True, slots=True)
class FP8(WeightImporter):
    """Numbers in e4m3 and scales that multiply them.

    tile          (rows, columns) that share a scale; 0 for all rows, or all columns
    scale_dtype   as published: "F32", "F16", "BF16" or "F8_E8M0"

    Parts: weight e4m3 [rows, in], scales [ceil(rows / tile[0]), ceil(in / tile[1])].
    """

    tile: tuple[int, int]
    scale_dtype: str

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        return Format(Encoding.FP8_BLOCK, tile=(self.tile[0] or shape[0], self.tile[1] or shape[1]))

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        assert target.scales is not None
        target.data.view(torch.uint8).copy_(parts["weight"].view(target.shape))
        shape = target.scales.shape
        target.scales.copy_(scales_as_f32(parts["scales"], self.scale_dtype, *shape))

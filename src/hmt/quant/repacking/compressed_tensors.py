"""Integers as compressed-tensors publishes them (vllm-project/compressed-tensors).

Its floats (float-quantized, naive-quantized FP8) are in `fp8`, its NVFP4 and MXFP4 in `floats4`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.encoding import WeightTensor
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import DTYPES, as_tensor, pairs_or_codes, unpack_bits
from hmt.quant.repacking.grouped import fill_grouped, grouped_format
from hmt.quant.repacking.interface import WeightImporter
from hmt.quant.repacking.row_chunks import row_chunks


@dataclass(frozen=True, slots=True)
class CompressedIntegers(WeightImporter):
    """Signed codes, stored as bytes (int-quantized) or packed (pack-quantized).

    packed        codes + 2^(bits - 1) lie in words, each row on its own, without unused bits but
                  at the end of a row
    scale_groups  scales of a row: in / group, 1 per row, or 0 for one scale in all
    scale_dtype   as published: "F32", "F16" or "BF16"
    symmetric     there are no zero points, or all are 0; checked
    all_rows      of the published tensor: zero points of packed weights lie packed along the rows,
                  and come whole

    Parts: weight int8 [rows, in], or weight_packed int32 [rows, ceil(in * bits / 32)];
    weight_scale [rows, scale_groups] or [1]; weight_zero_point int8 of that shape, or
    int32 [ceil(all rows * bits / 32), scale_groups].
    """

    bits: int
    packed: bool
    scale_groups: int
    scale_dtype: str
    symmetric: bool
    all_rows: int

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        columns = shape[1]
        group = columns // self.scale_groups if self.scale_groups > 1 else 0
        zeros = not self.symmetric
        return grouped_format(self.bits, columns, group, DTYPES[self.scale_dtype], zeros=zeros)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        rows, columns = target.shape
        middle = 1 << self.bits - 1
        scales = self._per_row(as_tensor(parts["weight_scale"], DTYPES[self.scale_dtype], -1), rows)
        zeros: Tensor | int = middle
        if "weight_zero_point" in parts:
            zeros = self._zeros(parts["weight_zero_point"], first, rows)
        for some, piece in row_chunks(target):
            if self.packed:
                words = as_tensor(parts["weight_packed"], torch.int32, rows, -1)
                codes = pairs_or_codes(words[some], self.bits, columns)
            else:
                codes = parts["weight"].view(rows, columns)[some] + middle  # as uint8, which wraps
                self._check_range(codes)
            own = zeros[some] if isinstance(zeros, Tensor) else zeros
            fill_grouped(piece, codes, scales[some], own, middle)

    def _check_range(self, codes: Tensor) -> None:
        if self.bits < 8 and codes.numel() and int(codes.max()) >> self.bits:
            middle = 1 << self.bits - 1
            raise CheckpointError(
                f"it has codes outside [{-middle}, {middle - 1}], and its {self.bits} bits hold no "
                "others: config and weights do not belong together"
            )

    def _per_row(self, values: Tensor, rows: int) -> Tensor:
        """Values of each row [rows, groups]."""
        return values.expand(rows, 1) if not self.scale_groups else values.view(rows, -1)

    def _zeros(self, part: Tensor, first: int, rows: int) -> Tensor:
        if not self.packed:
            return self._per_row(part + (1 << self.bits - 1), rows)
        words = as_tensor(part, torch.int32, -1, self.scale_groups)
        zeros = unpack_bits(words.T, self.bits, self.all_rows)
        return zeros[:, first : first + rows].T.contiguous()

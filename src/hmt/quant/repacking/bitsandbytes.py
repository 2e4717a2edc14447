"""What bitsandbytes publishes: int8 with a scale per row, and 4 bits by a table (NF4, FP4).

LLM.int8 (arXiv 2208.07339) and QLoRA (arXiv 2305.14314).  Read only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import as_tensor
from hmt.quant.repacking.interface import WeightImporter
from hmt.quant.repacking.row_chunks import row_chunks


@dataclass(frozen=True, slots=True)
class BitsAndBytesInt8(WeightImporter):
    """Codes -127..127; a number is code * SCB / 127.

    Parts: weight int8 [rows, in], SCB f32 [rows].  What is kept is SCB / 127, rounded to f32; its
    own dequantiser rounds code * SCB first, and can differ by a unit in f32's last place.
    """

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        return Format(Encoding.INT8_CHANNEL)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        assert target.scales is not None
        target.data.copy_(parts["weight"].view(torch.int8).view(target.shape))
        target.scales.copy_(as_tensor(parts["SCB"], torch.float32, len(target.scales)) / 127)


@dataclass(frozen=True, slots=True)
class BitsAndBytesTable(WeightImporter):
    """Codes of a table of 16 numbers, with the largest magnitude of each `block` as its scale.

    Codes of all rows follow each other, the high nibble first, and blocks take no heed of rows.
    The table's numbers are no integers, so that no kernel computes on the codes: they become floats
    of `dtype` ("F32", "F16" or "BF16"), which bitsandbytes itself makes of them, too.

    nested_block    of double quantisation: this many scales, themselves of 8 bits by a table of
                    256, share a scale; 0 without
    nested_offset   is added to each such scale

    Parts: weight uint8 [rows * in / 2, 1], quant_map f32 [16], absmax f32 [blocks]; or, nested,
    absmax uint8 [blocks], nested_quant_map f32 [256], nested_absmax f32 [blocks / nested_block].
    """

    block: int
    dtype: str
    nested_block: int = 0
    nested_offset: float = 0.0

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        return Format(Encoding(self.dtype.lower()))

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        rows, columns = target.shape
        pairs = parts["weight"].view(rows, columns // 2)
        table = as_tensor(parts["quant_map"], torch.float32, 16)
        both = torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1)  # of a byte
        scales = self._scales(parts)
        for some, piece in row_chunks(target):
            numbers = both.view(torch.int64)[pairs[some].int(), 0].view(torch.float32)
            begin, end = ((first + row) * columns for row in (some.start, some.stop))
            if begin % self.block or end % self.block:
                blocks = torch.arange(begin, end) // self.block
                numbers *= scales[blocks].view(piece.shape)
            else:
                own = scales[begin // self.block : end // self.block]
                numbers.view(-1, self.block).mul_(own[:, None])
            piece.data.copy_(numbers)

    def _scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        """f32 [blocks]."""
        if not self.nested_block:
            return as_tensor(parts["absmax"], torch.float32, -1)
        table = as_tensor(parts["nested_quant_map"], torch.float32, 256)
        scales = as_tensor(parts["nested_absmax"], torch.float32, -1)
        codes = parts["absmax"].long()
        numbers = table[codes] * scales[torch.arange(len(codes)) // self.nested_block]
        return numbers + self.nested_offset

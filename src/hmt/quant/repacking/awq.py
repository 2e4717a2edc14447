"""AWQ as AutoAWQ's GEMM kernels publish it (arXiv 2306.00978; casper-hansen/AutoAWQ)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels.panel_packing import pack_awq
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import as_tensor
from hmt.quant.repacking.grouped import fill_grouped, fill_groups, grouped_format
from hmt.quant.repacking.interface import WeightImporter
from hmt.quant.repacking.row_chunks import row_chunks

_BITS = 4
_PER_WORD = 8
# The word's nibbles, lowest first, hold these of its eight outputs: pairs that a GPU turns into
# two halves at once.  So output 0 is in nibble 0, output 1 in nibble 4, output 2 in nibble 1.
_NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AWQ(WeightImporter):
    """4-bit codes with zero points, the outputs of one input side by side.

    outputs      of the published tensor
    group_size   inputs that share a scale; 0 for all

    Parts: qweight int32 [in, outputs / 8], qzeros int32 [in / group, outputs / 8], scales f16
    [in / group, outputs].
    """

    outputs: int
    group_size: int

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        return grouped_format(_BITS, shape[1], self.group_size, torch.float16, zeros=True)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        columns = target.shape[1]
        groups = columns // (self.group_size or columns)
        codes = as_tensor(parts["qweight"], torch.int32, columns, self.outputs // 8)
        zeros = as_tensor(parts["qzeros"], torch.int32, groups, self.outputs // 8)
        scales = as_tensor(parts["scales"], torch.float16, groups, self.outputs)
        rows, four_bits = target.shape[0], target.encoding is Encoding.INT4_GROUP
        if four_bits and pack_awq(codes, first, rows, target.data):
            own_zeros = _outputs(zeros, first, first + rows)
            fill_groups(target, scales[:, first : first + rows].T, own_zeros)
            return
        for some, piece in row_chunks(target):
            begin, end = first + some.start, first + some.stop
            fill_grouped(
                piece,
                _outputs(codes, begin, end),
                scales[:, begin:end].T.contiguous(),
                _outputs(zeros, begin, end),
                8,
            )


def _outputs(words: Tensor, begin: int, end: int) -> Tensor:
    """Of words int32 [n, outputs / 8] the codes of some outputs: uint8 [end - begin, n]."""
    some = words[:, begin // 8 : -(-end // 8)].T.contiguous()
    codes = some.new_empty((len(some), _PER_WORD, some.shape[1]), dtype=torch.uint8)
    for output, nibble in enumerate(_NIBBLE_OF_OUTPUT):
        codes[:, output] = some >> 4 * nibble & 15
    return codes.flatten(0, 1)[begin % _PER_WORD :][: end - begin]

"""AWQ as AutoAWQ's GEMM kernels publish it (arXiv 2306.00978; casper-hansen/AutoAWQ)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.quant.packed import Format
from hmt.quant.published.bits import as_tensor, unpack_nibbles
from hmt.quant.published.grouped import fill_grouped, grouped_format

_BITS = 4
# The word's nibbles, lowest first, hold these of its eight outputs: pairs that a GPU turns into
# two halves at once.  So output 0 is in nibble 0, output 1 in nibble 4, output 2 in nibble 1.
_NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AWQ:
    """4-bit codes with zero points, the outputs of one input side by side.

    outputs      of the published tensor
    group_size   inputs that share a scale; 0 for all

    Parts: qweight int32 [in, outputs / 8], qzeros int32 [in / group, outputs / 8], scales f16
    [in / group, outputs].
    """

    outputs: int
    group_size: int

    def format(self, shape: tuple[int, ...]) -> Format:
        """See Form."""
        return grouped_format(_BITS, shape[1], self.group_size, torch.float16, zeros=True)

    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        """See Form."""
        rows, columns = target.shape
        groups = columns // (self.group_size or columns)
        wanted = slice(first, first + rows)
        codes = _outputs(as_tensor(parts["qweight"], torch.int32, columns, self.outputs // 8))
        zeros = _outputs(as_tensor(parts["qzeros"], torch.int32, groups, self.outputs // 8))
        scales = as_tensor(parts["scales"], torch.float16, groups, self.outputs)
        fill_grouped(target, codes[wanted], scales[:, wanted].T.contiguous(), zeros[wanted], 8)


def _outputs(words: Tensor) -> Tensor:
    """Words int32 [n, outputs / 8] to codes uint8 [outputs, n]."""
    nibbles = unpack_nibbles(words.view(torch.uint8)).unflatten(1, (-1, 8))
    return nibbles[..., list(_NIBBLE_OF_OUTPUT)].flatten(1).T.contiguous()

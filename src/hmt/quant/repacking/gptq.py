"""GPTQ as AutoGPTQ and GPTQModel publish it (arXiv 2210.17323; ModelCloud/GPTQModel)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.quant.packed import Format
from hmt.quant.repacking.bits import as_tensor, pairs_or_codes, unpack_bits
from hmt.quant.repacking.grouped import fill_grouped, grouped_format
from hmt.quant.repacking.interface import WeightImporter
from hmt.quant.repacking.row_chunks import row_chunks


@dataclass(frozen=True, slots=True)
class GPTQ(WeightImporter):
    """Codes of 2, 3, 4 or 8 bits, the inputs of one output packed.

    outputs      of the published tensor
    group_size   inputs that share a scale; 0 for all
    symmetric    all zero points are the middle, as the configuration says; checked
    ordered      inputs were quantised in the order of their activations (desc_act), so that those
                 of a group may lie anywhere.  Kernels have no form for that: it becomes f16, each
                 number rounded as GPTQ's own dequantisers round it
    in_order     that is what g_idx is expected to say, as groups were made before (static_groups);
                 checked
    zero_offset  1 where zero points are stored less one (checkpoint format "gptq"), 0 for "gptq_v2"

    Parts: qweight int32 [in * bits / 32, outputs], qzeros int32 [groups, outputs * bits / 32],
    scales f16 [groups, outputs], and g_idx int32 [in], the group of each input, where `ordered` or
    `in_order`.
    """

    bits: int
    outputs: int
    group_size: int
    symmetric: bool
    ordered: bool
    zero_offset: int
    in_order: bool = False

    @override
    def format(self, shape: tuple[int, ...]) -> Format:
        if self.ordered:
            return Format(Encoding.F16)
        zeros = not self.symmetric
        return grouped_format(self.bits, shape[1], self.group_size, torch.float16, zeros=zeros)

    @override
    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        columns = target.shape[1]
        groups = columns // (self.group_size or columns)
        words = as_tensor(parts["qweight"], torch.int32, columns * self.bits // 32, self.outputs)
        all_scales = as_tensor(parts["scales"], torch.float16, groups, self.outputs)
        all_zeros = self._zeros(parts["qzeros"], groups)
        index = self._groups_of_inputs(parts, columns, groups)
        for some, piece in row_chunks(target):
            wanted = slice(first + some.start, first + some.stop)
            codes = pairs_or_codes(words[:, wanted].T, self.bits, columns)
            scales, zeros = (part[:, wanted].T.contiguous() for part in (all_scales, all_zeros))
            if index is not None:  # as if each input were a group
                scales, zeros = scales[:, index], zeros[:, index]
            fill_grouped(piece, codes, scales, zeros, 1 << self.bits - 1)

    def _groups_of_inputs(
        self, parts: Mapping[str, Tensor], columns: int, groups: int
    ) -> Tensor | None:
        """int64 [in] where they are not in order."""
        if not self.ordered and not self.in_order:
            return None
        index = as_tensor(parts["g_idx"], torch.int32, columns).long()
        if bool(((index < 0) | (index >= groups)).any()):
            raise CheckpointError(
                f"its g_idx names groups {int(index.min())} to {int(index.max())} of {groups}: "
                "download it again"
            )
        if not self.in_order:
            return index
        if not torch.equal(index, torch.arange(columns) * groups // columns):
            raise CheckpointError(
                "its g_idx is not in order, and the quantisation config says static_groups: set "
                "static_groups to false in config.json"
            )
        return None

    def _zeros(self, part: Tensor, groups: int) -> Tensor:
        """uint8 [groups, outputs].

        Of what is stored less one, 2^bits - 1 stands for 0: AutoGPTQ adds the one and keeps the
        lowest bits.
        """
        words = as_tensor(part, torch.int32, groups, self.outputs * self.bits // 32)
        stored = unpack_bits(words, self.bits, self.outputs)
        return (stored + self.zero_offset) & (1 << self.bits) - 1

"""GPTQ as AutoGPTQ and GPTQModel publish it (arXiv 2210.17323; ModelCloud/GPTQModel)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.base.errors import CheckpointError
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.quant.packed import Format
from hmt.quant.published.bits import as_tensor, unpack_bits
from hmt.quant.published.grouped import fill_grouped, grouped_format


@dataclass(frozen=True, slots=True)
class GPTQ:
    """Codes of 2, 3, 4 or 8 bits, the inputs of one output packed.

    outputs      of the published tensor
    group_size   inputs that share a scale; 0 for all
    symmetric    all zero points are the middle, as the configuration says; checked
    ordered      inputs were quantised in the order of their activations (desc_act), so that those
                 of a group may lie anywhere: kernels have no form for that, and it becomes f32
    zero_offset  1 where zero points are stored less one (checkpoint format "gptq"), 0 for "gptq_v2"

    Parts: qweight int32 [in * bits / 32, outputs], qzeros int32 [groups, outputs * bits / 32],
    scales f16 [groups, outputs], and g_idx int32 [in] where `ordered`: the group of each input.
    """

    bits: int
    outputs: int
    group_size: int
    symmetric: bool
    ordered: bool
    zero_offset: int

    def format(self, shape: tuple[int, ...]) -> Format:
        """See Form."""
        if self.ordered:
            return Format(Encoding.F32)
        zeros = not self.symmetric
        return grouped_format(self.bits, shape[1], self.group_size, torch.float16, zeros=zeros)

    def unpack(self, parts: Mapping[str, Tensor], target: WeightTensor, first: int) -> None:
        """See Form."""
        rows, columns = target.shape
        groups = -(-columns // (self.group_size or columns))
        wanted = slice(first, first + rows)
        words = as_tensor(parts["qweight"], torch.int32, columns * self.bits // 32, self.outputs)
        codes = unpack_bits(words[:, wanted].T, self.bits, columns)
        scales = as_tensor(parts["scales"], torch.float16, groups, self.outputs)[:, wanted].T
        zeros = self._zeros(parts["qzeros"], groups)[:, wanted].T
        if self.ordered:
            index = as_tensor(parts["g_idx"], torch.int32, columns).long()
            _check_groups(index, groups)
            signed = codes.to(torch.int16) - zeros.to(torch.int16)[:, index]
            target.data.copy_(signed.float() * scales.float()[:, index])
            return
        fill_grouped(target, codes, scales.contiguous(), zeros.contiguous(), 1 << self.bits - 1)

    def _zeros(self, part: Tensor, groups: int) -> Tensor:
        """uint8 [groups, outputs].

        Of what is stored less one, 2^bits - 1 stands for 0: AutoGPTQ adds the one and keeps the
        lowest bits.
        """
        words = as_tensor(part, torch.int32, groups, self.outputs * self.bits // 32)
        stored = unpack_bits(words, self.bits, self.outputs)
        return (stored + self.zero_offset) & (1 << self.bits) - 1


def _check_groups(index: Tensor, groups: int) -> None:
    if bool(((index < 0) | (index >= groups)).any()):
        raise CheckpointError(
            f"its g_idx names groups {int(index.min())} to {int(index.max())} of {groups}: "
            "download it again"
        )

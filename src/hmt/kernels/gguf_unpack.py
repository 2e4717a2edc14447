"""Blocks of GGUF files brought into the forms that kernels read, by the compiled extension."""

from typing import Final

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels.cpu import extension

# Numbers of the enum in csrc/linear/gguf.h.
_KINDS: Final = {
    kind: number
    for number, kind in enumerate(
        (
            "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
            "IQ4_NL", "IQ4_XS", "MXFP4",
        )
    )
}  # fmt: skip


def unpack_blocks(kind: str, blocks: Tensor, target: WeightTensor, turned: int) -> bool:
    """Fill `target` from blocks uint8 [rows, bytes of a row] of one of ggml's types, in one pass.

    target   in the format that `hmt.quant.importers.gguf` has for the type, whole rows
    turned   rows of a head whose halves were published by turns; 0 for rows in order

    False, and nothing done, where there is no extension, or it is not for such tensors.
    """
    native = extension.load_for(blocks, target.data, target.scales, target.minima)
    if native is None:
        return False
    rows, columns = target.shape
    assert target.scales is not None and not (turned and rows % turned)
    native.unpack_ggml(
        _KINDS[kind],
        blocks.data_ptr(),
        rows,
        columns,
        turned,
        target.data.data_ptr(),
        target.scales.data_ptr(),
        0 if target.minima is None else target.minima.data_ptr(),
        torch.get_num_threads(),
    )
    return True

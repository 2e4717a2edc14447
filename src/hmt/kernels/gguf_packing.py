"""Rows of GGUF files brought into the packing that kernels read, by the compiled extension."""

import torch
from torch import Tensor

from hmt.contracts.encoding import BLOCK_SHAPES, WeightTensor
from hmt.kernels.cpu import extension


def pack_rows(kind: str, blocks: Tensor, target: WeightTensor, turned: int) -> bool:
    """Fill `target` from blocks uint8 [rows, bytes of a row] of one of ggml's types, in one pass.

    target   in the format that `hmt.quant.repacking.gguf` has for the type, whole rows
    turned   rows of a head whose halves were published interleaved; 0 for rows in order

    False, and nothing done, where there is no extension, or it is not for such tensors.
    """
    native = extension.load_for(blocks, target.data, target.scales, target.minima)
    if native is None:
        return False
    rows, columns = target.shape
    assert not (turned and rows % turned)
    shape = BLOCK_SHAPES.get(target.encoding)
    count = columns // (32 if shape is None else shape.numbers)
    if count == 0:
        return False
    taken = 0 if target.scales is None else target.scales.element_size()
    native.pack_gguf(
        blocks.data_ptr(),
        rows,
        count,
        blocks.shape[1] // count,
        turned,
        0 if shape is None or shape.scale_at is None else shape.scale_at,
        taken,
        target.data.data_ptr(),
        0 if target.scales is None else target.scales.data_ptr(),
        0 if target.minima is None else target.minima.data_ptr(),
        torch.get_num_threads(),
    )
    return True

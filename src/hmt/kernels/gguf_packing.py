"""Rows of GGUF files brought into the packing that kernels read, by the compiled extension."""

from typing import Final

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels.cpu import extension

# Numbers of the enum in csrc/linear/gguf.h.
_KINDS: Final = {"Q4_0": 0, "Q4_1": 1, "MXFP4": 12}


def pack_rows(kind: str, blocks: Tensor, target: WeightTensor, turned: int) -> bool:
    """Fill `target` from blocks uint8 [rows, bytes of a row] of one of ggml's types, in one pass.

    target   in the format that `hmt.quant.importers.gguf` has for the type, whole rows
    turned   rows of a head whose halves were published by turns; 0 for rows in order

    False, and nothing done, where there is no extension, or it is not for such tensors.
    """
    native = extension.load()
    parts = (blocks, target.data, target.scales, target.minima)
    if kind not in _KINDS:
        return False
    if native is None or not all(
        part is None or (part.device.type == "cpu" and part.is_contiguous()) for part in parts
    ):
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

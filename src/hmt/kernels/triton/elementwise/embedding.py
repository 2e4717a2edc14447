"""Rows of a table, read where they lie: on the GPU, or in pinned host memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 1024  # of a row, for a program


@triton.jit
def _rows_kernel(out, parts, ids, part_rows, width, NUMBERS: tl.constexpr):
    """Axis 0: rows; axis 1: parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    wanted = tl.load(ids + row)
    table = tl.load(parts + wanted // part_rows).to(tl.pointer_type(out.dtype.element_ty))
    some = tl.load(table + wanted % part_rows * width + at, mask=at < width)
    tl.store(out + row * width + at, some, mask=at < width)


def rows_at(parts: Tensor, part_rows: int, width: int, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """Rows `ids` int64 [n] of a table in parts: [n, width].

    parts   int64 addresses, as kernels find them, of `part_rows` rows each (the last of fewer)
    """
    out = torch.empty(len(ids), width, dtype=dtype, device=ids.device)
    if len(ids):
        grid = (len(ids), triton.cdiv(width, _NUMBERS))
        _rows_kernel[grid](out, parts, ids, part_rows, width, NUMBERS=_NUMBERS, num_warps=4)
    return out

"""Rows of a table in pinned host memory, read where they lie."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 1024  # of a row, for a program


@triton.jit
def _rows_kernel(out, table, ids, width, NUMBERS: tl.constexpr):
    """Axis 0: rows; axis 1: parts of a row.  table: its address."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    start = table.to(tl.pointer_type(out.dtype.element_ty)) + tl.load(ids + row) * width
    some = tl.load(start + at, mask=at < width)
    tl.store(out + row * width + at, some, mask=at < width)


def rows_at(table: int, width: int, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """Rows `ids` int64 [n] of the table that the device finds at an address: [n, width]."""
    out = torch.empty(len(ids), width, dtype=dtype, device=ids.device)
    if len(ids):
        grid = (len(ids), triton.cdiv(width, _NUMBERS))
        _rows_kernel[grid](out, table, ids, width, NUMBERS=_NUMBERS, num_warps=4)
    return out

"""Rows of a table of codes, read where they lie: on the GPU, or in pinned host memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import Encoding, Packing
from hmt.kernels.row_table import RowTable
from hmt.kernels.triton.gemm.block_numbers import block_rows_at
from hmt.kernels.triton.weight_codes import doubled_e2m1, scale_numbers

_NUMBERS = 1024  # of a row, for a program


def code_rows_at(table: RowTable, ids: Tensor) -> Tensor:
    """Rows `ids` int64 [n] of a table of codes, in panels or blocks: f32 [n, width]."""
    out = torch.empty(len(ids), table.width, dtype=torch.float32, device=ids.device)
    if len(ids) == 0:
        return out
    data, scales, extra = table.parts
    if table.encoding.packing is Packing.BLOCKS:
        where = data, scales, table.part_rows, table.width
        return block_rows_at(*where, table.encoding, torch.float32, ids)
    assert table.scale_dtype is not None
    _panel_rows_kernel[(len(ids), triton.cdiv(table.width, _NUMBERS))](
        out, data, scales, extra, ids, table.part_rows, table.width,
        GROUP=table.group_size, SCALE=_KINDS[table.scale_dtype],
        KIND="mxfp4" if table.encoding is Encoding.MXFP4 else "int4",
        EXTRA=table.extra, NUMBERS=_NUMBERS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


_KINDS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
}


@triton.jit
def _panel_rows_kernel(
    out, data, scales, extra, ids, part_rows, width,
    GROUP: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr, EXTRA: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Axis 0: rows; axis 1: parts of a row."""
    to = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    inside = at < width
    wanted = tl.load(ids + to)
    part, row = wanted // part_rows, wanted % part_rows
    panel, lane = row // 16, row % 16
    codes = tl.load(data + part).to(tl.pointer_type(tl.uint8)) + panel * (width * 8)
    # Byte (b, j, row, i) has inputs 32 b + 4 j + i, and 16 further in its high nibble.
    place = at // 32 * 256 + at % 16 // 4 * 64 + lane * 4 + at % 4
    code = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    code = tl.where(at % 32 < 16, code & 15, code >> 4)
    group = panel * (width // GROUP * 16) + at // GROUP * 16 + lane
    stored = tl.load(
        tl.load(scales + part).to(tl.pointer_type(SCALE)) + group, mask=inside, other=0.0
    )
    scale = scale_numbers(stored, 1.0, KIND)
    if KIND == "mxfp4":
        number = doubled_e2m1(code).to(tl.float32) * scale
    elif EXTRA == "zeros":
        zero = tl.load(
            tl.load(extra + part).to(tl.pointer_type(tl.uint8)) + group, mask=inside, other=0
        )
        number = (code - zero.to(tl.int32)).to(tl.float32) * scale
    elif EXTRA == "minima":
        least = tl.load(
            tl.load(extra + part).to(tl.pointer_type(SCALE)) + group, mask=inside, other=0.0
        )
        number = code.to(tl.float32) * scale + least.to(tl.float32)
    else:
        number = (code - 8).to(tl.float32) * scale
    tl.store(out + to * width + at, number, mask=inside)

"""Experts in ggml's blocks (Packing.BLOCKS) for many tokens: numbers made of some at a time.

Their numbers take three to eight times the room, so a layer's experts are unpacked group by group,
in ascending order, and each group is multiplied as experts of floats are.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import ACTIVATION_BLOCK, BLOCK_SHAPES, Encoding
from hmt.contracts.model import EXPERT_UNPACKED_BYTES
from hmt.kernels.triton.gemm.block_dots import block_constants, block_grid, lane_of
from hmt.kernels.triton.gemm.block_numbers import blocks_at_once, store_numbers
from hmt.kernels.triton.moe.weight_table import PARTS, ExpertMatrix, ExpertTable

_BIAS = PARTS.index("bias")
_FLOATS = {
    torch.float32: Encoding.F32,
    torch.float16: Encoding.F16,
    torch.bfloat16: Encoding.BF16,
}


def unpacked_groups(table: ExpertTable, dtype: torch.dtype) -> Iterator[tuple[ExpertTable, bool]]:
    """Tables of some experts each, whose numbers are in `dtype`, and whether it is the last.

    A table is valid until the next is asked for, on the device's queue.
    """
    matrices = (table.gate, table.up, table.down)
    sizes = [m.shape[0] * m.shape[1] if m.in_blocks else 0 for m in matrices]
    most = EXPERT_UNPACKED_BYTES // (sum(sizes) * dtype.itemsize)
    group = max(1, min(table.experts, most))
    where = table.addresses.device
    memory = torch.empty(group, sum(sizes), dtype=dtype, device=where)
    forms = [_unpacked(m, dtype) if m.in_blocks else _by_itself(m) for m in matrices]
    expert = torch.arange(table.experts, device=where)
    nothing = torch.zeros_like(expert)
    for first in range(0, table.experts, group):
        inside = (expert >= first) & (expert < first + group)
        rows: list[Tensor] = []
        for index, matrix in enumerate(matrices):
            parts = [_addresses(table, index, part) for part in range(len(PARTS))]
            if matrix.in_blocks:
                numbers = memory[: table.experts - first, sum(sizes[:index]) :]
                _unpack(numbers, table, index, matrix, first)
                places = numbers.data_ptr() + (expert - first) * (sum(sizes) * dtype.itemsize)
                data = torch.where(parts[0] != 0, places, nothing)
                parts = [data, nothing, nothing, nothing, parts[_BIAS]]
            rows += [torch.where(inside, part, nothing) for part in parts]
        yield ExpertTable(torch.stack(rows), *forms), first + group >= table.experts


def _unpacked(matrix: ExpertMatrix, dtype: torch.dtype) -> ExpertMatrix:
    bias = matrix.bias_dtype
    return ExpertMatrix(_FLOATS[dtype], matrix.shape, bias_dtype=bias)


def _by_itself(matrix: ExpertMatrix) -> ExpertMatrix:
    """Of parts that have addresses of their own."""
    return replace(matrix, offsets=(0,) * len(PARTS))


def _addresses(table: ExpertTable, index: int, part: int) -> Tensor:
    """Of one part of a matrix: int64 [experts], 0 for experts that are not here."""
    matrix = (table.gate, table.up, table.down)[index]
    if table.part_stride == 0:
        base = table.addresses
        return torch.where(base != 0, base + matrix.offsets[part], 0)
    return table.addresses[index * len(PARTS) + part] + matrix.offsets[part]


def _unpack(out: Tensor, table: ExpertTable, index: int, matrix: ExpertMatrix, first: int) -> None:
    """Matrices of experts from the `first` on, each to the begin of a row of `out`."""
    rows, columns = matrix.shape
    wides, at_once = triton.cdiv(columns, ACTIVATION_BLOCK), blocks_at_once(matrix.encoding)
    _unpack_kernel[(triton.cdiv(wides, at_once), triton.cdiv(rows, 16), len(out))](
        out, table.addresses, table.part_stride, block_grid(matrix.encoding, out.device),
        index * len(PARTS), first, rows, columns // BLOCK_SHAPES[matrix.encoding].numbers,
        out.stride(0), *matrix.offsets[:2],
        BLOCKS=at_once, num_warps=1, enable_fp_fusion=False, **block_constants(matrix.encoding),
    )  # fmt: skip


@triton.jit
def _unpack_kernel(
    out, table, part_stride, grid, first_part, first_expert, rows, blocks, out_stride,
    at_data, at_scales,
    KIND: tl.constexpr, WORDS: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Axis 0: BLOCKS blocks of 256 inputs; axis 1: panels; axis 2: experts."""
    its = table + first_expert + tl.program_id(2)
    if tl.load(its) != 0:
        its += first_part * part_stride
        panel = tl.program_id(1).to(tl.int64)
        lane = tl.arange(0, BLOCKS * (8 if SMALL else 4))[:, None]
        lane = lane_of(lane, tl.program_id(0) * BLOCKS, blocks, BLOCKS, SMALL)
        inner = tl.arange(0, 16)[None, :]
        data = tl.load(its) + at_data + panel * blocks * (WORDS * 64)
        taken = data
        if APART:
            taken = tl.load(its + part_stride) + at_scales + panel * blocks * 32
        row = panel * 16 + inner
        store_numbers(
            out + tl.program_id(2).to(tl.int64) * out_stride, row, row < rows, data, taken, inner,
            grid, lane, blocks, KIND, WORDS, SMALL, STRIDED, OFFSET, LEAST, ASM,
        )  # fmt: skip

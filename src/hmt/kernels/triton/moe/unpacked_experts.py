"""Experts in ggml's blocks (Packing.BLOCKS) for many tokens: numbers made of some at a time.

Their numbers take three to eight times the room, so a layer's experts are unpacked group by group,
in ascending order, and each group is multiplied as experts of floats are.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

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
_EXPERTS = 32  # of a program of `_group_kernel`
# Where a part of a group's table lies: nowhere, among the unpacked numbers, or where it lay.
_ABSENT, _UNPACKED, _IN_PLACE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FLOATS = {
    torch.float32: Encoding.F32,
    torch.float16: Encoding.F16,
    torch.bfloat16: Encoding.BF16,
}


def unpacked_groups(
    table: ExpertTable, dtype: torch.dtype, among: range | None = None
) -> Iterator[tuple[ExpertTable, bool]]:
    """Tables of some experts each, whose numbers are in `dtype`, and whether it is the last.

    among   experts outside of it have no address; None: any may have one
    A table is valid until the next is asked for, on the device's queue.
    """
    matrices = (table.gate, table.up, table.down)
    sizes = [m.shape[0] * m.shape[1] if m.in_blocks else 0 for m in matrices]
    most = EXPERT_UNPACKED_BYTES // (sum(sizes) * dtype.itemsize)
    among = range(table.experts) if among is None else among
    group = max(1, min(len(among), most))
    where = table.addresses.device
    memory = torch.empty(group, sum(sizes), dtype=dtype, device=where)
    begins = tuple(sum(sizes[:index]) for index in range(len(sizes)))
    forms = [_unpacked(m, dtype) if m.in_blocks else _by_itself(m) for m in matrices]
    parts = _part_sources(matrices, begins, dtype.itemsize, where)
    for first in among[::group]:
        for index, matrix in enumerate(matrices):
            if matrix.in_blocks:
                _unpack(memory[: among.stop - first, begins[index] :], table, index, matrix, first)
        addresses = torch.empty(len(parts), table.experts, dtype=torch.int64, device=where)
        _group_kernel[(triton.cdiv(table.experts, _EXPERTS),)](
            table.addresses, table.part_stride, addresses, parts, memory, memory.stride(0),
            table.experts, first, group, PARTS=len(parts),
            ROWS=triton.next_power_of_2(len(parts)), EXPERTS=_EXPERTS, num_warps=4,
        )  # fmt: skip
        yield ExpertTable(addresses, *forms), first + group >= among.stop


@lru_cache(maxsize=256)
def _part_sources(
    matrices: tuple[ExpertMatrix, ...], begins: tuple[int, ...], itemsize: int, where: torch.device
) -> Tensor:
    """Where each part of a group's table comes from: int64 [parts, 2] on the device.

    Kind and offset in bytes, from the expert's numbers that were unpacked or the part itself.
    """
    rows = []
    for matrix, begin in zip(matrices, begins, strict=True):
        for part, offset in enumerate(matrix.offsets):
            if not matrix.in_blocks or part == _BIAS:
                rows.append((_IN_PLACE.value, offset))
            else:
                unpacked = (_UNPACKED.value, begin * itemsize)
                rows.append(unpacked if part == 0 else (_ABSENT.value, 0))
    return torch.tensor(rows, dtype=torch.int64).to(where)


# A launch for each group: with torch's operations it took the CPU a hundred, and prompts of a
# mixture of experts in blocks waited for the CPU most of the time.
@triton.jit(do_not_specialize=["first", "group"])
def _group_kernel(
    table, part_stride, addresses, parts, memory, expert_numbers, experts, first, group,
    PARTS: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Axis 0: EXPERTS experts.  `parts` of `_part_sources`; `addresses` [parts, experts]."""
    part = tl.arange(0, ROWS)[:, None]
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)[None, :]
    known = (part < PARTS) & (expert < experts)
    kind = tl.load(parts + part * 2, mask=part < PARTS, other=0)
    offset = tl.load(parts + part * 2 + 1, mask=part < PARTS, other=0)
    lies = tl.load(table + part * part_stride + expert, mask=known, other=0)
    numbers = memory + (expert - first).to(tl.int64) * expert_numbers
    unpacked = numbers.to(tl.int64) + offset
    here = (expert >= first) & (expert < first + group) & (lies != 0)
    address = tl.where(kind == _UNPACKED, unpacked, 0)
    address = tl.where(kind == _IN_PLACE, lies + offset, address)
    tl.store(addresses + part * experts + expert, tl.where(here, address, 0), mask=known)


def _unpacked(matrix: ExpertMatrix, dtype: torch.dtype) -> ExpertMatrix:
    bias = matrix.bias_dtype
    return ExpertMatrix(_FLOATS[dtype], matrix.shape, bias_dtype=bias)


def _by_itself(matrix: ExpertMatrix) -> ExpertMatrix:
    """Of parts that have addresses of their own."""
    return replace(matrix, offsets=(0,) * len(PARTS))


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

"""Numbers made of weights in Packing.BLOCKS: all rows of a range, or those that are asked for."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import ACTIVATION_BLOCK, BLOCK_SHAPES, Encoding, WeightTensor
from hmt.kernels.triton.gemm.block_codes import block_scales, sixteen
from hmt.kernels.triton.gemm.block_dots import block_constants, block_grid, lane_of, word_of
from hmt.kernels.triton.weight_codes import pointers

_OF_A_ROW = 8  # of one row


def numbers_of_blocks(out: Tensor, w: WeightTensor, start: int) -> None:
    """Rows of w from `start` on, written to out [rows, in], contiguous: see `dequantize`."""
    if out.numel() == 0:
        return
    first = start // 16
    wides = triton.cdiv(w.shape[1], ACTIVATION_BLOCK)
    at_once = blocks_at_once(w.encoding)
    grid = triton.cdiv(wides, at_once), triton.cdiv(start + len(out), 16) - first
    _numbers_kernel[grid](
        out, w.data, w.scales, block_grid(w.encoding, out.device), first, start, start + len(out),
        w.shape[1] // BLOCK_SHAPES[w.encoding].numbers, BLOCKS=at_once,
        num_warps=1, enable_fp_fusion=False, **block_constants(w.encoding),
    )  # fmt: skip


def blocks_at_once(encoding: Encoding) -> int:
    """Blocks of 256 inputs, of 16 rows, that a warp makes numbers of: as many as its registers."""
    return 1 if BLOCK_SHAPES[encoding].numbers == 32 else 2


def block_rows_at(
    data: Tensor,
    scales: Tensor,
    part_rows: int,
    width: int,
    encoding: Encoding,
    dtype: torch.dtype,
    ids: Tensor,
) -> Tensor:
    """Rows `ids` int64 [n] of a table in parts: [n, width].

    data, scales   int64 addresses, as kernels find them, of `part_rows` rows each, which are
                   multiples of 16 (the last of fewer)
    """
    out = torch.empty(len(ids), width, dtype=dtype, device=ids.device)
    if len(ids):
        wides = triton.cdiv(width, ACTIVATION_BLOCK)
        _rows_kernel[(triton.cdiv(wides, _OF_A_ROW), len(ids))](
            out, data, scales, block_grid(encoding, ids.device), ids, part_rows,
            width // BLOCK_SHAPES[encoding].numbers, BLOCKS=_OF_A_ROW,
            num_warps=1, enable_fp_fusion=False, **block_constants(encoding),
        )  # fmt: skip
    return out


@triton.jit
def _number(word, AT: tl.constexpr, OFFSET: tl.constexpr, by, least, TYPE: tl.constexpr):
    """(d scale) code + e minimum of byte AT of words, rounded once."""
    code = (word << (24 - 8 * AT)) >> 24
    if OFFSET > 0:
        code -= OFFSET
    return (code.to(tl.float32) * by + least).to(TYPE)


@triton.jit
def _four_numbers(
    one, two, three, four, AT: tl.constexpr, OFFSET: tl.constexpr, by, least, TYPE: tl.constexpr
):
    """Those of byte AT of four words: [.., 2, 2]."""
    first = _number(one, AT, OFFSET, by, least, TYPE)
    second = _number(two, AT, OFFSET, by, least, TYPE)
    third = _number(three, AT, OFFSET, by, least, TYPE)
    fourth = _number(four, AT, OFFSET, by, least, TYPE)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _sixteen_numbers(
    words, part, grid, d, e, TYPE: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """What `sixteen` gives, as numbers [lanes, rows, 16]."""
    one, two, three, four, by, least = sixteen(words, part, grid, KIND, G, ASM)
    by = d * by
    added = 0.0
    if LEAST:
        added = e * least
    first = _four_numbers(one, two, three, four, 0, OFFSET, by, added, TYPE)
    second = _four_numbers(one, two, three, four, 1, OFFSET, by, added, TYPE)
    third = _four_numbers(one, two, three, four, 2, OFFSET, by, added, TYPE)
    fourth = _four_numbers(one, two, three, four, 3, OFFSET, by, added, TYPE)
    numbers = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(numbers, (d.shape[0], d.shape[1], 16))


@triton.jit
def store_numbers(
    out, row, inside, data, scales, inner, grid, lane, blocks,
    KIND: tl.constexpr, WORDS: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Numbers of lanes of one panel, to rows of `out`.

    row, inside    int64 [1, rows]: of `out`, and whether it is to be written
    data, scales   int64 addresses of the panel, multiples of 16
    inner          int32 [1, rows]: rows in the panel
    """
    block, part, wide, there = lane
    TYPE: tl.constexpr = out.dtype.element_ty
    words = pointers(data + block.to(tl.int64) * (WORDS * 64), tl.int32) + inner
    taken = pointers(scales + block.to(tl.int64) * 32, tl.float16) + inner
    d, e = block_scales(words, taken, KIND)
    mask = (there & inside)[:, :, None]
    at = row * (blocks * (32 if SMALL else 256)) + wide * 256
    # Where 32 numbers lie side by side they are written at once: 1.2 TB/s of an H100 by 16, where
    # types whose lanes lie side by side had 2.2.
    TOGETHER: tl.constexpr = 1 if SMALL or STRIDED else 2
    number = tl.arange(0, 16 * TOGETHER)[None, None, :]
    for G in tl.static_range(0, 2 if SMALL else 4, TOGETHER):
        numbers = _sixteen_numbers(words, part, grid, d, e, TYPE, KIND, G, OFFSET, LEAST, ASM)
        if TOGETHER == 2:
            others = _sixteen_numbers(
                words, part, grid, d, e, TYPE, KIND, G + 1, OFFSET, LEAST, ASM
            )
            both = tl.permute(tl.join(numbers, others), (0, 1, 3, 2))
            numbers = tl.reshape(both, (d.shape[0], d.shape[1], 32))
        column = at + word_of(part, G, SMALL, STRIDED) * 4
        tl.store(out + column[:, :, None] + number, numbers, mask=mask)


@triton.jit
def _numbers_kernel(
    out, data, scales, grid, first_panel, start, stop, blocks,
    KIND: tl.constexpr, WORDS: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Axis 0: BLOCKS blocks of 256 inputs; axis 1: panels."""
    panel = (first_panel + tl.program_id(1)).to(tl.int64)
    lane = tl.arange(0, BLOCKS * (8 if SMALL else 4))[:, None]
    lane = lane_of(lane, tl.program_id(0) * BLOCKS, blocks, BLOCKS, SMALL)
    lanes = tl.arange(0, 16)[None, :]
    row = panel * 16 + lanes
    words = data.to(tl.int64) + panel * blocks * (WORDS * 64)
    taken = words
    if APART:
        taken = scales.to(tl.int64) + panel * blocks * 32
    store_numbers(
        out, row - start, (row >= start) & (row < stop), words, taken, lanes, grid, lane, blocks,
        KIND, WORDS, SMALL, STRIDED, OFFSET, LEAST, ASM,
    )  # fmt: skip


@triton.jit
def _rows_kernel(
    out, data, scales, grid, ids, part_rows, blocks,
    KIND: tl.constexpr, WORDS: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Axis 0: BLOCKS blocks of 256 inputs; axis 1: rows that are asked for."""
    lane = tl.arange(0, BLOCKS * (8 if SMALL else 4))[:, None]
    lane = lane_of(lane, tl.program_id(0) * BLOCKS, blocks, BLOCKS, SMALL)
    wanted = tl.load(ids + tl.program_id(1))
    its, row = wanted // part_rows, wanted % part_rows
    panel = row // 16
    words = tl.load(data + its) + panel * blocks * (WORDS * 64)
    taken = words
    if APART:
        taken = tl.load(scales + its) + panel * blocks * 32
    to = tl.program_id(1).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    inner = (row % 16).to(tl.int32) + tl.zeros((1, 1), tl.int32)
    store_numbers(
        out, to, to >= 0, words, taken, inner, grid, lane, blocks,
        KIND, WORDS, SMALL, STRIDED, OFFSET, LEAST, ASM,
    )  # fmt: skip

"""Weights in Packing.BLOCKS times few tokens: the kernel, and its launches."""

# ruff: noqa: RUF005 - Triton's tuples are joined by `+`

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import (
    ACTIVATION_BLOCK,
    BLOCK_SHAPES,
    Encoding,
    Packing,
    WeightTensor,
)
from hmt.kernels.triton.device_math import gated_product, rounded
from hmt.kernels.triton.gemm.block_dots import (
    BlockTokens,
    block_constants,
    block_grid,
    block_tokens,
    lane_dots,
    lane_of,
    lanes_of,
)
from hmt.kernels.triton.pdl import (
    ask_cache_for_rows,
    dependent,
    inputs_are_there,
    next_may_begin,
)

# Up to so many tokens weights are read as they lie; with more, numbers are made of them first.
FEW_TOKENS = 32
# With floats: a product takes one instruction for each number, not a quarter.
FEW_TOKENS_FLOAT = 8
# Of a program.  With eight, registers do not do, and it takes long to compile.
_TOKENS = 4
_PIECES = 32  # in which a program asks for its weights


def takes_blocks(x: Tensor, w: WeightTensor) -> bool:
    """Whether `multiply_blocks` takes x [tokens, in] and a weight, which are few then."""
    most = FEW_TOKENS if w.activations.are_integers else FEW_TOKENS_FLOAT
    return w.encoding.packing is Packing.BLOCKS and 0 < len(x) <= most


def multiply_blocks(
    out: Tensor,
    x: Tensor,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    tokens: BlockTokens | None = None,
    *,
    activation: str = "",
    add: bool = False,
) -> None:
    """X [tokens, in] times up to three weights of one encoding, side by side, to out.

    tokens       `block_tokens` of x, where they are known
    activation   of the product with the first weight of two; it is multiplied with the other then
    add          products are added to what out holds
    """
    w = weights[0]
    integers = w.activations.are_integers
    if tokens is None or tokens.rounded is not integers:
        tokens = block_tokens(x, rounded=integers)
    given: list[WeightTensor | None] = [*weights, None, None][:3]
    rows = [0 if one is None else one.shape[0] for one in given]
    panels = [triton.cdiv(count, 16) for count in rows]
    at_once = min(_TOKENS, triton.next_power_of_2(len(x)))
    wides = triton.cdiv(w.shape[1], ACTIVATION_BLOCK)
    blocks, warps = sizes_of(w.encoding, w.shape[1])
    constants: dict[str, Any] = block_constants(w.encoding)
    grid = triton.cdiv(len(x), at_once), panels[0] if activation else sum(panels)
    _few_tokens[grid](
        out, tokens.numbers.view(torch.int32) if integers else x, tokens.scales, tokens.sums,
        block_grid(w.encoding, x.device),
        *(None if one is None else one.data for one in given),
        *(None if one is None else one.scales for one in given),
        *[*biases, None, None][:3],
        *rows, len(x), w.shape[1] // BLOCK_SHAPES[w.encoding].numbers, wides,
        x.stride(0), out.stride(0),
        COUNT=1 if activation else len(weights), ACTIVATION=activation, ADD=add,
        BLOCKS=blocks, TOKENS=at_once, ROUNDED=integers, num_warps=warps,
        enable_fp_fusion=False, **constants, **dependent(x.device),
    )  # fmt: skip


def sizes_of(encoding: Encoding, columns: int) -> tuple[int, int]:
    """Blocks of 256 inputs that a program takes at once, and its warps; by inputs alone."""
    wides = triton.cdiv(columns, ACTIVATION_BLOCK)
    small = BLOCK_SHAPES[encoding].numbers == 32
    # All inputs of a row at once, as far as registers do: Q4_K of 4096 rows and 14336 inputs takes
    # an H200 13 us so, 20 with 16 blocks; of 4096 inputs 4.8, with 8 blocks 6.7.
    blocks = min(32 if wides > 32 else 16, triton.next_power_of_2(wides))
    threads = 4 if blocks < 16 else 2  # for a lane of 16 rows
    # With one, lanes would not differ by blocks, and Triton 3.6 stops at hints on such addresses.
    blocks = max(1, blocks // 2) if small else max(2, blocks)
    return blocks, max(1, lanes_of(encoding, blocks) * threads // 32)


@triton.jit
def tokens_of(tokens, x, x_scales, x_sums, first, wides, x_row, ROUNDED: tl.constexpr):
    """The pointers of `BlockTokens` at token `first`."""
    if ROUNDED:
        x += first * 64 * wides
        x_scales += first * wides
        x_sums += first * 16 * wides
    else:
        x += first * x_row
    return x, x_scales, x_sums


@triton.jit
def row_totals(
    data, scales, grid, x, x_scales, x_sums, blocks, wides, x_row, last,
    KIND: tl.constexpr, WORDS: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
    ROUNDED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sixteen rows, at int64 addresses, times TOKENS tokens: as many f32 [16].

    last   the last token that there is
    """
    PARTS: tl.constexpr = 8 if SMALL else 4
    nothing = tl.zeros((PARTS * BLOCKS, 16), tl.float32)
    totals = (nothing,) * TOKENS
    lanes = tl.arange(0, PARTS * BLOCKS)[:, None]
    for start in range(0, wides, BLOCKS):
        lane = lane_of(lanes, start, blocks, BLOCKS, SMALL)
        some = lane_dots(
            data, scales, grid, lane, x, x_scales, x_sums, wides, x_row, last,
            KIND, WORDS, SMALL, STRIDED, OFFSET, LEAST, APART, ASM, ROUNDED, TOKENS,
        )  # fmt: skip
        new = ()
        for token in tl.static_range(TOKENS):
            new = new + (totals[token] + some[token],)  # type: ignore[assignment]
        totals = new
    out = ()
    for token in tl.static_range(TOKENS):
        out = out + (tl.sum(totals[token], axis=0),)  # type: ignore[assignment]
    return out


@triton.jit
def _weight_of(panel, data, scales, rows, COUNT: tl.constexpr, APART: tl.constexpr):
    """Which of up to three weights, one after the other, panel `panel` is of.

    (Its number there, int64 addresses of that weight's data and scales, rows of it, rows before it,
    and which it is.)
    """
    at = data[0].to(tl.int64)
    scales_at = at
    if APART:
        scales_at = scales[0].to(tl.int64)
    count, column, which = rows[0], 0, 0
    if COUNT > 1:
        before = tl.cdiv(rows[0], 16)
        if panel >= before:
            panel -= before
            column, count, which = rows[0], rows[1], 1
            at = data[1].to(tl.int64)
            if APART:
                scales_at = scales[1].to(tl.int64)
            if COUNT > 2:
                after = tl.cdiv(rows[1], 16)
                if panel >= after:
                    panel -= after
                    column, count, which = rows[0] + rows[1], rows[2], 2
                    at = data[2].to(tl.int64)
                    if APART:
                        scales_at = scales[2].to(tl.int64)
    return panel, at, scales_at, count, column, which


@triton.jit
def _few_tokens(
    out, x, x_scales, x_sums, grid, data_0, data_1, data_2, scales_0, scales_1, scales_2,
    bias_0, bias_1, bias_2, rows_0, rows_1, rows_2, tokens, blocks, wides, x_row, out_row,
    COUNT: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr,
    KIND: tl.constexpr, WORDS: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
    ROUNDED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: TOKENS tokens, so that those who read the same follow each other; axis 1: panels."""
    next_may_begin(DEPENDENT)
    panel = tl.program_id(1)
    panel, data, scales, rows, column, which = _weight_of(
        panel, (data_0, data_1, data_2), (scales_0, scales_1, scales_2),
        (rows_0, rows_1, rows_2), COUNT, APART,
    )  # fmt: skip
    nbytes = panel.to(tl.int64) * blocks * (WORDS * 64)
    taken = panel.to(tl.int64) * blocks * 32
    data += nbytes
    scales += taken
    size = blocks * (WORDS * 2)
    ask_cache_for_rows(data, size, 32, size, DEPENDENT)
    inputs_are_there(DEPENDENT)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    x, x_scales, x_sums = tokens_of(tokens, x, x_scales, x_sums, first, wides, x_row, ROUNDED)
    last = tokens - 1 - first.to(tl.int32)
    totals = row_totals(
        data, scales, grid, x, x_scales, x_sums, blocks, wides, x_row, last,
        KIND, WORDS, SMALL, STRIDED, OFFSET, LEAST, APART, ASM, ROUNDED, TOKENS, BLOCKS,
    )  # fmt: skip
    if ACTIVATION != "":
        scales = data_1.to(tl.int64)
        if APART:
            scales = scales_1.to(tl.int64)
        others = row_totals(
            data_1.to(tl.int64) + nbytes, scales + taken, grid, x, x_scales, x_sums,
            blocks, wides, x_row, last,
            KIND, WORDS, SMALL, STRIDED, OFFSET, LEAST, APART, ASM, ROUNDED, TOKENS, BLOCKS,
        )  # fmt: skip
    TYPE: tl.constexpr = out.dtype.element_ty
    row = panel * 16 + tl.arange(0, 16)
    for token in tl.static_range(TOKENS):
        there = row < tl.where(token <= last, rows, 0)
        result = totals[token]
        if bias_0 is not None:
            result += tl.load(bias_0 + row, mask=row < tl.where(which == 0, rows, 0), other=0.0).to(
                tl.float32
            )
        if COUNT > 1 and bias_1 is not None:
            result += tl.load(bias_1 + row, mask=row < tl.where(which == 1, rows, 0), other=0.0).to(
                tl.float32
            )
        if COUNT > 2 and bias_2 is not None:
            result += tl.load(bias_2 + row, mask=row < tl.where(which == 2, rows, 0), other=0.0).to(
                tl.float32
            )
        if ACTIVATION != "":
            other = others[token]
            if bias_1 is not None:
                other += tl.load(bias_1 + row, mask=there, other=0.0).to(tl.float32)
            result = gated_product(result, other, ACTIVATION, TYPE)
        at = out + (first + token) * out_row + column + row
        if ADD:
            result = rounded(result, TYPE) + tl.load(at, mask=there, other=0.0).to(tl.float32)
        tl.store(at, result.to(TYPE), mask=there)

"""Experts in ggml's blocks (Packing.BLOCKS) for few tokens: one launch for each half.

As `moe_gemv`: each pair of a token and its expert by itself, with the products of `block_dots`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import ACTIVATION_BLOCK, BLOCK_SHAPES
from hmt.kernels.triton.device_math import gated_product, rounded
from hmt.kernels.triton.gemm.block_dots import (
    block_constants,
    block_grid,
    block_tokens,
    lane_dots,
    lane_of,
    lanes_of,
)
from hmt.kernels.triton.gemm.gemv_blocks import sizes_of
from hmt.kernels.triton.moe.biases import DOWN, UP, biases
from hmt.kernels.triton.moe.matrix_format import MatrixForm
from hmt.kernels.triton.moe.weight_table import ExpertMatrix, ExpertTable
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin

# Experts of a token that a program of down has at once, and their lanes, at most.
_PAIRS, _LANES = 8, 128
_WARPS = 16  # at most


def gate_up_in_blocks(
    h: Tensor,
    x: Tensor,
    table: ExpertTable,
    slots: Tensor,
    cut: Tensor | None,
    activation: str,
    top: int,
) -> None:
    """activation(gate(x)) * up(x) of each slot's expert, to h [slots, width].

    x       [tokens, hidden], `top` slots for each
    slots   int64: experts; of those that are not here nothing is written
    cut     see `ExpertShares`: zeros behind the first rows of that expert
    """
    matrix = table.gate
    width, hidden = matrix.shape
    rounds = matrix.activations.are_integers
    tokens = block_tokens(x, rounded=rounds)
    blocks, warps = sizes_of(matrix.encoding, hidden)
    _gate_up_kernel[(triton.cdiv(width, 16), slots.numel())](
        table.addresses, table.part_stride, table.experts, slots, cut,
        tokens.numbers.view(torch.int32) if rounds else x, tokens.scales, tokens.sums,
        block_grid(matrix.encoding, x.device), h, width,
        hidden // BLOCK_SHAPES[matrix.encoding].numbers, triton.cdiv(hidden, ACTIVATION_BLOCK),
        x.stride(0), *table.gate.offsets, *table.up.offsets,
        TOP=top, ACTIVATION=activation, BIAS=_bias_of(matrix), BLOCKS=blocks, ROUNDED=rounds,
        num_warps=min(_WARPS, 2 * warps), enable_fp_fusion=False,
        **block_constants(matrix.encoding), **dependent(x.device),
    )  # fmt: skip


def down_in_blocks(
    out: Tensor,
    total: Tensor,
    h: Tensor,
    table: ExpertTable,
    slots: Tensor,
    slot_scales: Tensor,
    cut: Tensor | None,
    *,
    add: bool,
    keep: bool,
    last: bool,
) -> None:
    """The down projections of h [slots, width], scaled and added by token.

    Slots of a token are in ascending order of experts.  The sum begins at `total` f32 where it is
    to `add`, and is written there to `keep` it, and to `out` if it is the `last`.  Of the expert
    that is `cut`, only the first columns are read: behind them lies what was there before.
    """
    matrix = table.down
    hidden, width = matrix.shape
    tokens, top = slots.shape
    rounds = matrix.activations.are_integers
    vectors = block_tokens(h, rounded=rounds)
    blocks, warps = sizes_of(matrix.encoding, width)
    pairs = _LANES // lanes_of(matrix.encoding, blocks)
    pairs = max(1, min(_PAIRS, pairs, triton.next_power_of_2(top)))
    _down_kernel[(triton.cdiv(hidden, 16), tokens)](
        table.addresses, table.part_stride, table.experts, slots, slot_scales, cut,
        vectors.numbers.view(torch.int32) if rounds else h, vectors.scales, vectors.sums,
        block_grid(matrix.encoding, h.device), total, out, hidden,
        width // BLOCK_SHAPES[matrix.encoding].numbers, triton.cdiv(width, ACTIVATION_BLOCK),
        h.stride(0), *matrix.offsets,
        TOP=top, PAIRS=pairs, RESULT=MatrixForm.kind_of(h.dtype), ADD=add, KEEP=keep, LAST=last,
        BIAS=_bias_of(matrix), BLOCKS=blocks, ROUNDED=rounds,
        num_warps=min(_WARPS, pairs * warps), enable_fp_fusion=False,
        **block_constants(matrix.encoding), **dependent(h.device),
    )  # fmt: skip


def _bias_of(matrix: ExpertMatrix) -> object:
    return None if matrix.bias_dtype is None else MatrixForm.kind_of(matrix.bias_dtype)


@triton.jit
def _several_dots(
    data, scales, grid, x, x_scales, x_sums, blocks, wides,
    KIND: tl.constexpr, WORDS: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCKS: tl.constexpr, MATRICES: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of several matrices times one vector each: f32 [MATRICES, 16].

    data, scales          int64 addresses of the rows [MATRICES * lanes, 1]
    blocks                of a row, of all or [MATRICES * lanes, 1]
    x, x_scales, x_sums   pointers, of all or [MATRICES * lanes, 1]
    """
    LANES: tl.constexpr = BLOCKS * (8 if SMALL else 4)
    total = tl.zeros((MATRICES * LANES, 16), tl.float32)
    lanes = tl.arange(0, MATRICES * LANES)[:, None]
    for start in range(0, wides, BLOCKS):
        lane = lane_of(lanes, start, blocks, BLOCKS, SMALL)
        some = lane_dots(
            data, scales, grid, lane, x, x_scales, x_sums, wides, 0, 0,
            KIND, WORDS, SMALL, STRIDED, OFFSET, LEAST, APART, ASM, ROUNDED, 1,
        )  # fmt: skip
        total += some[0]
    return tl.sum(tl.reshape(total, (MATRICES, LANES, 16)), axis=1)


@triton.jit
def _gate_up_kernel(
    table, part_stride, experts, slots, cut, x, x_scales, x_sums, grid, h, rows, blocks, wides,
    x_row, gate_data, gate_scales, gate_extra, gate_factor, gate_bias,
    up_data, up_scales, up_extra, up_factor, up_bias,
    KIND: tl.constexpr, WORDS: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
    TOP: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, BLOCKS: tl.constexpr,
    ROUNDED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: panels; axis 1: slots."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(slots + slot)
    known = (expert >= 0) & (expert < experts)
    address = tl.load(table + tl.where(known, expert, 0))
    here = known & (address != 0)
    if cut is not None:
        limit = tl.where(expert == tl.load(cut), tl.load(cut + 1), rows)
        begins = tl.program_id(0) * 16
        if here & (begins >= limit):
            row = begins + tl.arange(0, 16)
            nothing = tl.zeros((16,), h.dtype.element_ty)
            tl.store(h + slot * rows + row, nothing, mask=row < rows)
        here &= begins < limit
    if here:
        LANES: tl.constexpr = BLOCKS * (8 if SMALL else 4)
        panel = tl.program_id(0).to(tl.int64)
        is_up = tl.arange(0, 2 * LANES)[:, None] >= LANES
        gate, up = table + expert, table + expert + UP * part_stride
        data = tl.where(is_up, tl.load(up) + up_data, tl.load(gate) + gate_data)
        data += panel * blocks * (WORDS * 64)
        scales = data
        if APART:
            gate_scale = tl.load(gate + part_stride) + gate_scales
            scales = tl.where(is_up, tl.load(up + part_stride) + up_scales, gate_scale)
            scales += panel * blocks * 32
        token = slot // TOP
        if ROUNDED:
            x += token * 64 * wides
            x_scales += token * wides
            x_sums += token * 16 * wides
        else:
            x += token * x_row
        both = _several_dots(
            data, scales, grid, x, x_scales, x_sums, blocks, wides,
            KIND, WORDS, SMALL, STRIDED, OFFSET, LEAST, APART, ASM, ROUNDED, BLOCKS, 2,
        )  # fmt: skip
        row = tl.program_id(0) * 16 + tl.arange(0, 16)
        side = tl.arange(0, 2)[:, None]
        gate_row = tl.sum(tl.where(side == 0, both, 0.0), axis=0)
        up_row = tl.sum(tl.where(side == 1, both, 0.0), axis=0)
        if BIAS is not None:
            gate_row += biases(gate, part_stride, 0, gate_bias, row, row < rows, BIAS)
            up_row += biases(gate, part_stride, UP, up_bias, row, row < rows, BIAS)
        product = gated_product(gate_row, up_row, ACTIVATION, h.dtype.element_ty)
        tl.store(h + slot * rows + row, product.to(h.dtype.element_ty), mask=row < rows)


@triton.jit
def _down_kernel(
    table, part_stride, experts, slots, slot_scales, cut, x, x_scales, x_sums, grid, total, out,
    rows, blocks, wides, x_row, at_data, at_scales, at_extra, at_factor, at_bias,
    KIND: tl.constexpr, WORDS: tl.constexpr, SMALL: tl.constexpr, STRIDED: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr,
    TOP: tl.constexpr, PAIRS: tl.constexpr, RESULT: tl.constexpr, ADD: tl.constexpr,
    KEEP: tl.constexpr, LAST: tl.constexpr, BIAS: tl.constexpr, BLOCKS: tl.constexpr,
    ROUNDED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: panels; axis 1: tokens.  Adds the token's experts, PAIRS of them at a time."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    LANES: tl.constexpr = BLOCKS * (8 if SMALL else 4)
    token = tl.program_id(1).to(tl.int64)
    panel = tl.program_id(0).to(tl.int64)
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    inside = row < rows
    whole = tl.zeros((16,), tl.float32)
    if ADD:
        whole = tl.load(total + token * rows + row, mask=inside, other=0.0)
    for start in tl.static_range(0, TOP, PAIRS):
        one = start + tl.arange(0, PAIRS * LANES)[:, None] // LANES
        slot = token * TOP + tl.minimum(one, TOP - 1)
        expert = tl.load(slots + slot)
        known = (expert >= 0) & (expert < experts)
        its = table + tl.where(known, expert, 0)
        first = tl.where(known, tl.load(its), 0)
        here = first != 0
        if tl.max(tl.max(first, axis=0), axis=0) != 0:
            # Those that are not here are computed with one that is, and not added.
            some = tl.max(tl.where(here, expert, -1), axis=0, keep_dims=True)
            used = tl.where(here, expert, some)
            its = table + used + DOWN * part_stride
            its_blocks = blocks
            if cut is not None:
                brought = tl.load(cut + 1) // (32 if SMALL else 256)
                its_blocks = tl.where(used == tl.load(cut), brought, blocks)
            data = tl.load(its) + at_data + panel * blocks * (WORDS * 64)
            scales = data
            if APART:
                scales = tl.load(its + part_stride) + at_scales + panel * blocks * 32
            if ROUNDED:
                its_x = x + slot * 64 * wides
                its_scales = x_scales + slot * wides
                its_sums = x_sums + slot * 16 * wides
            else:
                its_x, its_scales, its_sums = x + slot * x_row, x_scales, x_sums
            result = _several_dots(
                data, scales, grid, its_x, its_scales, its_sums, its_blocks, wides,
                KIND, WORDS, SMALL, STRIDED, OFFSET, LEAST, APART, ASM, ROUNDED, BLOCKS, PAIRS,
            )  # fmt: skip
            pair = start + tl.arange(0, PAIRS)[:, None]
            wanted = tl.load(slots + token * TOP + pair, mask=pair < TOP, other=-1)
            is_known = (wanted >= 0) & (wanted < experts)
            wanted = tl.where(is_known, wanted, 0)
            is_here = is_known & (tl.load(table + wanted) != 0)
            if BIAS is not None:
                lane = row[None, :] + pair * 0
                there = is_here & (lane < rows)
                result += biases(table + wanted, part_stride, DOWN, at_bias, lane, there, BIAS)
            by = tl.load(slot_scales + token * TOP + pair, mask=is_here, other=0.0)
            result = tl.where(is_here, rounded(result, RESULT) * by, 0.0)
            for i in tl.static_range(PAIRS):
                whole += tl.sum(tl.where(pair == start + i, result, 0.0), axis=0)
    if KEEP:
        tl.store(total + token * rows + row, whole, mask=inside)
    if LAST:
        tl.store(out + token * rows + row, whole.to(RESULT), mask=inside)

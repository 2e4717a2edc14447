"""Experts for few tokens: each pair of a token and its expert by itself, in three or four launches.

Expert bytes are read once per pair; two tokens that share an expert meet in the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.kernels.triton.activations import (
    Vectors,
    empty_vectors,
    prepare,
    split,
    store_digits,
)
from hmt.kernels.triton.device_math import gated_product, interpreted, rounded
from hmt.kernels.triton.moe.biases import DOWN, UP, biases
from hmt.kernels.triton.moe.block_experts import down_in_blocks, gate_up_in_blocks
from hmt.kernels.triton.moe.matrix_format import MatrixForm, matrix_form
from hmt.kernels.triton.moe.moe_gemv_dots import panel_dots, row_dots
from hmt.kernels.triton.moe.weight_table import ExpertTable, planes_of
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin


@triton.jit
def _dots(
    table, part_stride, expert, first_part, at_data, at_scales, at_extra, at_factor,
    present, panel, x, x_scales, x_row, rows, columns,
    PANELS: tl.constexpr, KIND: tl.constexpr, DATA: tl.constexpr, SCALE: tl.constexpr,
    EXTRA: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, PLANES: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of one matrix of several experts, or of several matrices: f32 [m, 16].

    expert, first_part, present, panel [m, 1, 1]; at_.. offsets [m, 1, 1] or numbers
    """
    parts = table + expert + first_part * part_stride
    data = tl.load(parts, mask=present, other=0) + at_data
    scales = data
    if SCALE is not None:
        scales = tl.load(parts + part_stride, mask=present, other=0) + at_scales
    if PANELS:
        extra = scales
        if EXTRA != "":
            extra = tl.load(parts + 2 * part_stride, mask=present, other=0) + at_extra
        factor = 1.0
        if KIND == "nvfp4":
            where_factor = tl.load(parts + 3 * part_stride, mask=present, other=0) + at_factor
            pointer = where_factor.to(tl.pointer_type(tl.float32))
            factor = tl.load(pointer, mask=present, other=0.0)
        out = panel_dots(
            data, scales, extra, factor, present, panel, x, x_scales, x_row,
            columns // 32, columns // 4,
            KIND, GROUP, SCALE, EXTRA, PLANES, STEP, STAGES, EVEN, ASM,
        )  # fmt: skip
    else:
        out = row_dots(
            data, scales, present, panel, x, x_row, rows, columns,
            KIND, DATA, GROUP, TILE_ROWS, TILE_COLUMNS, ALIGNED, PLANES == 1, STEP,
        )  # fmt: skip
    return out


@triton.jit
def _gate_up_kernel(
    table, part_stride, experts, slots, cut, x, x_scales, h, h_scales, rows, columns,
    gate_data, gate_scales, gate_extra, gate_factor, gate_bias,
    up_data, up_scales, up_extra, up_factor, up_bias,
    TOP: tl.constexpr, PAIRS: tl.constexpr, HEIGHT: tl.constexpr, ACTIVATION: tl.constexpr,
    RESULT: tl.constexpr, H_PLANES: tl.constexpr,
    PANELS: tl.constexpr, KIND: tl.constexpr, DATA: tl.constexpr, SCALE: tl.constexpr,
    EXTRA: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, PLANES: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: HEIGHT panels; axis 1: slots.  Writes activation(gate) * up of one expert.

    Of the expert that is cut, zeros behind the first rows.
    """
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(slots + slot)
    known = (expert >= 0) & (expert < experts)
    address = tl.load(table + tl.where(known, expert, 0))
    if known & (address != 0):
        which = tl.arange(0, 2 * HEIGHT)[:, None, None]
        is_up = which >= HEIGHT
        panel = tl.program_id(0) * HEIGHT + which % HEIGHT
        present = panel * 16 < rows
        if cut is not None:
            limit = tl.where(expert == tl.load(cut), tl.load(cut + 1), rows)
            present = present & (panel * 16 < limit)
        out = _dots(
            table, part_stride, expert, tl.where(is_up, UP, 0),
            tl.where(is_up, up_data, gate_data), tl.where(is_up, up_scales, gate_scales),
            tl.where(is_up, up_extra, gate_extra), tl.where(is_up, up_factor, gate_factor),
            present, panel, x, x_scales, slot // TOP, rows, columns,
            PANELS, KIND, DATA, SCALE, EXTRA, GROUP, TILE_ROWS, TILE_COLUMNS, ALIGNED, PLANES,
            STEP, STAGES, EVEN, ASM,
        )  # fmt: skip
        if PLANES == 1:
            out *= tl.load(x_scales + slot // TOP)
        if BIAS is not None:
            lane = panel * 16 + tl.arange(0, 16)[None, None, :]
            out += tl.reshape(
                biases(
                    table + expert, part_stride, tl.where(is_up, UP, 0),
                    tl.where(is_up, up_bias, gate_bias), lane, present & (lane < rows), BIAS,
                ),
                (2 * HEIGHT, 16),
            )  # fmt: skip
        out = tl.reshape(out, (2, HEIGHT, 16))
        side = tl.arange(0, 2)[:, None, None]
        gate = tl.sum(tl.where(side == 0, out, 0.0), axis=0)
        up = tl.sum(tl.where(side == 1, out, 0.0), axis=0)
        product = gated_product(gate, up, ACTIVATION, RESULT)
        first = (tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)[:, None]) * 16
        row = first + tl.arange(0, 16)[None, :]
        if H_PLANES > 1:
            integers, scale = split(product, H_PLANES)
            at = h + slot * H_PLANES * rows + row
            store_digits(at, rows, integers, row < rows, H_PLANES)
            tl.store(h_scales + slot * (rows // 16) + first // 16, scale, mask=first < rows)
        else:
            tl.store(h + slot * rows + row, product.to(RESULT), mask=row < rows)


@triton.jit
def _down_kernel(
    table, part_stride, experts, slots, slot_scales, h, h_scales, total, out, rows, columns,
    at_data, at_scales, at_extra, at_factor, at_bias,
    TOP: tl.constexpr, PAIRS: tl.constexpr, RESULT: tl.constexpr, ADD: tl.constexpr,
    KEEP: tl.constexpr, LAST: tl.constexpr,
    PANELS: tl.constexpr, KIND: tl.constexpr, DATA: tl.constexpr, SCALE: tl.constexpr,
    EXTRA: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, PLANES: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: panels; axis 1: tokens.  Adds the token's experts, PAIRS of them at a time."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    inside = row < rows
    whole = tl.zeros((16,), tl.float32)
    if ADD:
        whole = tl.load(total + token * rows + row, mask=inside, other=0.0)
    for start in tl.static_range(0, TOP, PAIRS):
        one = start + tl.arange(0, PAIRS)[:, None, None]
        slot = token * TOP + one
        expert = tl.load(slots + slot, mask=one < TOP, other=-1)
        known = (expert >= 0) & (expert < experts)
        expert = tl.where(known, expert, 0)
        present = known & (tl.load(table + expert) != 0)
        result = _dots(
            table, part_stride, expert, DOWN, at_data, at_scales, at_extra, at_factor,
            present, tl.program_id(0), h, h_scales, tl.where(present, slot, 0), rows, columns,
            PANELS, KIND, DATA, SCALE, EXTRA, GROUP, TILE_ROWS, TILE_COLUMNS, ALIGNED, PLANES,
            STEP, STAGES, EVEN, ASM,
        )  # fmt: skip
        flat = start + tl.arange(0, PAIRS)[:, None]
        here = tl.reshape(present, (PAIRS, 1))
        if PLANES == 1:
            by_token = tl.load(h_scales + token * TOP + flat, mask=here, other=0.0)
            result *= by_token
        if BIAS is not None:
            lane = tl.program_id(0) * 16 + tl.arange(0, 16)[None, None, :]
            result += tl.reshape(
                biases(
                    table + expert, part_stride, DOWN, at_bias, lane, present & (lane < rows), BIAS
                ),
                (PAIRS, 16),
            )
        by = tl.load(slot_scales + token * TOP + flat, mask=here, other=0.0)
        result = tl.where(here, rounded(result, RESULT) * by, 0.0)
        for i in tl.static_range(PAIRS):
            whole += tl.sum(tl.where(flat == start + i, result, 0.0), axis=0)
    if KEEP:
        tl.store(total + token * rows + row, whole, mask=inside)
    if LAST:
        tl.store(out + token * rows + row, whole.to(RESULT), mask=inside)


def experts_by_pairs(
    x: Tensor,
    table: ExpertTable,
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    total: Tensor | None,
    last: bool,
    cut: Tensor | None = None,
) -> Tensor:
    """See `experts.experts_by_table`."""
    tokens, top = chosen.shape
    gate_planes = 0 if table.gate.in_blocks else planes_of(table.gate, x.dtype)
    inputs, slots, slot_scales = prepare(x, gate_planes, chosen, scales)
    wanted = 0 if table.down.in_blocks else planes_of(table.down, x.dtype)
    width, hidden = table.gate.shape[0], table.down.shape[0]
    # With one scale per row it takes all of the row to make codes; digits are made on the spot.
    on_the_spot = wanted > 1 and not table.gate.in_blocks
    h = empty_vectors(tokens * top, width, wanted if on_the_spot else 0, x)
    if table.gate.in_blocks:
        gate_up_in_blocks(h.numbers, inputs.numbers, table, slots, cut, activation, top)
    else:
        gate = matrix_form(table.gate)
        _launch_gate_up(x, table, gate, inputs, slots, cut, h, activation, top)
    if wanted != h.planes:
        h = prepare(h.numbers, wanted)[0]
    fresh, out = total is None, total
    if last or out is None:
        out = torch.empty(tokens, hidden, dtype=x.dtype if last else torch.float32, device=x.device)
    whole = out if total is None else total
    keep = not (fresh and last)
    if table.down.in_blocks:
        down_in_blocks(
            out, whole, h.numbers, table, slots, slot_scales, cut, add=not fresh, keep=keep,
            last=last,
        )  # fmt: skip
        return out
    panels = triton.cdiv(hidden, 16)
    down = matrix_form(table.down)
    pairs, step, warps, stages = down_blocks(down, width, top)
    _down_kernel[(panels, tokens)](
        table.addresses, table.part_stride, table.experts, slots, slot_scales,
        h.numbers_for(in_panels=table.down.in_panels), h.scales, whole, out, hidden, width,
        *table.down.offsets,
        TOP=top, PAIRS=pairs, RESULT=down.kind_of(x.dtype), ADD=not fresh,
        KEEP=keep, LAST=last,
        PLANES=h.planes, STEP=step, STAGES=stages, EVEN=width % (32 * step) == 0,
        ASM=not interpreted(), num_warps=warps, **down.constants, **dependent(x.device),
    )  # fmt: skip
    return out


def _launch_gate_up(
    x: Tensor,
    table: ExpertTable,
    form: MatrixForm,
    inputs: Vectors,
    slots: Tensor,
    cut: Tensor | None,
    h: Vectors,
    activation: str,
    top: int,
) -> None:
    width, hidden = table.gate.shape
    height, step, warps, stages = gate_up_blocks(form, hidden)
    _gate_up_kernel[(triton.cdiv(width, 16 * height), slots.numel())](
        table.addresses, table.part_stride, table.experts, slots, cut,
        inputs.numbers_for(in_panels=table.gate.in_panels), inputs.scales, h.numbers, h.scales,
        width, hidden,
        *table.gate.offsets, *table.up.offsets,
        TOP=top, PAIRS=1, HEIGHT=height, ACTIVATION=activation,
        RESULT=form.kind_of(x.dtype), H_PLANES=h.planes,
        PLANES=inputs.planes, STEP=step, STAGES=stages, EVEN=hidden % (32 * step) == 0,
        ASM=not interpreted(), num_warps=warps, **form.constants, **dependent(x.device),
    )  # fmt: skip


# Measured on an H200 with experts of 2048 x 7168 and 768 x 2048, eight of which one token chooses.


def gate_up_blocks(form: MatrixForm, hidden: int) -> tuple[int, int, int, int]:
    """(panels of gate and up, blocks of 32 or columns of a step, warps, stages) of a program."""
    if not form.in_panels:
        return 1, 64, 4, 1
    if hidden < 4096:  # few steps: more lanes for each
        return 1, min(32, triton.next_power_of_2(hidden // 32)), 8, 1
    return 1, 16, 4, 1


def down_blocks(form: MatrixForm, width: int, top: int) -> tuple[int, int, int, int]:
    """(experts together, blocks of 32 or columns of a step, warps, stages) of a program."""
    pairs = min(4, triton.next_power_of_2(top))
    if not form.in_panels:
        return pairs, 64, 4, 1
    if width % 512 == 0:
        return min(2, pairs), 16, 4, 1
    return pairs, min(8, triton.next_power_of_2(width // 32)), 4, 1

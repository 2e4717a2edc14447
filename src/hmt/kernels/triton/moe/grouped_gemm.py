"""Experts for many tokens: sorted by expert, and each expert's multiplied on tensor cores."""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.model import EXPERT_WORKSPACE_BYTES
from hmt.kernels.triton.activations import prepare
from hmt.kernels.triton.device_math import gated_product
from hmt.kernels.triton.gemm.tile_weights import nibble_numbers, panel_codes, panel_words, row_tile
from hmt.kernels.triton.moe.biases import DOWN, UP, biases
from hmt.kernels.triton.moe.grouped_wgmma_launch import experts_by_several, takes_experts
from hmt.kernels.triton.moe.matrix_format import matrix_form
from hmt.kernels.triton.moe.permute import SortedPairs, combine, sort_pairs
from hmt.kernels.triton.moe.weight_table import ExpertMatrix, ExpertTable
from hmt.kernels.triton.weight_codes import pointers


@triton.jit
def _code_dots(
    data, scales, extra, factor, x, x_at, x_there, first, rows, columns,
    PANELS: tl.constexpr, KIND: tl.constexpr, DATA: tl.constexpr, SCALE: tl.constexpr,
    EXTRA: tl.constexpr, GROUP: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of codes with int8 rows of x, exact in each group: f32 [ROWS, TOKENS]."""
    row = first + tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    if PANELS:  # as `panel_codes`
        k = k // 32 * 32 + k // 4 % 2 * 16 + k // 8 % 4 * 4 + k % 4
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, columns, COLUMNS):
        mask = x_there[:, None] & (start + k < columns)[None, :]
        numbers = tl.load(x + x_at[:, None] + (start + k)[None, :], mask=mask, other=0)
        if PANELS:
            for half in tl.static_range(2 if GROUP == 16 else 1):
                codes, by, least = panel_codes(
                    data, scales, extra, factor, first, start, rows, columns, half,
                    KIND, GROUP, SCALE, EXTRA, ROWS, COLUMNS,
                )  # fmt: skip
                total += tl.dot(codes, tl.trans(numbers)).to(tl.float32) * by[:, None]
                if EXTRA == "minima":
                    mine = numbers.to(tl.int32)
                    if GROUP == 16:
                        mine = tl.where((k % 32 // 16 == half)[None, :], mine, 0)
                    total += tl.sum(mine, axis=1).to(tl.float32)[None, :] * least[:, None]
        else:
            inside = (row < rows)[:, None] & (start + k < columns)[None, :]
            at = pointers(data, DATA, ALIGNED) + row.to(tl.int64)[:, None] * columns
            codes = tl.load(at + (start + k)[None, :], mask=inside, other=0)
            product = tl.dot(codes, tl.trans(numbers)).to(tl.float32)
            if KIND == "int8-group":
                at_by = (
                    pointers(scales, tl.float32, ALIGNED)
                    + row * (columns // GROUP)
                    + start // GROUP
                )
                product *= tl.load(at_by, mask=row < rows, other=0.0)[:, None]
            total += product
    if KIND == "int8":
        total *= tl.load(pointers(scales, tl.float32, ALIGNED) + row, mask=row < rows, other=0.0)[
            :, None
        ]
    return total


@triton.jit
def _float_dots(
    data, scales, extra, factor, x, x_at, x_there, first, rows, columns,
    PANELS: tl.constexpr, KIND: tl.constexpr, DATA: tl.constexpr, SCALE: tl.constexpr,
    EXTRA: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """Of weights brought to RESULT with rows of x, `by_nibbles` for panels: f32 [ROWS, TOKENS]."""
    WORDS: tl.constexpr = COLUMNS // 8
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, columns, COLUMNS):
        if PANELS:
            words, by, offset, high_by, high_offset = panel_words(
                data, scales, extra, factor, first, start, rows, columns,
                KIND, GROUP, SCALE, EXTRA, ROWS, WORDS,
            )  # fmt: skip
            word = start // 8 + tl.arange(0, WORDS)
            mask = x_there[:, None] & (word < columns // 8)[None, :]
            at = x + x_at[:, None] + word[None, :]
            for nibble in tl.static_range(8):
                if nibble % 2 == 0:
                    weights = nibble_numbers(words, nibble, by, offset, KIND != "int4")
                else:
                    weights = nibble_numbers(words, nibble, high_by, high_offset, KIND != "int4")
                numbers = tl.load(at + nibble * (columns // 8), mask=mask, other=0.0)
                total = tl.dot(weights.to(RESULT), tl.trans(numbers), total, input_precision="ieee")
        else:
            column = start + tl.arange(0, COLUMNS)[None, :]
            mask = x_there[:, None] & (column < columns)
            numbers = tl.load(x + x_at[:, None] + column, mask=mask, other=0.0)
            weights = row_tile(
                data, scales, first, start, rows, columns,
                KIND, DATA, GROUP, TILE_ROWS, TILE_COLUMNS, ALIGNED, ROWS, COLUMNS, RESULT,
            )  # fmt: skip
            total = tl.dot(weights, tl.trans(numbers), total, input_precision="ieee")
    return total


@triton.jit
def _tile_dots(
    table, part_stride, expert, first_part, at_data, at_scales, at_extra, at_factor,
    x, x_at, x_there, first, rows, columns,
    PANELS: tl.constexpr, KIND: tl.constexpr, DATA: tl.constexpr, SCALE: tl.constexpr,
    EXTRA: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one matrix times TOKENS rows of x, which begin at x_at: f32 [ROWS, TOKENS]."""
    parts = table + expert + first_part * part_stride
    data = tl.load(parts) + at_data
    scales = data
    if SCALE is not None:
        scales = tl.load(parts + part_stride) + at_scales
    extra = scales
    if EXTRA != "":
        extra = tl.load(parts + 2 * part_stride) + at_extra
    factor = 1.0
    if KIND == "nvfp4":
        where_factor = tl.load(parts + 3 * part_stride) + at_factor
        factor = tl.load(where_factor.to(tl.pointer_type(tl.float32)))
    if CODES:
        total = _code_dots(
            data, scales, extra, factor, x, x_at, x_there, first, rows, columns,
            PANELS, KIND, DATA, SCALE, EXTRA, GROUP, ALIGNED, ROWS, TOKENS, COLUMNS,
        )  # fmt: skip
    else:
        total = _float_dots(
            data, scales, extra, factor, x, x_at, x_there, first, rows, columns,
            PANELS, KIND, DATA, SCALE, EXTRA, GROUP, TILE_ROWS, TILE_COLUMNS, ALIGNED, ROWS,
            TOKENS, COLUMNS, RESULT,
        )  # fmt: skip
    return total


@triton.jit
def _tile_of(table, counts, tile, experts, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """A tile's expert, which of its tiles it is, and whether there is such a tile.

    Experts that are here have as many tiles as they need, one after the other.  With programs for
    the most that any may need nearly all would find nothing to do, and take longer than the others.
    """
    each = tl.arange(0, EXPERTS)
    count = tl.load(counts + each, mask=each < experts, other=0)
    here = tl.load(table + each, mask=each < experts, other=0) != 0
    tiles = tl.where(here, tl.cdiv(count, TOKENS), 0)
    ends = tl.cumsum(tiles, axis=0)
    past = ends <= tile
    expert = tl.sum(past.to(tl.int32), axis=0)
    before = tl.max(tl.where(past, ends, 0), axis=0)
    return expert, tile - before, expert < experts


@triton.jit
def _gate_up_kernel(
    table, part_stride, experts, order, begins, counts, x, x_scales, h, x_row, rows, columns,
    gate_data, gate_scales, gate_extra, gate_factor, gate_bias,
    up_data, up_scales, up_extra, up_factor, up_bias,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, ACTIVATION: tl.constexpr, BY_NIBBLES: tl.constexpr,
    PANELS: tl.constexpr, KIND: tl.constexpr, DATA: tl.constexpr, SCALE: tl.constexpr,
    EXTRA: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """Axis 0: ROWS rows; axis 1: `_tile_of` TOKENS.  h is in sorted order."""
    expert, tile, real = _tile_of(table, counts, tl.program_id(1), experts, EXPERTS, TOKENS)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    if real:
        there = token < tl.load(counts + expert)
        at = tl.load(begins + expert) + token
        first = tl.program_id(0) * ROWS
        x_at = (tl.load(order + at, mask=there, other=0) // TOP).to(tl.int64)
        gate = _tile_dots(
            table, part_stride, expert, 0, gate_data, gate_scales, gate_extra, gate_factor,
            x, x_at * x_row, there, first, rows, columns,
            PANELS, KIND, DATA, SCALE, EXTRA, GROUP, TILE_ROWS, TILE_COLUMNS, ALIGNED,
            CODES, ROWS, TOKENS, COLUMNS, RESULT,
        )  # fmt: skip
        up = _tile_dots(
            table, part_stride, expert, UP, up_data, up_scales, up_extra, up_factor,
            x, x_at * x_row, there, first, rows, columns,
            PANELS, KIND, DATA, SCALE, EXTRA, GROUP, TILE_ROWS, TILE_COLUMNS, ALIGNED,
            CODES, ROWS, TOKENS, COLUMNS, RESULT,
        )  # fmt: skip
        if CODES:
            by = tl.load(x_scales + x_at, mask=there, other=0.0)[None, :]
            gate *= by
            up *= by
        if BIAS is not None:
            lane = first + tl.arange(0, ROWS)[:, None]
            its = table + expert
            gate += biases(its, part_stride, 0, gate_bias, lane, lane < rows, BIAS)
            up += biases(its, part_stride, UP, up_bias, lane, lane < rows, BIAS)
        product = tl.trans(gated_product(gate, up, ACTIVATION, RESULT).to(RESULT))
        row = first + tl.arange(0, ROWS)[None, :]
        place = row
        if BY_NIBBLES:
            place = (row % 4 * 2 + row % 32 // 16) * (rows // 8) + row // 32 * 4 + row % 16 // 4
        to = h + at.to(tl.int64)[:, None] * rows + place
        tl.store(to, product, mask=there[:, None] & (row < rows))


@triton.jit
def _down_kernel(
    table, part_stride, experts, order, begins, counts, h, h_scales, y, rows, columns,
    at_data, at_scales, at_extra, at_factor, at_bias,
    EXPERTS: tl.constexpr, PANELS: tl.constexpr, KIND: tl.constexpr, DATA: tl.constexpr,
    SCALE: tl.constexpr, EXTRA: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """Axes as above.  y is in the order of pairs, rounded, not scaled."""
    expert, tile, real = _tile_of(table, counts, tl.program_id(1), experts, EXPERTS, TOKENS)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    if real:
        there = token < tl.load(counts + expert)
        at = (tl.load(begins + expert) + token).to(tl.int64)
        first = tl.program_id(0) * ROWS
        out = _tile_dots(
            table, part_stride, expert, DOWN, at_data, at_scales, at_extra, at_factor,
            h, at * columns, there, first, rows, columns,
            PANELS, KIND, DATA, SCALE, EXTRA, GROUP, TILE_ROWS, TILE_COLUMNS, ALIGNED,
            CODES, ROWS, TOKENS, COLUMNS, RESULT,
        )  # fmt: skip
        if CODES:
            out *= tl.load(h_scales + at, mask=there, other=0.0)[None, :]
        if BIAS is not None:
            lane = first + tl.arange(0, ROWS)[:, None]
            out += biases(
                table + expert, part_stride, DOWN, at_bias, lane, lane < rows, BIAS
            )  # fmt: skip
        pair = tl.load(order + at, mask=there, other=0).to(tl.int64)
        row = first + tl.arange(0, ROWS)[None, :]
        to = y + pair[:, None] * rows + row
        tl.store(to, tl.trans(out.to(RESULT)), mask=there[:, None] & (row < rows))


def experts_by_tiles(
    x: Tensor,
    tables: Iterable[tuple[ExpertTable, bool]],
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    total: Tensor | None,
) -> Tensor:
    """`experts_by_table` for tables of some experts each, of which only the last may be `last`."""
    sorted_pairs: dict[int, SortedPairs] = {}  # the same for all tables, by the first token
    tokens, top = chosen.shape
    for table, last in tables:
        width, hidden = table.gate.shape[0], table.down.shape[0]
        out = total
        if last or out is None:
            dtype = x.dtype if last else torch.float32
            out = torch.empty(tokens, hidden, dtype=dtype, device=x.device)
        part = max(64, EXPERT_WORKSPACE_BYTES // (top * (width + hidden) * x.itemsize))
        by_parts = experts_by_several if takes_experts(x, table, activation) else _some_tokens
        for start in range(0, tokens, part):
            some = slice(start, start + part)
            if start not in sorted_pairs:
                sorted_pairs[start] = sort_pairs(chosen[some], table.experts)
            by_parts(
                x[some], table, chosen[some], scales[some], activation, sorted_pairs[start],
                None if total is None else total[some], out[some], last,
            )  # fmt: skip
        total = out
    assert total is not None, "no experts"
    return total


def _some_tokens(
    x: Tensor,
    table: ExpertTable,
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    sorted_pairs: SortedPairs,
    total: Tensor | None,
    out: Tensor,
    last: bool,
) -> None:
    tokens, top = chosen.shape
    pairs = tokens * top
    width, hidden = table.gate.shape
    gate, down = matrix_form(table.gate), matrix_form(table.down)
    result = gate.kind_of(x.dtype)
    order, begins, counts = sorted_pairs
    x = by_nibbles(x) if takes_nibbles(table.gate) else x
    inputs = prepare(x, 1 if table.gate.takes_codes else 0)[0]
    numbers = inputs.numbers.view(tokens, hidden)
    h = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    rows, together, columns, warps, stages = tile_blocks(
        table.gate, x.dtype, tokens, top, table.experts
    )
    padded = triton.next_power_of_2(table.experts)
    _gate_up_kernel[(triton.cdiv(width, rows), _most_tiles(pairs, table.experts, together))](
        table.addresses, table.part_stride, table.experts, order, begins, counts,
        numbers, inputs.scales, h, hidden, width, hidden,
        *table.gate.offsets, *table.up.offsets,
        EXPERTS=padded, TOP=top, ACTIVATION=activation, BY_NIBBLES=takes_nibbles(table.down),
        CODES=table.gate.takes_codes, ROWS=rows, TOKENS=together, COLUMNS=columns, RESULT=result,
        num_warps=warps, num_stages=stages, **gate.constants,
    )  # fmt: skip
    inputs = prepare(h, 1 if table.down.takes_codes else 0)[0]
    numbers = inputs.numbers.view(pairs, width)
    y = torch.empty(pairs, table.down.shape[0], dtype=x.dtype, device=x.device)
    rows, together, columns, warps, stages = tile_blocks(
        table.down, x.dtype, tokens, top, table.experts
    )
    _down_kernel[(triton.cdiv(y.shape[1], rows), _most_tiles(pairs, table.experts, together))](
        table.addresses, table.part_stride, table.experts, order, begins, counts,
        numbers, inputs.scales, y, y.shape[1], width, *table.down.offsets,
        EXPERTS=padded, CODES=table.down.takes_codes, ROWS=rows, TOKENS=together, COLUMNS=columns,
        RESULT=result, num_warps=warps, num_stages=stages, **down.constants,
    )  # fmt: skip
    combine(y, table, chosen, scales, total, out, last=last)


def _most_tiles(pairs: int, experts: int, together: int) -> int:
    """However pairs are divided among experts."""
    return pairs // together + min(pairs, experts)


def takes_nibbles(matrix: ExpertMatrix) -> bool:
    """True where kernels of tiles take `by_nibbles`."""
    return matrix.in_panels and not matrix.takes_codes


def by_nibbles(x: Tensor) -> Tensor:
    """Rows of x with the inputs of each of the eight nibbles of words side by side."""
    rows, width = x.shape
    split = x.reshape(rows, width // 32, 2, 4, 4)  # block, half, word, byte
    return split.permute(0, 4, 2, 1, 3).reshape(rows, width)


def tile_blocks(
    matrix: ExpertMatrix, dtype: torch.dtype, tokens: int, top: int, experts: int
) -> tuple[int, int, int, int, int]:
    """(rows, tokens, inputs, warps, stages) of a tile, measured on an H200."""
    expected = 2 * tokens * top // experts  # of the busier experts
    together = min(128, max(16, triton.next_power_of_2(min(tokens, expected + 1))))
    rows, warps = (64, 4) if together <= 64 else (128, 8)
    if matrix.takes_codes:
        by_groups = matrix.in_panels or matrix.group_size > 0
        return rows, together, max(32, matrix.group_size) if by_groups else 128, warps, 3
    columns, stages = (256, 3) if matrix.in_panels else (64, 3)
    if together == 128:
        stages = 2  # of shared memory
    return rows, together, columns // 2 if dtype is torch.float32 else columns, warps, stages

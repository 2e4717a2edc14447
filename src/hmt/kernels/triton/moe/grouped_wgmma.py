"""Experts whose 4-bit weights are read once for tiles of tokens, on Hopper's tensor cores.

As `several.py` multiplies, with tokens of one expert in a program: those that `sort_pairs` put side
by side.  Programs are (tile of rows, tile of `tiles_of`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hmt.kernels.triton.gemm.wgmma_epilogue import write_gated, write_sums
from hmt.kernels.triton.gemm.wgmma_w4 import panels_of, scale_addresses, sum_of_steps
from hmt.kernels.triton.gluon_compat import along

# Constants, besides those of `several_tokens`:
#
# TOP      experts of a token
# EACH     rows of the table for each matrix: data, scales, what is not here, factor, ...
# KIND     of scales


@gluon.jit
def expert_gate_up(
    h, x, token_scales, table, part_stride, tiles, order, begins, counts, rows, blocks, x_stride,
    gate_data, gate_scales, gate_factor, up_data, up_scales, up_factor,
    TOP: gl.constexpr, EACH: gl.constexpr, ACTIVATION: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, BLOCKS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
    TOKENS: gl.constexpr, WARPS: gl.constexpr, EVEN: gl.constexpr, CODES: gl.constexpr,
    CODE_PART: gl.constexpr, SCALES: gl.constexpr, E2M1: gl.constexpr,
):  # fmt: skip
    """activation(gate) * up, to h in sorted order."""
    expert = gl.load(tiles + 2 * gl.program_id(1))
    first_token = gl.load(tiles + 2 * gl.program_id(1) + 1)
    if expert >= 0:
        tokens, begin = gl.load(counts + expert), gl.load(begins + expert)
        its = table + expert
        MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
        gate = gl.load(its) + gate_data
        scales = gl.load(its + part_stride) + gate_scales
        to_up = gl.load(its + EACH * part_stride) + up_data - gate
        to_up_scales = gl.load(its + (EACH + 1) * part_stride) + up_scales - scales
        total = _products(
            gate, scales, to_up, to_up_scales, x, order + begin, rows, blocks, first_token, tokens,
            x_stride, TOP, True, KIND, GROUP, BLOCKS, PART, STAGES, TOKENS, WARPS, EVEN, CODES,
            CODE_PART, SCALES, E2M1,
        )  # fmt: skip
        if token_scales is not None:
            token = first_token + along(TOKENS, 1, MMA)
            pair = gl.load(order + begin + token, mask=token < tokens, other=0)
            total *= gl.load(token_scales + pair // TOP, mask=token < tokens, other=0.0)
        one, other = None, None
        if E2M1 and GROUP == 0:
            one = _factor(its + 3 * part_stride, gate_factor)
            other = _factor(its + (EACH + 3) * part_stride, up_factor)
        write_gated(
            h + begin.to(gl.int64) * rows, total, one, other, None, None, gl.program_id(0), rows,
            first_token, tokens, rows, WARPS, TOKENS, ACTIVATION,
        )  # fmt: skip


@gluon.jit
def expert_down(
    y, h, token_scales, table, part_stride, tiles, order, begins, counts, rows, blocks, h_stride,
    at_data, at_scales, at_factor,
    EACH: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    PART: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr,
    EVEN: gl.constexpr, CODES: gl.constexpr, CODE_PART: gl.constexpr, SCALES: gl.constexpr,
    E2M1: gl.constexpr,
):  # fmt: skip
    """h in sorted order times down, to y in order of pairs."""
    expert = gl.load(tiles + 2 * gl.program_id(1))
    first_token = gl.load(tiles + 2 * gl.program_id(1) + 1)
    if expert >= 0:
        tokens, begin = gl.load(counts + expert), gl.load(begins + expert)
        its = table + expert + 2 * EACH * part_stride
        MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
        total = _products(
            gl.load(its) + at_data, gl.load(its + part_stride) + at_scales, 0, 0,
            h + begin.to(gl.int64) * h_stride, None, rows, blocks, first_token, tokens, h_stride,
            1, False, KIND, GROUP, BLOCKS, PART, STAGES, TOKENS, WARPS, EVEN, CODES, CODE_PART,
            SCALES, E2M1,
        )  # fmt: skip
        if E2M1 and GROUP == 0:
            total *= gl.load(_factor(its + 3 * part_stride, at_factor))
        if token_scales is not None:
            token = first_token + along(TOKENS, 1, MMA)
            total *= gl.load(token_scales + begin + token, mask=token < tokens, other=0.0)
        write_sums(
            y, total, None, order + begin, gl.program_id(0), rows, 0, rows, first_token, tokens,
            rows, WARPS, TOKENS, 1, False, MMA,
        )  # fmt: skip


@gluon.jit
def _factor(at, offset):
    """Where a matrix' factor lies."""
    return (gl.load(at) + offset).to(gl.pointer_type(gl.float32))


@gluon.jit
def _products(
    data, scales, to_up, to_up_scales, x, order, rows, blocks, first_token, tokens, x_stride,
    TOP: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    BLOCKS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr, EVEN: gl.constexpr, CODES: gl.constexpr, CODE_PART: gl.constexpr,
    SCALES: gl.constexpr, E2M1: gl.constexpr,
):  # fmt: skip
    """Sums of a tile of one weight, or of gate and up, at these addresses: f32 [.., TOKENS]."""
    ROWS: gl.constexpr = 16 * WARPS if GATED else 32 * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    SIZE: gl.constexpr = 1 if E2M1 else 2
    tile = gl.program_id(0)
    near, far = 0, 0
    if GATED:
        near = gl.multiple_of(gl.multiple_of(to_up, 16) // 4, 4)
        far = gl.multiple_of(gl.multiple_of(to_up_scales, 16) // SIZE, 16 // SIZE)
    codes = gl.multiple_of(data.to(gl.pointer_type(gl.int32)), 16)
    panel = panels_of(along(2 * WARPS, 1, CODES), tile, rows, near, ROWS, WARPS, GATED)
    code_at = gl.multiple_of(codes + (panel[0] * (blocks * 64) + panel[1]), [16, 16, 16, 16])
    code_at = code_at + along(4, 2, CODES) * 16 + along(16, 3, CODES)
    numbers = gl.multiple_of(scales.to(gl.pointer_type(KIND)), 16)
    panel = panels_of(along(2 * WARPS, 1, SCALES), tile, rows, far, ROWS, WARPS, GATED)
    scale_at = scale_addresses(numbers, panel, blocks, GROUP, SCALES)
    return sum_of_steps(
        code_at, scale_at, x, order, 0, gl.cdiv(blocks, BLOCKS), blocks, first_token, tokens,
        x_stride, TOP, GROUP, BLOCKS, PART, STAGES, TOKENS, WARPS, EVEN, CODES, CODE_PART, SCALES,
        E2M1, MMA, False,
    )  # fmt: skip

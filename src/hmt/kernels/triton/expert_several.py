"""Experts that several tokens share, 4-bit weights read once for them, on Hopper's tensor cores.

As `several.py` multiplies, with the tokens of one expert in a program: those that `sort_pairs` put
side by side.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hmt.kernels.triton.gluon_names import along
from hmt.kernels.triton.several import panels_of, sum_of_steps
from hmt.kernels.triton.several_results import write_gated, write_sums

# Constants, besides those of `several_tokens`:
#
# TOP      experts of a token
# PARTS    programs that share the tokens of an expert, if there are so many


@gluon.jit
def expert_gate_up(
    h, x, table, part_stride, order, begins, counts, rows, blocks, x_stride,
    gate_data, gate_scales, up_data, up_scales,
    TOP: gl.constexpr, PARTS: gl.constexpr, ACTIVATION: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, BLOCKS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
    TOKENS: gl.constexpr, WARPS: gl.constexpr, EVEN: gl.constexpr, CODES: gl.constexpr,
    CODE_PART: gl.constexpr,
):  # fmt: skip
    """activation(gate) * up of program (tile, expert and part), to h in sorted order."""
    expert = gl.program_id(1) // PARTS
    first_token = gl.program_id(1) % PARTS * TOKENS
    tokens = gl.load(counts + expert)
    address = gl.load(table + expert)
    if (first_token < tokens) & (address != 0):
        begin = gl.load(begins + expert)
        gate = address + gate_data
        scales = gl.load(table + expert + part_stride) + gate_scales
        up = gl.load(table + expert + 4 * part_stride) + up_data
        up_by = gl.load(table + expert + 5 * part_stride) + up_scales
        total = _products(
            gate, scales, up - gate, up_by - scales, x, order + begin, rows, blocks, first_token,
            tokens, x_stride, TOP, True, KIND, GROUP, BLOCKS, PART, STAGES, TOKENS, WARPS, EVEN,
            CODES, CODE_PART,
        )  # fmt: skip
        write_gated(
            h + begin.to(gl.int64) * rows, total, None, None, gl.program_id(0), rows, first_token,
            tokens, rows, WARPS, TOKENS, ACTIVATION,
        )  # fmt: skip


@gluon.jit
def expert_down(
    y, h, table, part_stride, order, begins, counts, rows, blocks, h_stride, data, its_scales,
    PARTS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    PART: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr,
    EVEN: gl.constexpr, CODES: gl.constexpr, CODE_PART: gl.constexpr,
):  # fmt: skip
    """h in sorted order times down of program (tile, expert and part), to y in order of pairs."""
    expert = gl.program_id(1) // PARTS
    first_token = gl.program_id(1) % PARTS * TOKENS
    tokens = gl.load(counts + expert)
    address = gl.load(table + expert + 8 * part_stride)
    if (first_token < tokens) & (address != 0):
        begin = gl.load(begins + expert)
        scales = gl.load(table + expert + 9 * part_stride) + its_scales
        MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
        total = _products(
            address + data, scales, 0, 0, h + begin.to(gl.int64) * h_stride, None, rows, blocks,
            first_token, tokens, h_stride, 1, False, KIND, GROUP, BLOCKS, PART, STAGES, TOKENS,
            WARPS, EVEN, CODES, CODE_PART,
        )  # fmt: skip
        write_sums(
            y, total, None, order + begin, gl.program_id(0), rows, 0, rows, first_token, tokens,
            rows, WARPS, TOKENS, 1, False, MMA,
        )  # fmt: skip


@gluon.jit
def _products(
    data, scales, to_up, to_up_scales, x, order, rows, blocks, first_token, tokens, x_stride,
    TOP: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    BLOCKS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr, EVEN: gl.constexpr, CODES: gl.constexpr, CODE_PART: gl.constexpr,
):  # fmt: skip
    """Sums of a tile of one weight, or of gate and up, at these addresses: f32 [.., TOKENS]."""
    ROWS: gl.constexpr = 16 * WARPS if GATED else 32 * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    SCALES: gl.constexpr = gl.SliceLayout(2, CODES)
    tile = gl.program_id(0)
    near, far = 0, 0
    if GATED:
        near, far = gl.multiple_of(to_up, 16) // 4, gl.multiple_of(to_up_scales, 16) // 2
    codes = gl.multiple_of(data.to(gl.pointer_type(gl.int32)), 16)
    panel = panels_of(along(2 * WARPS, 1, CODES), tile, rows, near, ROWS, WARPS, GATED)
    panel_at = panel[0] * (blocks * 64) + gl.multiple_of(panel[1], [4, 4, 4, 4])
    code_at = gl.multiple_of(codes + panel_at, [16, 16, 16, 16])
    code_at = code_at + along(4, 2, CODES) * 16 + along(16, 3, CODES)
    numbers = gl.multiple_of(scales.to(gl.pointer_type(KIND)), 16)
    panel = panels_of(along(2 * WARPS, 1, SCALES), tile, rows, far, ROWS, WARPS, GATED)
    scale_at = numbers + (panel[0] * (blocks // GROUP * 16) + panel[1])
    scale_at = gl.multiple_of(scale_at, [16, 16, 16]) + along(16, 2, SCALES)
    return sum_of_steps(
        code_at, scale_at, x, order, 0, gl.cdiv(blocks, BLOCKS), blocks, first_token, tokens,
        x_stride, TOP, GROUP, BLOCKS, PART, STAGES, TOKENS, WARPS, EVEN, CODES, CODE_PART, MMA,
        False,
    )  # fmt: skip

"""Products of several tokens with 4-bit weights in panels, on Hopper's tensor cores.

A thread copies the codes that it makes operands of, in the order of `few_operands`: what the tensor
cores want is in its registers, and no more than activations pass through shared memory, with inputs
in the order in which nibbles come out of a word.  Weights are rounded to bf16 as the reference
rounds them; with tokens of int8, what rounding took from those of int4 is multiplied, too.  In
Gluon, as Triton would bring the weights to shared memory.
"""

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hmt.kernels.triton.gemm.wgmma_epilogue import place, write_gated, write_sums
from hmt.kernels.triton.gemm.wgmma_weights import (
    by_nibbles,
    exact_weights,
    half_layout,
    scales_of_part,
    weights_of,
)
from hmt.kernels.triton.gluon_compat import (
    along,
    barrier,
    copy_ahead,
    inputs_are_there,
    next_may_begin,
    pick,
)

# Constants of kernels for several tokens:
#
# COUNT       weights, up to three, side by side
# GROUP       blocks of 32 inputs per scale; a divisor or a multiple of BLOCKS; 0: groups of 16
# E2M1        codes are of e2m1, scales e4m3 or bytes
# SPLIT       programs that share a tile's inputs; with more than one, sums go to `out` f32
#             [SPLIT, tokens, rows of all] for `add_parts`
# BLOCKS      blocks of a step
# PART        blocks of them that are made operands at once
# STAGES      steps that are in shared memory at once, all but one on their way
# TOKENS      of a program: 8, 16, 32 or 64
# EVEN        blocks are a multiple of BLOCKS
# ACTIVATION  as in `few_tokens`: half of the warps multiply with weight 0, half with weight 1
# CODES       `code_layout` of a step, CODE_PART that of a part; SCALES `scale_layout` of a step


# One variant for all numbers of tokens: a second, for multiples of 16, took 0.3 to 3 s to compile.
@gluon.jit(do_not_specialize=["tokens"])
def several_tokens(
    out, x, token_scales, codes_0, codes_1, codes_2, scales_0, scales_1, scales_2,
    factor_0, factor_1, factor_2, bias_0, bias_1, bias_2, rows_0, rows_1, rows_2, tokens, blocks,
    x_stride, out_stride,
    COUNT: gl.constexpr, GROUP: gl.constexpr, SPLIT: gl.constexpr, BLOCKS: gl.constexpr,
    PART: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr,
    EVEN: gl.constexpr, ACTIVATION: gl.constexpr, ADD: gl.constexpr, CODES: gl.constexpr,
    CODE_PART: gl.constexpr, SCALES: gl.constexpr, E2M1: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """x bf16 or int8 [tokens, in] times up to three weights: program (tile, inputs, tokens)."""
    next_may_begin(DEPENDENT)
    GATED: gl.constexpr = ACTIVATION != ""
    ROWS: gl.constexpr = 16 * WARPS if GATED else 32 * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    tile, column, which = place(gl.program_id(0), rows_0, rows_1, COUNT, ROWS)
    rows = pick(which, rows_0, rows_1, rows_2, COUNT)
    first_token = gl.program_id(2) * TOKENS
    steps = gl.cdiv(blocks, BLOCKS)
    first = steps * gl.program_id(1) // SPLIT
    last = steps * (gl.program_id(1) + 1) // SPLIT

    codes = pick(which, codes_0, codes_1, codes_2, COUNT)
    codes = gl.multiple_of(codes.to(gl.pointer_type(gl.int32)), 16)
    scales = pick(which, scales_0, scales_1, scales_2, COUNT)
    near, far = 0, 0
    if GATED:
        SIZE: gl.constexpr = 1 if E2M1 else 2
        near, far = _distance(codes_0, codes_1, 4), _distance(scales_0, scales_1, SIZE)
    panel = panels_of(along(2 * WARPS, 1, CODES), tile, rows, near, ROWS, WARPS, GATED)
    code_at = gl.multiple_of(codes + (panel[0] * (blocks * 64) + panel[1]), [16, 16, 16, 16])
    code_at = code_at + along(4, 2, CODES) * 16 + along(16, 3, CODES)
    panel = panels_of(along(2 * WARPS, 1, SCALES), tile, rows, far, ROWS, WARPS, GATED)
    scale_at = scale_addresses(scales, panel, blocks, GROUP, SCALES)
    total = sum_of_steps(
        code_at, scale_at, x, None, first, last, blocks, first_token, tokens, x_stride, 1, GROUP,
        BLOCKS, PART, STAGES, TOKENS, WARPS, EVEN, CODES, CODE_PART, SCALES, E2M1, MMA, DEPENDENT,
    )  # fmt: skip
    if token_scales is not None:
        token = first_token + along(TOKENS, 1, MMA)
        total *= gl.load(token_scales + token, mask=token < tokens, other=0.0)
    if factor_0 is not None and not GATED:
        total *= gl.load(pick(which, factor_0, factor_1, factor_2, COUNT))
    if GATED:
        write_gated(
            out, total, factor_0, factor_1, bias_0, bias_1, tile, rows, first_token, tokens,
            out_stride, WARPS, TOKENS, ACTIVATION,
        )  # fmt: skip
    else:
        bias = pick(which, bias_0, bias_1, bias_2, COUNT) if bias_0 is not None else None
        write_sums(
            out, total, bias, None, tile, rows, column, rows_0 + rows_1 + rows_2, first_token,
            tokens, out_stride, WARPS, TOKENS, SPLIT, ADD, MMA,
        )  # fmt: skip


@gluon.jit
def scale_addresses(scales, panel, blocks, GROUP: gl.constexpr, SCALES: gl.constexpr):
    """Of block 0: [1, panels, 16], or [1, panels, 2, 16] with groups of 16 inputs."""
    if GROUP == 0:
        at = scales + (panel[0] * (blocks * 32) + panel[1])
        at = gl.multiple_of(at, [16, 16, 16, 16]) + along(2, 2, SCALES) * 16
        at = gl.multiple_of(at, [16, 16, 16, 16]) + along(16, 3, SCALES)
    else:
        at = scales + (panel[0] * (blocks // GROUP * 16) + panel[1])
        at = gl.multiple_of(at, [16, 16, 16]) + along(16, 2, SCALES)
    return at


@gluon.jit
def sum_of_steps(
    code_at, scale_at, x, order, first, last, blocks, first_token, tokens, x_stride,
    TOP: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr, PART: gl.constexpr,
    STAGES: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, EVEN: gl.constexpr,
    CODES: gl.constexpr, CODE_PART: gl.constexpr, SCALES: gl.constexpr, E2M1: gl.constexpr,
    MMA: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Sums [32 WARPS, TOKENS] over steps first to last.

    code_at, scale_at   of block 0: [1, panels, 4, 16] and `scale_addresses`
    order               None, or which pair of a token and one of its TOP experts stands where
    """
    STEP: gl.constexpr = 32 * BLOCKS
    CODED: gl.constexpr = x.dtype.element_ty == gl.int8
    EXACT: gl.constexpr = CODED and not E2M1
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    KIND: gl.constexpr = scale_at.dtype.element_ty
    X: gl.constexpr = gl.BlockedLayout([1, 16], [16 // BLOCKS, 2 * BLOCKS], [WARPS, 1], [1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    code_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCKS, 2 * WARPS, 4, 16], LINES)
    LINES_3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    if GROUP == 0:
        scale_ring = gl.allocate_shared_memory(KIND, [STAGES, BLOCKS, 2 * WARPS, 2, 16], LINES)
    else:
        scale_ring = gl.allocate_shared_memory(KIND, [STAGES, BLOCKS, 2 * WARPS, 16], LINES_3)
    PAIR: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    inputs = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, STEP], PAIR)
    block, scale_block = along(BLOCKS, 0, CODES), along(BLOCKS, 0, SCALES)
    code_at += block * 64
    scale_at += _groups(scale_block, GROUP) * 16
    for ahead in gl.static_range(STAGES - 1):
        begin = (first + ahead) * BLOCKS
        end = gl.where(first + ahead < last, blocks, 0)
        _fetch(code_ring.index(ahead), code_at + begin * 64, block, begin, end, EVEN)
        at = scale_at + _groups(begin, GROUP) * 16
        _fetch(scale_ring.index(ahead), at, scale_block, begin, end, EVEN)
        async_copy.commit_group()

    inputs_are_there(DEPENDENT)
    token = first_token + along(TOKENS, 0, X)
    k = along(STEP, 1, X)
    known = token < tokens
    place = token
    if order is not None:
        place = gl.load(order + token, mask=known, other=0) // TOP
    x_at = x + place.to(gl.int64) * x_stride + k
    end = gl.minimum(blocks, last * BLOCKS) * 32
    values = gl.load(x_at + first * STEP, mask=known & (first * STEP + k < end), other=0)
    inputs.index(0).store(by_nibbles(values, TOKENS, BLOCKS))
    total = gl.zeros([32 * WARPS, TOKENS], gl.float32, layout=MMA)
    slot, half = 0, 0
    for step in range(first, last):
        following = (step + 1) * STEP
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()  # waits for what the thread has loaded: the next inputs come later
        barrier()
        values = gl.load(x_at + following, mask=known & (following + k < end), other=0)
        free = gl.where(slot == 0, STAGES, slot) - 1  # all have left the step before
        later = (step + (STAGES - 1)) * BLOCKS
        copied = gl.where(step + (STAGES - 1) < last, blocks, 0)
        _fetch(code_ring.index(free), code_at + later * 64, block, later, copied, EVEN)
        some = scale_at + _groups(later, GROUP) * 16
        _fetch(scale_ring.index(free), some, scale_block, later, copied, EVEN)
        async_copy.commit_group()
        for part in gl.static_range(BLOCKS // PART):
            words = code_ring.index(slot).slice(part * PART, PART, 0).load(CODE_PART)
            numbers = scale_ring.index(slot).slice(part * PART, PART, 0)
            there = inputs.index(half).slice(part * (32 * PART), 32 * PART, 1).permute((1, 0))
            total = _with_part(
                total, words, numbers, there, OPERAND, CODE_PART, PART, WARPS, GROUP, E2M1, EXACT
            )
            if EXACT and (part + 1) * PART == BLOCKS // 2:  # registers hold no more operands
                total = warpgroup_mma_wait(0, deps=(total,))
        inputs.index(1 - half).store(by_nibbles(values, TOKENS, BLOCKS))
        total = warpgroup_mma_wait(0, deps=(total,))
        half = 1 - half
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    async_copy.wait_group(0)
    UNIT: gl.constexpr = 2.0**12 if EXACT else 2.0**70 if CODED else 2.0**64
    return total * UNIT


@gluon.jit
def _with_part(
    total, words, numbers, there, OPERAND: gl.constexpr, CODE_PART: gl.constexpr,
    PART: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr, E2M1: gl.constexpr,
    EXACT: gl.constexpr,
):  # fmt: skip
    """Begin to add products of a part: of codes in words, and scales in shared memory."""
    low, high = scales_of_part(numbers, CODE_PART, PART, WARPS, GROUP, E2M1)
    if EXACT:
        weights, rest = exact_weights(words, low, OPERAND, PART, WARPS)
        total = warpgroup_mma(weights, there, total, is_async=True)
        total = warpgroup_mma(rest, there, total, is_async=True)
    else:
        weights = weights_of(words, low, high, OPERAND, PART, WARPS, E2M1)
        total = warpgroup_mma(weights, there, total, is_async=True)
    return total


# Kept: making one takes a CPU 30 us, and launching a layer's experts wanted six of them.
@cache
def code_layout(blocks: int, warps: int) -> gl.DistributedLinearLayout:
    """Of words [blocks, panels, 4, 16]: a thread has those of four rows."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2]]
    registers += [[1 << i, 0, 0, 0] for i in range(blocks.bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 0, 4], [0, 0, 0, 8], [0, 1, 0, 0]]
    across = [[0, 2 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [blocks, 2 * warps, 4, 16])


@cache
def scale_layout(blocks: int, warps: int, group: int) -> object:
    """Of scales of a step, with `group` blocks in each."""
    return gl.SliceLayout(2, code_layout(blocks, warps)) if group else half_layout(blocks, warps)


@gluon.jit
def _groups(blocks, GROUP: gl.constexpr):
    """How many groups there are in so many blocks."""
    return blocks * 2 if GROUP == 0 else blocks // GROUP


@gluon.jit
def panels_of(
    at, tile, rows, distance, ROWS: gl.constexpr, WARPS: gl.constexpr, GATED: gl.constexpr
):
    """Panels of a program, int64, none behind the last, and where their weight begins."""
    last = gl.cdiv(rows, 16) - 1
    begin = (at * 0).to(gl.int64)
    if GATED:
        begin = gl.where(at >= WARPS, distance, begin)
        at = at % WARPS
    return gl.minimum(tile * (ROWS // 16) + at, last).to(gl.int64), begin


@gluon.jit
def _distance(first, second, SIZE: gl.constexpr):
    """From one tensor to another, in numbers."""
    distance = gl.multiple_of(second.to(gl.int64) - first.to(gl.int64), 16)
    return gl.multiple_of(distance // SIZE, 16 // SIZE)


@gluon.jit
def _fetch(slot, at, block, begin, end, EVEN: gl.constexpr):
    """Begin to copy what belongs to blocks from `begin` on; zeros from `end` on."""
    at, block = gl.broadcast(at, block)
    last = block * 0 if EVEN else block
    copy_ahead(slot, at, mask=last + begin < end)

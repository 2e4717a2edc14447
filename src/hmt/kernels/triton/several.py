"""Products of several tokens with 4-bit weights in panels, on Hopper's tensor cores.

A thread copies the codes that it makes operands of, in the order of `few_operands`: what the tensor
cores want is in its registers, and no more than activations pass through shared memory, with inputs
in the order in which nibbles come out of a word.  Weights are rounded to bf16 as the reference
rounds them.  In Gluon, as Triton would bring the weights to shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hmt.kernels.triton.gluon_names import (
    along,
    barrier,
    copy_ahead,
    inputs_are_there,
    next_may_begin,
    pick,
)
from hmt.kernels.triton.several_results import place, write_gated, write_sums

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


@gluon.jit
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
    MMA: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Sums [32 WARPS, TOKENS] over steps first to last.

    code_at, scale_at   of block 0: [1, panels, 4, 16] and `scale_addresses`
    order               None, or which pair of a token and one of its TOP experts stands where
    """
    STEP: gl.constexpr = 32 * BLOCKS
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
    inputs.index(0).store(_by_nibbles(values, TOKENS, BLOCKS))
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
            low, high = _scales(numbers, CODE_PART, PART, WARPS, GROUP, E2M1)
            weights = _weights(words, low, high, OPERAND, PART, WARPS, E2M1)
            there = inputs.index(half).slice(part * (32 * PART), 32 * PART, 1)
            total = warpgroup_mma(weights, there.permute((1, 0)), total, is_async=True)
        inputs.index(1 - half).store(_by_nibbles(values, TOKENS, BLOCKS))
        total = warpgroup_mma_wait(0, deps=(total,))
        half = 1 - half
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
    async_copy.wait_group(0)
    UNIT: gl.constexpr = 2.0**70 if x.dtype.element_ty == gl.int8 else 2.0**64
    return total * UNIT


def code_layout(blocks: int, warps: int) -> gl.DistributedLinearLayout:
    """Of words [blocks, panels, 4, 16]: a thread has those of four rows."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2]]
    registers += [[1 << i, 0, 0, 0] for i in range(blocks.bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 0, 4], [0, 0, 0, 8], [0, 1, 0, 0]]
    across = [[0, 2 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [blocks, 2 * warps, 4, 16])


def half_layout(blocks: int, warps: int) -> gl.DistributedLinearLayout:
    """Of scales of halves of blocks [blocks, panels, 2, 16]: a thread has those of its words."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0]]
    registers += [[1 << i, 0, 0, 0] for i in range(blocks.bit_length() - 1)]
    lanes = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 4], [0, 0, 0, 8], [0, 1, 0, 0]]
    across = [[0, 2 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [blocks, 2 * warps, 2, 16])


_half_layout = gluon.constexpr_function(half_layout)


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


@gluon.jit
def _by_nibbles(values, TOKENS: gl.constexpr, BLOCKS: gl.constexpr):
    """Inputs [TOKENS, 32 BLOCKS] in bf16, of int8 2^-6 of them, in the order of `_weights`."""
    if values.dtype == gl.int8:
        values = _int8_numbers(values)
    # half of a block, j, i >= 2, odd i
    values = gl.reshape(values, (TOKENS, 2 * BLOCKS, 4, 2, 2))
    return gl.reshape(gl.permute(values, (0, 1, 4, 2, 3)), (TOKENS, 32 * BLOCKS))


@gluon.jit
def _scales(
    slot, CODE_PART: gl.constexpr, BLOCKS: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr,
    E2M1: gl.constexpr,
):  # fmt: skip
    """Scales of a part in bf16, of low nibbles and of high ones: [BLOCKS, panels, 16]."""
    OWN: gl.constexpr = gl.SliceLayout(2, CODE_PART)
    if GROUP == 0:
        both = slot.load(_half_layout(BLOCKS, WARPS))
        both = _e4m3_numbers(both)
        low, high = gl.split(gl.permute(both, (0, 1, 3, 2)))
        low = gl.convert_layout(low, OWN, assert_trivial=True)
        high = gl.convert_layout(high, OWN, assert_trivial=True)
    else:
        low = slot.load(OWN)
        if E2M1:
            exponents = low.to(gl.int16)
            bits = gl.where(exponents == 0, 64, exponents << 7)  # 2^-127 is subnormal
            low = bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
        high = low
    return low, high


@gluon.jit
def _weights(
    words, low, high, OPERAND: gl.constexpr, BLOCKS: gl.constexpr, WARPS: gl.constexpr,
    E2M1: gl.constexpr,
):  # fmt: skip
    """Words [BLOCKS, panels, 4, 16] and scales [BLOCKS, panels, 16]: [32 WARPS, 32 BLOCKS].

    Rows come in the order (two rows of 64, warp, of 8, panel, q), inputs as in `_by_nibbles`.
    """
    words, low = gl.broadcast(words, gl.expand_dims(low, 2))
    if E2M1:
        words, high = gl.broadcast(words, gl.expand_dims(high, 2))
        a, b, c, d = _e2m1_numbers(words, low, high)
    else:
        a, b, c, d = _int4_numbers(words, low)
    both = gl.join(gl.join(_pair(a), _pair(b)), gl.join(_pair(c), _pair(d)))
    # block, warp, panel, j, q, two rows of 64, of 8, i >= 2, odd i, half
    both = gl.reshape(both, (BLOCKS, WARPS, 2, 4, 4, 2, 2, 2, 2, 2))
    both = gl.permute(both, (5, 1, 6, 2, 4, 0, 9, 8, 3, 7))
    both = gl.reshape(both, (32 * WARPS, 32 * BLOCKS))
    return gl.convert_layout(both, OPERAND, assert_trivial=True)


@gluon.jit
def _pair(word):
    low = word.to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, (word >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True))


@gluon.jit
def _int4_numbers(words, scales):
    """Codes of words, less 8, times bf16 scales, in bf16: 2^-64 of the weights.

    Pairs of low nibbles of bytes 0 and 2, 1 and 3, then of the high ones.  A code in the lowest
    bits of bf16 is 2^-133 of itself, with subnormals and above them; its product is exact before
    -8 scales are added.  Two rows at once, as their scales lie in one register.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 u, v, m, s, h, c, s0, s1, h0, h1, c0, c1;
        .reg .b16 a, b;
        mov.b32 m, 0x62006200;
        mul.bf16x2 s, $10, m;
        mov.b32 m, 0x60006000;
        mul.bf16x2 h, $10, m;
        mov.b32 m, 0xA100A100;
        mul.bf16x2 c, $10, m;
        mov.b32 {a, b}, s;
        mov.b32 s0, {a, a};
        mov.b32 s1, {b, b};
        mov.b32 {a, b}, h;
        mov.b32 h0, {a, a};
        mov.b32 h1, {b, b};
        mov.b32 {a, b}, c;
        mov.b32 c0, {a, a};
        mov.b32 c1, {b, b};
        shr.b32 u, $8, 8;
        shr.b32 v, $9, 8;
        and.b32 $0, $8, 0x000F000F;
        and.b32 $1, $9, 0x000F000F;
        and.b32 $2, u, 0x000F000F;
        and.b32 $3, v, 0x000F000F;
        and.b32 $4, $8, 0x00F000F0;
        and.b32 $5, $9, 0x00F000F0;
        and.b32 $6, u, 0x00F000F0;
        and.b32 $7, v, 0x00F000F0;
        fma.rn.bf16x2 $0, $0, s0, c0;
        fma.rn.bf16x2 $1, $1, s1, c1;
        fma.rn.bf16x2 $2, $2, s0, c0;
        fma.rn.bf16x2 $3, $3, s1, c1;
        fma.rn.bf16x2 $4, $4, h0, c0;
        fma.rn.bf16x2 $5, $5, h1, c1;
        fma.rn.bf16x2 $6, $6, h0, c0;
        fma.rn.bf16x2 $7, $7, h1, c1;
        }
        """,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [words, scales],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _e2m1_numbers(words, low, high):
    """As `_int4_numbers`, of codes of e2m1, with scales of low and of high nibbles.

    One product moves the sign to bit 15 and exponent and mantissa to bits 8 to 6 of bf16, which is
    2^-126 of the number.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 u, v, m, s, s0, s1, h0, h1;
        .reg .b16 a, b;
        mov.b32 m, 0x5E805E80;
        mul.bf16x2 s, $10, m;
        mov.b32 {a, b}, s;
        mov.b32 s0, {a, a};
        mov.b32 s1, {b, b};
        mul.bf16x2 s, $11, m;
        mov.b32 {a, b}, s;
        mov.b32 h0, {a, a};
        mov.b32 h1, {b, b};
        shr.b32 u, $8, 8;
        shr.b32 v, $9, 8;
        and.b32 $0, $8, 0x000F000F;
        and.b32 $1, $9, 0x000F000F;
        and.b32 $2, u, 0x000F000F;
        and.b32 $3, v, 0x000F000F;
        and.b32 $4, $8, 0x00F000F0;
        and.b32 $5, $9, 0x00F000F0;
        and.b32 $6, u, 0x00F000F0;
        and.b32 $7, v, 0x00F000F0;
        mul.lo.u32 $0, $0, 0x1040;
        mul.lo.u32 $1, $1, 0x1040;
        mul.lo.u32 $2, $2, 0x1040;
        mul.lo.u32 $3, $3, 0x1040;
        mul.lo.u32 $4, $4, 0x0104;
        mul.lo.u32 $5, $5, 0x0104;
        mul.lo.u32 $6, $6, 0x0104;
        mul.lo.u32 $7, $7, 0x0104;
        and.b32 $0, $0, 0x81C081C0;
        and.b32 $1, $1, 0x81C081C0;
        and.b32 $2, $2, 0x81C081C0;
        and.b32 $3, $3, 0x81C081C0;
        and.b32 $4, $4, 0x81C081C0;
        and.b32 $5, $5, 0x81C081C0;
        and.b32 $6, $6, 0x81C081C0;
        and.b32 $7, $7, 0x81C081C0;
        mul.bf16x2 $0, $0, s0;
        mul.bf16x2 $1, $1, s1;
        mul.bf16x2 $2, $2, s0;
        mul.bf16x2 $3, $3, s1;
        mul.bf16x2 $4, $4, h0;
        mul.bf16x2 $5, $5, h1;
        mul.bf16x2 $6, $6, h0;
        mul.bf16x2 $7, $7, h1;
        }
        """,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [words, low, high],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _e4m3_numbers(codes):
    """Codes of e4m3 in bf16, as `unpack.byte_numbers`."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, m;
        mov.b32 m, 0x7B807B80;
        prmt.b32 $0, $2, 0, 0x1404;
        prmt.b32 $1, $2, 0, 0x3424;
        and.b32 a, $0, 0x80008000;
        shr.b32 $0, $0, 4;
        lop3.b32 $0, $0, 0x07F007F0, a, 0xEA;
        and.b32 a, $1, 0x80008000;
        shr.b32 $1, $1, 4;
        lop3.b32 $1, $1, 0x07F007F0, a, 0xEA;
        mul.bf16x2 $0, $0, m;
        mul.bf16x2 $1, $1, m;
        }
        """,
        "=&r,=&r,r",
        [codes],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _int8_numbers(codes):
    """2^-6 of codes of int8 in bf16, in whose lowest bits numbers are 2^-133 of them."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, m, n;
        xor.b32 a, $2, 0x80808080;
        prmt.b32 $0, a, 0, 0x4140;
        prmt.b32 $1, a, 0, 0x4342;
        mov.b32 m, 0x7F007F00;
        mov.b32 n, 0xC000C000;
        fma.rn.bf16x2 $0, $0, m, n;
        fma.rn.bf16x2 $1, $1, m, n;
        }
        """,
        "=&r,=&r,r",
        [codes],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )

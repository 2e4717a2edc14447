"""Products of `gemv_w4`: codes in shared memory, brought to integers, times those of x.

Codes of e2m1 select bytes from tables: `prmt` copies the byte that three bits of a nibble say, and
where the fourth is set it spreads that byte's sign instead, which is 0 here.  So twice the number
of a positive code less the number of any code is the number.  Both go to the tensor cores, which
have time; to choose by sign takes twice the instructions.  A word's first four nibbles, then, are
inputs 0 and 1 of one half of a block, and of the other.

Constants are those of `gemv_w4`.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PRODUCT = tl.constexpr(
    """
    {
    .reg .b32 a, b, c, d;
    and.b32 a, $8, 0x0F0F0F0F;
    and.b32 b, $9, 0x0F0F0F0F;
    shr.b32 c, $8, 4;
    shr.b32 d, $9, 4;
    and.b32 c, c, 0x0F0F0F0F;
    and.b32 d, d, 0x0F0F0F0F;
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {a, b, c, d}, {$12, $13},
        {$14, $15, $16, $17};
    and.b32 a, $10, 0x0F0F0F0F;
    and.b32 b, $11, 0x0F0F0F0F;
    shr.b32 c, $10, 4;
    shr.b32 d, $11, 4;
    and.b32 c, c, 0x0F0F0F0F;
    and.b32 d, d, 0x0F0F0F0F;
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$4, $5, $6, $7}, {a, b, c, d}, {$12, $13},
        {$18, $19, $20, $21};
    }
    """
)

# The same of codes of e2m1.
_E2M1_PRODUCT = tl.constexpr(
    """
    {
    .reg .b32 a, b, c, d, m, n, s, t;
    and.b32 m, $8, 0x77777777;
    and.b32 n, $9, 0x77777777;
    shr.u32 s, $8, 16;
    shr.u32 t, $9, 16;
    prmt.b32 a, 0x06040200, 0x18100C08, $8;
    prmt.b32 b, 0x06040200, 0x18100C08, $9;
    prmt.b32 c, 0x06040200, 0x18100C08, s;
    prmt.b32 d, 0x06040200, 0x18100C08, t;
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {a, b, c, d}, {$12, $13},
        {$14, $15, $16, $17};
    shr.u32 s, m, 16;
    shr.u32 t, n, 16;
    prmt.b32 a, 0xFDFEFF00, 0xF4F8FAFC, m;
    prmt.b32 b, 0xFDFEFF00, 0xF4F8FAFC, n;
    prmt.b32 c, 0xFDFEFF00, 0xF4F8FAFC, s;
    prmt.b32 d, 0xFDFEFF00, 0xF4F8FAFC, t;
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {a, b, c, d}, {$12, $13},
        {$0, $1, $2, $3};
    and.b32 m, $10, 0x77777777;
    and.b32 n, $11, 0x77777777;
    shr.u32 s, $10, 16;
    shr.u32 t, $11, 16;
    prmt.b32 a, 0x06040200, 0x18100C08, $10;
    prmt.b32 b, 0x06040200, 0x18100C08, $11;
    prmt.b32 c, 0x06040200, 0x18100C08, s;
    prmt.b32 d, 0x06040200, 0x18100C08, t;
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$4, $5, $6, $7}, {a, b, c, d}, {$12, $13},
        {$18, $19, $20, $21};
    shr.u32 s, m, 16;
    shr.u32 t, n, 16;
    prmt.b32 a, 0xFDFEFF00, 0xF4F8FAFC, m;
    prmt.b32 b, 0xFDFEFF00, 0xF4F8FAFC, n;
    prmt.b32 c, 0xFDFEFF00, 0xF4F8FAFC, s;
    prmt.b32 d, 0xFDFEFF00, 0xF4F8FAFC, t;
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$4, $5, $6, $7}, {a, b, c, d}, {$12, $13},
        {$4, $5, $6, $7};
    }
    """
)


# fmt: off
@triton.constexpr_function
def _code_layout(warps):
    """Four words of each thread, of [panel, warp, half of j] x 32 words."""
    lanes = [[0, 16], [1, 0], [0, 4], [0, 8], [2 * warps, 0]]
    others = [[2 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], lanes, others, [], [4 * warps, 32])


@triton.constexpr_function
def _scale_layout(warps):
    """Scales of each thread's four rows and two blocks, of [panel, warp, block] x 16 rows."""
    lanes = [[1, 0], [2, 0], [0, 4], [0, 8], [8 * warps, 0]]
    others = [[8 << bit, 0] for bit in range(warps.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, others, [], [16 * warps, 16])


@gluon.jit
def _apart(four, QUADS: gl.constexpr, THREADS: gl.constexpr, N: gl.constexpr):
    """Four numbers of each thread."""
    four = gl.convert_layout(gl.reshape(four, [N, 4]), QUADS, assert_trivial=True)
    even, odd = gl.split(gl.reshape(four, [N, 2, 2]))
    zero, two = gl.split(even)
    one, three = gl.split(odd)
    return (
        gl.convert_layout(zero, THREADS, assert_trivial=True),
        gl.convert_layout(one, THREADS, assert_trivial=True),
        gl.convert_layout(two, THREADS, assert_trivial=True),
        gl.convert_layout(three, THREADS, assert_trivial=True),
    )


@gluon.jit
def _codes_of(ring, index, WARPS: gl.constexpr, QUADS: gl.constexpr, THREADS: gl.constexpr):
    found = ring.index(index).load(_code_layout(WARPS))
    found = gl.permute(gl.reshape(found, [2, WARPS, 2, 2, 4, 4]), (1, 0, 4, 2, 3, 5))
    return _apart(found, QUADS, THREADS, WARPS * 32)


@gluon.jit
def _numbers(scales):
    """Scales in f32; bytes are exponents of two (MXFP4)."""
    if scales.dtype == gl.uint8:
        exponents = scales.to(gl.int32)
        bits = gl.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is subnormal
        numbers = bits.to(gl.float32, bitcast=True)
    else:
        numbers = scales.to(gl.float32)
    return numbers


@gluon.jit
def _scales_of(ring, slot, WARPS: gl.constexpr, QUADS: gl.constexpr, THREADS: gl.constexpr):
    """Of four rows, in the thread's block of the first four and in that of the others."""
    found = _numbers(ring.index(slot).load(_scale_layout(WARPS)))
    found = gl.permute(gl.reshape(found, [2, WARPS, 2, 4, 4, 4]), (1, 0, 4, 3, 5, 2))
    one, two = gl.split(gl.reshape(found, [WARPS * 32, 4, 2]))
    return _apart(one, QUADS, THREADS, WARPS * 32), _apart(two, QUADS, THREADS, WARPS * 32)


@gluon.jit
def _of_blocks(
    shared, step, WARPS: gl.constexpr, THREADS: gl.constexpr, BLOCKS_OF: gl.constexpr,
):
    """Numbers of a thread's two blocks of a step."""
    both = gl.expand_dims(shared.index(step).load(gl.SliceLayout(1, BLOCKS_OF)), 1)
    shape = gl.full([WARPS, 8, 4, 2], 0, both.dtype, BLOCKS_OF)
    both = gl.convert_layout(gl.broadcast(both, shape)[0], BLOCKS_OF)
    one, two = gl.split(gl.reshape(both, [WARPS * 32, 2]))
    return (
        gl.convert_layout(one, THREADS, assert_trivial=True),
        gl.convert_layout(two, THREADS, assert_trivial=True),
    )


@gluon.jit
def _product(words, low, high, sums, E2M1: gl.constexpr):
    """Sums of a thread's eight elements with a block more."""
    CODE: gl.constexpr = _E2M1_PRODUCT if E2M1 else _PRODUCT
    return gl.inline_asm_elementwise(
        CODE, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words[0], words[1], words[2], words[3], low, high,
         sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )


@gluon.jit
def _times(words, own):
    """By assembler, as LLVM would choose, on the units that unpack codes."""
    return gl.inline_asm_elementwise(
        "mul.lo.s32 $0, $1, $2;", "=r,r,r", [words, own], dtype=gl.int32, is_pure=True, pack=1,
    )


@gluon.jit
def _with_four_blocks(totals, sums, offset, scales, unit):
    """Totals of four rows; products with h and with l are neighbours."""
    t0, t1, t2, t3 = totals
    t0 += (sums[0] * 256 + sums[1] + offset).to(gl.float32) * (scales[0] * unit)
    t1 += (sums[2] * 256 + sums[3] + offset).to(gl.float32) * (scales[1] * unit)
    t2 += (sums[4] * 256 + sums[5] + offset).to(gl.float32) * (scales[2] * unit)
    t3 += (sums[6] * 256 + sums[7] + offset).to(gl.float32) * (scales[3] * unit)
    return t0, t1, t2, t3


@gluon.jit
def advance(
    totals, kept, step, slot, lane_block, PART: gl.constexpr, PARTS: gl.constexpr,
    E2M1: gl.constexpr,
    WARPS: gl.constexpr, QUADS: gl.constexpr, THREADS: gl.constexpr, BLOCKS_OF: gl.constexpr,
):
    """Totals of a thread's four rows with a part of a step of one weight."""
    N: gl.constexpr = WARPS * 32
    BLOCKS: gl.constexpr = 4 // PARTS  # in which four groups are
    step = step * PARTS + PART
    code_ring, scale_ring, inputs, units, offsets = kept
    EIGHT_THREADS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    x = _apart(inputs.index(step).load(EIGHT_THREADS), QUADS, THREADS, N)
    nothing = gl.full([N], 0, gl.int32, THREADS)
    first = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    other = first
    for block in gl.static_range(BLOCKS):
        own = gl.where(lane_block == block, 1, 0)
        at = slot * 8 + PART * (2 * BLOCKS) + block
        words = _codes_of(code_ring, at, WARPS, QUADS, THREADS)
        first = _product(words, _times(x[0], own), _times(x[1], own), first, E2M1)
        words = _codes_of(code_ring, at + BLOCKS, WARPS, QUADS, THREADS)
        other = _product(words, _times(x[2], own), _times(x[3], own), other, E2M1)
    one, two = _scales_of(scale_ring, slot * PARTS + PART, WARPS, QUADS, THREADS)
    unit, other_unit = _of_blocks(units, step, WARPS, THREADS, BLOCKS_OF)
    if E2M1:
        offset, other_offset = nothing, nothing
    else:
        offset, other_offset = _of_blocks(offsets, step, WARPS, THREADS, BLOCKS_OF)
    totals = _with_four_blocks(totals, first, offset, one, unit)
    return _with_four_blocks(totals, other, other_offset, two, other_unit)

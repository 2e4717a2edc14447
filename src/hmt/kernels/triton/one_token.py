"""Products of one token with 4-bit weights in panels, on Hopper: copies run ahead of sums.

In Gluon, as the assembler lets what Triton loads ahead into registers begin only where a step of
the loop ends.  Here a program copies its weights to shared memory, some steps ahead and from before
the kernels in front have ended.  They come in the order of memory (copied in that of operands they
came at 8 bytes per cycle and multiprocessor, a third of what is wanted).

Lane (4 g + j) of a warp takes words of rows 4 q to 4 q + 3 of panel g // 4, q = g % 4, with inputs
4 j to 4 j + 3 of both halves of a block: the panels' layout is that of an operand of m16n8k32.
Such products of int8 take half as many instructions as those of bf16, which kept multiprocessors
busy for as long as the memory: so x is made integers 256 h + l, see `one_token_inputs`.  The eight
columns of a product are h and l of four blocks: x is zero in those of other blocks, so scales are
applied once in four blocks, to exact sums.  Where groups are of 16 inputs they are halves of two
blocks.

Codes of e2m1 select bytes from tables: `prmt` copies the byte that three bits of a nibble say, and
where the fourth is set it spreads that byte's sign instead, which is 0 here.  So twice the number
of a positive code less the number of any code is the number.  Both go to the tensor cores, which
have time; the other way, choosing by sign, took twice the instructions that the memory allows.  A
word's first four nibbles, then, are inputs 0 and 1 of one half of a block, and of the other.

Around the product is what a layer has there: a norm of x + residual in front; behind it rotary
positions, a gate, or a sum.  Results are rounded where those of `hmt.kernels.reference` are.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hmt.kernels.triton import dependent, scalars
from hmt.kernels.triton.one_token_inputs import keep_inputs

# Triton 3.9 has other names for them than 3.6.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_memory = gl.shared_memory_descriptor
_seen_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret

_next_may_begin = gluon.jit(dependent.next_may_begin.fn)
_activated = gluon.jit(scalars.activated.fn)
_rounded = gluon.jit(scalars.rounded.fn)

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

# As above, of codes of e2m1: for both words of an operand what is positive, doubled, and all less 0.
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


# Constants of kernels in this module:
#
# WARPS     of a program; each takes eight blocks of 32 inputs in a step
# STEPS     steps; WARPS * STEPS * 8 blocks are all inputs
# PADDED    a power of two, at least STEPS
# SLOTS     steps, of one weight, that are copied ahead
# APART     panels from one of a program's two to the other
# COUNT     weights side by side
# GROUP_BLOCKS   blocks of 32 inputs per group; 0 stands for groups of 16 inputs
# PARTS     of a step, in each of which a thread sees to two groups of four: 2 where groups are of
#           16 inputs, else 1
# E2M1      codes are of e2m1
# NORM      x is normed first, after `more` was added where it is there; GEMMA: times offset + norm
# ACTIVATION     "", or of a gate: weight 0 is a gate and weight 1 what goes through it
# TURN      heads of weights 0 and 1 are rotated; APART is half a head then
# ADD       products are added to what lies in `out`, after `more` was where it is there
# CODES     x is rounded to int8, see `one_token_inputs`


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@gluon.jit
def _pick(which, first, second, third, COUNT: gl.constexpr):
    found = first
    if COUNT > 1 and first is not None:
        found = gl.where(which == 1, second, found)
    if COUNT > 2 and first is not None:
        found = gl.where(which == 2, third, found)
    return found


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
def _fetch(rings, codes, scales, step, slot, WARPS: gl.constexpr, GROUP_BLOCKS: gl.constexpr):
    """Begin to copy a step of one weight; `codes` and `scales` are addresses of step 0.

    In one piece each: between two copies to one ring, threads would wait for each other.
    """
    code_ring, scale_ring, word, number = rings
    at = gl.multiple_of(codes + step * (WARPS * 8 * 64), 16)
    _copy(code_ring.index(slot), at[:, None] + word)
    if GROUP_BLOCKS == 0:
        at = gl.multiple_of(scales + step * (WARPS * 16) * 16, 16)
    else:
        at = gl.multiple_of(scales + step * (WARPS * 8) // GROUP_BLOCKS * 16, 16)
    _copy(scale_ring.index(slot), at[:, None] + number)
    async_copy.commit_group()


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
def _advance(
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


@gluon.jit
def _over_threads(totals, others, WARPS: gl.constexpr, ROWS: gl.constexpr, TWO: gl.constexpr):
    """Sums of 32 rows, by row, from those of threads; of TWO weights at once."""
    both = gl.join(gl.join(totals[0], totals[2]), gl.join(totals[1], totals[3]))
    if TWO:
        both = gl.join(both, gl.join(gl.join(others[0], others[2]), gl.join(others[1], others[3])))
        both = gl.sum(gl.sum(gl.reshape(both, [WARPS, 8, 4, 4, 2]), 2), 0)
        total, other = gl.split(gl.reshape(both, [32, 2]))
        total = gl.convert_layout(total, ROWS)
        other = gl.convert_layout(other, ROWS)
    else:
        both = gl.sum(gl.sum(gl.reshape(both, [WARPS, 8, 4, 4]), 2), 0)
        total = gl.convert_layout(gl.reshape(both, [32]), ROWS)
        other = total
    return total, other


@gluon.jit
def _which_tile(rows_0, rows_1, COUNT: gl.constexpr):
    """Which weight a program works on, which of its tiles, and where its result begins."""
    tile, column, which = gl.program_id(0), 0, 0
    if COUNT > 1:
        tiles = rows_0 // 32
        if tile >= tiles:
            tile, column, which = tile - tiles, rows_0, 1
    if COUNT > 2:
        tiles = rows_1 // 32
        if (which == 1) & (tile >= tiles):
            tile, column, which = tile - tiles, rows_0 + rows_1, 2
    return tile, column, which


@triton.constexpr_function
def _number_copies(kind, warps):
    """Each thread copies 16 bytes."""
    across = 16 * kind.primitive_bitwidth // 128
    return gl.BlockedLayout([1, 16 // across], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _places(
    panel, KIND: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr, APART: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
):
    """From the beginning of a weight to rows of what is copied in a step, and columns of these.

    Of codes, in words, rows are (block, panel, warp, half of j); of scales (panel, block), or
    where groups are of 16 inputs (part, panel, warp, group).
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, COPY))
    own_panel = (panel + row // (2 * WARPS) % 2 * APART).to(gl.int64)
    block = row % (2 * WARPS) // 2 * 8 + row // (4 * WARPS)
    codes = own_panel * (BLOCKS * 64) + (block * 64 + row % 2 * 32)
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, COPY))[None, :]
    NUMBERS: gl.constexpr = _number_copies(KIND, WARPS)
    if GROUP_BLOCKS == 0:
        row = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(1, NUMBERS))
        own_panel = (panel + row // (8 * WARPS) % 2 * APART).to(gl.int64)
        group = row % (8 * WARPS) // 8 * 16 + row // (16 * WARPS) * 8 + row % 8
        scales = own_panel * (BLOCKS * 32) + group * 16
    else:
        row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, NUMBERS))
        own_panel = (panel + row // (8 * WARPS) * APART).to(gl.int64)
        group = row % (8 * WARPS) // GROUP_BLOCKS
        scales = own_panel * (BLOCKS // GROUP_BLOCKS * 16) + group * 16
    number = gl.arange(0, 16, layout=gl.SliceLayout(0, NUMBERS))[None, :]
    return codes, scales, word, number


@gluon.jit
def _sums(
    kept, rings, codes, scales, WARPS: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr,
    SETS: gl.constexpr, GROUP_BLOCKS: gl.constexpr, E2M1: gl.constexpr,
):
    """Totals of threads, of one weight or of two."""
    PARTS: gl.constexpr = 2 if GROUP_BLOCKS == 0 else 1
    QUADS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    OF: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 2], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )
    lane_block = gl.arange(0, WARPS * 32, layout=THREADS) % 32 // (8 * PARTS)
    nothing = gl.full([WARPS * 32], 0.0, gl.float32, THREADS)
    totals = (nothing, nothing, nothing, nothing)
    others = totals
    slot = 0
    for step in range(STEPS):
        for part in gl.static_range(SETS):
            async_copy.wait_group(SLOTS - 1)
            for half in gl.static_range(PARTS):
                if part == 0:
                    totals = _advance(
                        totals, kept, step, slot, lane_block, half, PARTS, E2M1, WARPS, QUADS,
                        THREADS, OF,
                    )
                else:
                    others = _advance(
                        others, kept, step, slot, lane_block, half, PARTS, E2M1, WARPS, QUADS,
                        THREADS, OF,
                    )
            ahead = step * SETS + part + SLOTS
            if ahead < STEPS * SETS:
                _fetch(
                    rings, codes[(part + SLOTS) % SETS], scales[(part + SLOTS) % SETS],
                    ahead // SETS, slot, WARPS, GROUP_BLOCKS,
                )
            else:
                async_copy.commit_group()
            slot = gl.where(slot == SLOTS - 1, 0, slot + 1)
    return totals, others


@gluon.jit
def _with_bias(total, bias, row, mask):
    if bias is not None:
        total += gl.load(bias + row, mask=mask, other=0.0).to(gl.float32)
    return total


@gluon.jit
def _rows_of(panel, WARPS: gl.constexpr, APART: gl.constexpr):
    """The rows of a program, 16 of each panel."""
    local = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    return (panel + local // 16 * APART) * 16 + local % 16


@gluon.jit
def _wanted_last(
    places, angles, row, APART: gl.constexpr, TURN: gl.constexpr, ADD: gl.constexpr,
    KIND: gl.constexpr,
):
    """What rows are rotated by, or added to: loaded before the products, which take longer."""
    out, more = places
    one = row.to(gl.float32)
    two = one
    if TURN:
        cos, sin = angles
        one = _rounded(gl.load(cos + row % (APART * 16)).to(gl.float32), KIND)
        two = _rounded(gl.load(sin + row % (APART * 16)).to(gl.float32), KIND)
    if ADD:
        one = gl.load(out + row).to(gl.float32)
        if more is not None:
            one = _rounded(one + gl.load(more + row).to(gl.float32), KIND)
    return one, two


@gluon.jit
def _turned(
    total, by_cos, by_sin, row, which, KIND: gl.constexpr, HALF: gl.constexpr,
    ROWS: gl.constexpr, PAIRS: gl.constexpr,
):
    """Rows rotated, but those of weight 2; the other of a pair is 16 rows away."""
    total = _rounded(total, KIND)
    both = gl.convert_layout(gl.permute(gl.reshape(total, [2, 16]), (1, 0)), PAIRS)
    first, second = gl.split(both)
    turned = gl.reshape(gl.permute(gl.join(second, first), (1, 0)), [32])
    turned = gl.convert_layout(turned, ROWS)
    own = _rounded(total * by_cos, KIND)
    other = _rounded(turned * by_sin, KIND)
    moved = gl.where(row % (2 * HALF) < HALF, own - other, own + other)
    return gl.where(which < 2, moved, total)


@gluon.jit
def _store(
    out, totals, others, biases, factors, last, row, which,
    COUNT: gl.constexpr, WARPS: gl.constexpr, APART: gl.constexpr, ACTIVATION: gl.constexpr,
    TURN: gl.constexpr, ADD: gl.constexpr, E2M1: gl.constexpr, KIND: gl.constexpr,
):
    """Results of a program's rows; `last` is what `_wanted_last` found."""
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
    here = row >= 0
    total, up = _over_threads(totals, others, WARPS, ROWS, ACTIVATION != "")
    if E2M1:  # codes were doubled
        total *= 0.5
        up *= 0.5
    if factors[0] is not None:
        total *= gl.load(_pick(which, factors[0], factors[1], factors[2], COUNT))
        if ACTIVATION != "":
            up *= gl.load(factors[1])
    if ACTIVATION != "":
        gate = _rounded(_with_bias(total, biases[0], row, here), KIND)
        up = _rounded(_with_bias(up, biases[1], row, here), KIND)
        total = _rounded(_activated(gate, ACTIVATION), KIND) * up
    else:  # a bias may be missing where another weight has one
        total = _with_bias(total, biases[0], row, here & (which == 0))
        total = _with_bias(total, biases[1], row, here & (which == 1))
        total = _with_bias(total, biases[2], row, here & (which == 2))
    if TURN:
        total = _turned(total, last[0], last[1], row, which, KIND, APART * 16, ROWS, PAIRS)
    if ADD:
        total = _rounded(total, KIND) + last[0]
    gl.store(out + row, total.to(KIND))


@gluon.jit
def one_token(
    out, x, more, norm,
    codes_0, codes_1, codes_2, scales_0, scales_1, scales_2, factor_0, factor_1, factor_2,
    bias_0, bias_1, bias_2, cos, sin, rows_0, rows_1, eps, offset,
    COUNT: gl.constexpr, GROUP_BLOCKS: gl.constexpr, WARPS: gl.constexpr, STEPS: gl.constexpr,
    PADDED: gl.constexpr, SLOTS: gl.constexpr, APART: gl.constexpr, NORM: gl.constexpr,
    GEMMA: gl.constexpr, ACTIVATION: gl.constexpr, TURN: gl.constexpr, ADD: gl.constexpr,
    CODES: gl.constexpr, E2M1: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [in] times up to three weights, side by side; a program has 32 rows."""
    _next_may_begin(DEPENDENT)
    N: gl.constexpr = WARPS * 32
    SETS: gl.constexpr = 2 if ACTIVATION != "" else 1
    PARTS: gl.constexpr = 2 if GROUP_BLOCKS == 0 else 1
    SCALE: gl.constexpr = scales_0.dtype.element_ty
    # Swizzled so that neither copies nor loads wait for each other's banks.  The 32 bytes that come
    # from memory together stay together.
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 2, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN_3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PLAIN_4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    code_ring = gl.allocate_shared_memory(gl.int32, [SLOTS, N, 32], SWIZZLED)
    scale_ring = gl.allocate_shared_memory(SCALE, [SLOTS, PARTS * 16 * WARPS, 16], PLAIN)
    inputs = gl.allocate_shared_memory(
        gl.int8, [PADDED * PARTS * WARPS * 4, 128], gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    )
    units = gl.allocate_shared_memory(gl.float32, [PADDED * PARTS, WARPS, 4, 2], PLAIN_4)
    offsets = units
    if not E2M1:
        offsets = gl.allocate_shared_memory(gl.int32, [PADDED, WARPS, 4, 2], PLAIN_4)

    tile, column, which = _which_tile(rows_0, rows_1, COUNT)
    panel = tile // APART * (2 * APART) + tile % APART
    code, scale, word, number = _places(panel, SCALE, WARPS, STEPS * WARPS * 8, APART, GROUP_BLOCKS)
    rings = (code_ring, scale_ring, word, number)
    codes = _pick(which, codes_0, codes_1, codes_2, COUNT) + code
    scales = _pick(which, scales_0, scales_1, scales_2, COUNT) + scale
    if SETS == 2:
        codes, scales = (codes, codes_1 + code), (scales, scales_1 + scale)
    else:
        codes, scales = (codes,), (scales,)
    for first in gl.static_range(SLOTS):
        if first < STEPS * SETS:
            _fetch(
                rings, codes[first % SETS], scales[first % SETS], first // SETS, first, WARPS,
                GROUP_BLOCKS,
            )
        else:
            async_copy.commit_group()
    keep_inputs(
        (inputs, units, offsets), x, more, norm, eps, offset, PADDED, WARPS, STEPS, NORM, GEMMA,
        CODES, E2M1, PARTS, DEPENDENT,
    )
    kept = (
        _seen_as(code_ring, gl.int32, [SLOTS * 8, 4 * WARPS, 32], SWIZZLED),
        _seen_as(scale_ring, SCALE, [SLOTS * PARTS, 16 * WARPS, 16], PLAIN),
        _seen_as(
            inputs, gl.int32, [PADDED * PARTS, WARPS * 4, 32],
            gl.SwizzledSharedLayout(4, 1, 8, [1, 0]),
        ),
        _seen_as(units, gl.float32, [PADDED * PARTS, WARPS, 4, 2], PLAIN_3),
        _seen_as(offsets, gl.int32, [PADDED * PARTS, WARPS, 4, 2], PLAIN_3),
    )
    KIND: gl.constexpr = x.dtype.element_ty
    row = _rows_of(panel, WARPS, APART)
    last = _wanted_last((out + column, more), (cos, sin), row, APART, TURN, ADD, KIND)
    totals, others = _sums(kept, rings, codes, scales, WARPS, STEPS, SLOTS, SETS, GROUP_BLOCKS, E2M1)
    _store(
        out + column, totals, others, (bias_0, bias_1, bias_2), (factor_0, factor_1, factor_2),
        last, row, which, COUNT, WARPS, APART, ACTIVATION, TURN, ADD, E2M1, KIND,
    )

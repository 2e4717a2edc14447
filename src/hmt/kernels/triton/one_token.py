"""Products of one token with int4 weights in panels, on Hopper: copies run ahead of sums.

In Gluon, as the assembler lets what Triton loads ahead into registers begin only where a step of
the loop ends.  Here each thread copies what it computes on to shared memory, several steps ahead
and from before the kernels in front have ended, and nothing moves between threads until the last
sum.  Lane (4 g + j) of a warp holds words of rows 4 q to 4 q + 3 of panel g // 4, q = g % 4, with
inputs 4 j to 4 j + 3 of both halves of a block.  That is how tensor cores want an operand of
m16n8k16, but for the order of inputs, and x comes in the same order.  Their eight columns are eight
blocks: x is zero in those of others, so scales are applied once in eight blocks.

Around the product is what a layer has there: a norm of x + residual in front; behind it rotary
positions, a gate, or a sum.  Results are rounded where those of `hmt.kernels.reference` are.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hmt.kernels.triton import dependent, scalars

# Triton 3.9 has other names for them than 3.6.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_memory = gl.shared_memory_descriptor
_seen_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret

_next_may_begin = gluon.jit(dependent.next_may_begin.fn)
_inputs_are_there = gluon.jit(dependent.inputs_are_there.fn)
_activated = gluon.jit(scalars.activated.fn)
_rounded = gluon.jit(scalars.rounded.fn)

# A nibble in the lowest bits of bf16 counts in steps of 2^-133, a high one in steps 16 times as
# large.  So x is multiplied by 2^64 and 2^60.
UNIT = tl.constexpr(2.0**69)
X_LOW = tl.constexpr(2.0**64)
X_HIGH = tl.constexpr(2.0**60)
MINUS_EIGHT = tl.constexpr(-(2.0**-66))  # of a product with x of 1

_PRODUCT = tl.constexpr(
    """
    {
    .reg .b32 u, v, a, b, c, d;
    shr.b32 u, $8, 8;
    shr.b32 v, $9, 8;
    and.b32 a, $8, 0x000F000F;
    and.b32 b, $9, 0x000F000F;
    and.b32 c, u, 0x000F000F;
    and.b32 d, v, 0x000F000F;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {a, b, c, d},
        {$12, $13}, {$16, $17, $18, $19};
    and.b32 a, $8, 0x00F000F0;
    and.b32 b, $9, 0x00F000F0;
    and.b32 c, u, 0x00F000F0;
    and.b32 d, v, 0x00F000F0;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {a, b, c, d},
        {$14, $15}, {$0, $1, $2, $3};
    shr.b32 u, $10, 8;
    shr.b32 v, $11, 8;
    and.b32 a, $10, 0x000F000F;
    and.b32 b, $11, 0x000F000F;
    and.b32 c, u, 0x000F000F;
    and.b32 d, v, 0x000F000F;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$4, $5, $6, $7}, {a, b, c, d},
        {$12, $13}, {$20, $21, $22, $23};
    and.b32 a, $10, 0x00F000F0;
    and.b32 b, $11, 0x00F000F0;
    and.b32 c, u, 0x00F000F0;
    and.b32 d, v, 0x00F000F0;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$4, $5, $6, $7}, {a, b, c, d},
        {$14, $15}, {$4, $5, $6, $7};
    }
    """
)
_SELECT = tl.constexpr(
    """
    mul.bf16x2 $0, $4, $8;
    mul.bf16x2 $1, $5, $8;
    mul.bf16x2 $2, $6, $8;
    mul.bf16x2 $3, $7, $8;
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
# GROUP_BLOCKS   blocks of 32 inputs per group
# NORM      x is normed first, times (GEMMA: offset +) norm; ADD_FIRST: after `more` was added
# ACTIVATION     "", or of a gate: weight 0 is a gate and weight 1 what goes through it
# TURN      heads of weights 0 and 1 are rotated; APART is half a head then
# ADD       products are added to what lies in `out`, after `more` was where it is there


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
    """Scales of each thread's four rows and two columns, of [panel, warp, block] x 16 rows."""
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [8 * warps, 0]]
    others = [[8 << bit, 0] for bit in range(warps.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [1, 0]]
    return gl.DistributedLinearLayout(registers, lanes, others, [], [16 * warps, 16])


@gluon.jit
def _fetch(rings, codes, scales, step, slot, WARPS: gl.constexpr, GROUP_BLOCKS: gl.constexpr):
    """Begin to copy a step of one weight; `codes` and `scales` are addresses of step 0.

    In one piece each: between two copies to one ring, threads would wait for each other.
    """
    code_ring, scale_ring, word, number = rings
    at = gl.multiple_of(codes + step * (WARPS * 8 * 64), 16)
    _copy(code_ring.index(slot), at[:, None] + word)
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
def _scales_of(ring, slot, WARPS: gl.constexpr, QUADS: gl.constexpr, THREADS: gl.constexpr):
    """Of four rows, in the first column of a thread and in the second."""
    found = ring.index(slot).load(_scale_layout(WARPS)).to(gl.float32)
    found = gl.permute(gl.reshape(found, [2, WARPS, 4, 2, 4, 4]), (1, 0, 4, 2, 5, 3))
    one, two = gl.split(gl.reshape(found, [WARPS * 32, 4, 2]))
    return _apart(one, QUADS, THREADS, WARPS * 32), _apart(two, QUADS, THREADS, WARPS * 32)


@gluon.jit
def _advance(
    totals, kept, inputs, sums, step, slot, lane_block,
    WARPS: gl.constexpr, QUADS: gl.constexpr, THREADS: gl.constexpr, SUMS: gl.constexpr,
):
    """Totals of a thread's four rows with a step of one weight."""
    N: gl.constexpr = WARPS * 32
    code_ring, scale_ring = kept
    x0, x1, x2, x3 = _apart(inputs.index(step).load(QUADS), QUADS, THREADS, N)
    both = gl.expand_dims(sums.index(step).load(gl.SliceLayout(1, SUMS)), 1)
    shape = gl.full([WARPS, 8, 4, 2], 0.0, gl.float32, SUMS)
    both = gl.convert_layout(gl.broadcast(both, shape)[0], SUMS)
    even, odd = gl.split(gl.reshape(both, [N, 2]))
    even = gl.convert_layout(even, THREADS, assert_trivial=True)
    odd = gl.convert_layout(odd, THREADS, assert_trivial=True)
    c0, c1, c2, c3, c4, c5, c6, c7 = even, odd, even, odd, even, odd, even, odd
    for block in gl.static_range(8):
        w0, w1, w2, w3 = _codes_of(code_ring, slot * 8 + block, WARPS, QUADS, THREADS)
        own = gl.where(lane_block == block, 0x3F803F80, 0)
        b0, b1, b2, b3 = gl.inline_asm_elementwise(
            _SELECT, "=&r,=&r,=&r,=r,r,r,r,r,r", [x0, x1, x2, x3, own],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )
        c0, c1, c2, c3, c4, c5, c6, c7 = gl.inline_asm_elementwise(
            _PRODUCT,
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f",
            [w0, w1, w2, w3, b0, b1, b2, b3, c0, c1, c2, c3, c4, c5, c6, c7],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32,
                   gl.float32, gl.float32),
            is_pure=True, pack=1,
        )
    one, two = _scales_of(scale_ring, slot, WARPS, QUADS, THREADS)
    t0, t1, t2, t3 = totals
    t0 += c0 * one[0] + c1 * two[0]
    t1 += c2 * one[1] + c3 * two[1]
    t2 += c4 * one[2] + c5 * two[2]
    t3 += c6 * one[3] + c7 * two[3]
    return t0, t1, t2, t3


@gluon.jit
def _over_threads(totals, WARPS: gl.constexpr, ROWS: gl.constexpr):
    """Sums of 32 rows, by row, from those of threads."""
    t0, t1, t2, t3 = totals
    both = gl.join(gl.join(t0, t2), gl.join(t1, t3))
    both = gl.sum(gl.reshape(both, [WARPS, 8, 4, 4]), 2)
    return gl.convert_layout(gl.reshape(gl.sum(both, 0), [32]), ROWS) * UNIT


@gluon.jit
def _load(at, inside, EIGHTS: gl.constexpr, N: gl.constexpr):
    """Eight inputs of each thread and block, [N, 8], in the order of an operand."""
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, EIGHTS))[None, :]
    place = at[:, None] + four
    low = gl.load(place, mask=inside[:, None], other=0.0)
    high = gl.load(place + 16, mask=inside[:, None], other=0.0)
    both = gl.permute(gl.join(low, high), (0, 2, 1))
    both = gl.permute(gl.reshape(both, [N, 2, 2, 2]), (0, 1, 3, 2))
    return gl.reshape(both, [N, 8])


@gluon.jit
def _normed(
    values, by, eps, offset, WIDTH: gl.constexpr, GEMMA: gl.constexpr, KIND: gl.constexpr,
):
    mean = gl.sum(gl.sum(values * values, 1), 0) / WIDTH
    values = values * gl.rsqrt(mean + eps)
    if GEMMA:
        values = values * (offset + by)
    else:
        values = _rounded(values, KIND) * _rounded(by, KIND)
    return _rounded(values, KIND)


@gluon.jit
def _keep(inputs, sums, values, SHAPE: gl.constexpr):
    """Keep inputs as operands in shared memory, and sums of blocks, times -8."""
    STEPS: gl.constexpr = SHAPE[0]
    WARPS: gl.constexpr = SHAPE[1]
    total = gl.sum(gl.reshape(gl.sum(values, 1), [STEPS * WARPS * 8, 4]), 1)
    total = gl.reshape(total, [STEPS, WARPS, 4, 2])
    sums.store(total * MINUS_EIGHT)
    low_high = gl.reshape(values, [STEPS * WARPS * 32, 2, 4])
    scale = gl.where(gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, low_high.type.layout))) == 0, X_LOW, X_HIGH)
    scaled = low_high * gl.expand_dims(gl.expand_dims(scale, 0), 2)
    inputs.store(gl.reshape(scaled, [STEPS * WARPS * 32, 8]).to(inputs.dtype))


@gluon.jit
def _with_bias(total, bias, row, mask):
    if bias is not None:
        total += gl.load(bias + row, mask=mask, other=0.0).to(gl.float32)
    return total


@gluon.jit
def one_token(
    out, x, more, norm,
    codes_0, codes_1, codes_2, scales_0, scales_1, scales_2, bias_0, bias_1, bias_2,
    cos, sin, rows_0, rows_1, eps, offset,
    COUNT: gl.constexpr, GROUP_BLOCKS: gl.constexpr, WARPS: gl.constexpr, STEPS: gl.constexpr,
    PADDED: gl.constexpr, SLOTS: gl.constexpr, APART: gl.constexpr, NORM: gl.constexpr, GEMMA: gl.constexpr,
    ACTIVATION: gl.constexpr, TURN: gl.constexpr, ADD: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """x [in] times up to three weights, side by side; a program has 32 rows."""
    _next_may_begin(DEPENDENT)
    QUADS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SUMS: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    N: gl.constexpr = WARPS * 32
    BLOCKS: gl.constexpr = WARPS * STEPS * 8
    GATED: gl.constexpr = ACTIVATION != ""
    SETS: gl.constexpr = 2 if GATED else 1
    UNITS: gl.constexpr = STEPS * SETS
    KIND: gl.constexpr = x.dtype.element_ty

    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN_4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    PLAIN_3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    # Swizzled so that neither copies nor loads wait for each other's banks.  The 32 bytes that come
    # from memory together stay together.
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 2, [1, 0])
    code_ring = gl.allocate_shared_memory(gl.int32, [SLOTS, N, 32], SWIZZLED)
    scale_kind: gl.constexpr = scales_0.dtype.element_ty
    scale_ring = gl.allocate_shared_memory(scale_kind, [SLOTS, 16 * WARPS, 16], PLAIN)
    inputs = gl.allocate_shared_memory(KIND, [PADDED * N, 8], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [PADDED, WARPS, 4, 2], PLAIN_4)

    # Which weight, and where its rows and their results begin.
    tile, column, which = gl.program_id(0), 0, 0
    if COUNT > 1:
        tiles = rows_0 // 32
        if tile >= tiles:
            tile, column, which = tile - tiles, rows_0, 1
    if COUNT > 2:
        tiles = rows_1 // 32
        if (which == 1) & (tile >= tiles):
            tile, column, which = tile - tiles, rows_0 + rows_1, 2
    panel = tile // APART * (2 * APART) + tile % APART

    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, N, layout=gl.SliceLayout(1, COPY))  # block, panel, warp, half of j
    own_panel = (panel + row // (2 * WARPS) % 2 * APART).to(gl.int64)
    block = row % (2 * WARPS) // 2 * 8 + row // (4 * WARPS)
    place = own_panel * (BLOCKS * 64) + (block * 64 + row % 2 * 32)
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, COPY))[None, :]
    ACROSS: gl.constexpr = 16 * scale_kind.primitive_bitwidth // 128  # threads with 16 bytes each
    NUMBERS: gl.constexpr = gl.BlockedLayout(
        [1, 16 // ACROSS], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0]
    )
    row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, NUMBERS))  # panel, block
    own_panel = (panel + row // (8 * WARPS) * APART).to(gl.int64)
    group = row % (8 * WARPS) // GROUP_BLOCKS
    scale_place = own_panel * (BLOCKS // GROUP_BLOCKS * 16) + group * 16
    number = gl.arange(0, 16, layout=gl.SliceLayout(0, NUMBERS))[None, :]
    if GATED:
        codes = (codes_0 + place, codes_1 + place)
        scales = (scales_0 + scale_place, scales_1 + scale_place)
    else:
        picked = _pick(which, codes_0, codes_1, codes_2, COUNT) + place
        picked_scales = _pick(which, scales_0, scales_1, scales_2, COUNT) + scale_place
        codes = (picked, picked)
        scales = (picked_scales, picked_scales)
    rings = (code_ring, scale_ring, word, number)
    for first in gl.static_range(SLOTS):
        if first < UNITS:
            _fetch(rings, codes[first % SETS], scales[first % SETS], first // SETS, first, WARPS,
                   GROUP_BLOCKS)
        else:
            async_copy.commit_group()

    ALL: gl.constexpr = PADDED * N
    unit = gl.arange(0, ALL, layout=gl.SliceLayout(1, QUADS))
    inside = unit < STEPS * N
    at = unit // 4 * 32 + unit % 4 * 4
    if NORM:
        by = _load(norm + at, inside, QUADS, ALL)
    _inputs_are_there(DEPENDENT)
    values = _load(x + at, inside, QUADS, ALL).to(gl.float32)
    if NORM:
        if more is not None:
            values = _rounded(values + _load(more + at, inside, QUADS, ALL).to(gl.float32), KIND)
        values = _normed(values, by.to(gl.float32), eps, offset, BLOCKS * 32, GEMMA, KIND)
    _keep(inputs, sums, values, (PADDED, WARPS))
    kept = (
        _seen_as(code_ring, gl.int32, [SLOTS * 8, 4 * WARPS, 32], SWIZZLED),
        scale_ring,
    )
    sums = _seen_as(sums, gl.float32, [PADDED, WARPS, 4, 2], PLAIN_3)
    words = _seen_as(inputs, gl.int32, [PADDED, N, 4], PLAIN)
    lane_block = gl.arange(0, N, layout=THREADS) // 4 % 8
    nothing = gl.full([N], 0.0, gl.float32, THREADS)
    totals = (nothing, nothing, nothing, nothing)
    others = (nothing, nothing, nothing, nothing)
    slot = 0
    for step in range(STEPS):
        for part in gl.static_range(SETS):
            async_copy.wait_group(SLOTS - 1)
            if part == 0:
                totals = _advance(totals, kept, words, sums, step, slot, lane_block, WARPS, QUADS,
                                  THREADS, SUMS)
            else:
                others = _advance(others, kept, words, sums, step, slot, lane_block, WARPS, QUADS,
                                  THREADS, SUMS)
            ahead = step * SETS + part + SLOTS
            if ahead < UNITS:
                _fetch(rings, codes[(part + SLOTS) % SETS], scales[(part + SLOTS) % SETS],
                       ahead // SETS, slot, WARPS, GROUP_BLOCKS)
            else:
                async_copy.commit_group()
            slot = gl.where(slot == SLOTS - 1, 0, slot + 1)

    total = _over_threads(totals, WARPS, ROWS)
    local = gl.arange(0, 32, layout=ROWS)
    row = (panel + local // 16 * APART) * 16 + local % 16
    here = row >= 0
    if GATED:
        gate = _rounded(_with_bias(total, bias_0, row, here), KIND)
        up = _over_threads(others, WARPS, ROWS)
        up = _rounded(_with_bias(up, bias_1, row, here), KIND)
        total = _rounded(_activated(gate, ACTIVATION), KIND) * up
    else:
        total = _with_bias(total, bias_0, row, here & (which == 0))
        total = _with_bias(total, bias_1, row, here & (which == 1))
        total = _with_bias(total, bias_2, row, here & (which == 2))
    if TURN:
        # The other of a pair is 16 numbers away.
        total = _rounded(total, KIND)
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
        both = gl.convert_layout(gl.permute(gl.reshape(total, [2, 16]), (1, 0)), PAIRS)
        first, second = gl.split(both)
        turned = gl.reshape(gl.permute(gl.join(second, first), (1, 0)), [32])
        turned = gl.convert_layout(turned, ROWS)
        HALF: gl.constexpr = APART * 16
        pair = row % HALF
        by_cos = _rounded(gl.load(cos + pair).to(gl.float32), KIND)
        by_sin = _rounded(gl.load(sin + pair).to(gl.float32), KIND)
        own = _rounded(total * by_cos, KIND)
        other = _rounded(turned * by_sin, KIND)
        moved = gl.where(local < 16, own - other, own + other)
        total = gl.where(which < 2, moved, total)
    target = out + column + row
    if ADD:
        already = gl.load(target).to(gl.float32)
        if more is not None:
            already = _rounded(already + gl.load(more + row).to(gl.float32), KIND)
        total = _rounded(total, KIND) + already
    gl.store(target, total.to(KIND))

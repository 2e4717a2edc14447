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

Around the product is what a layer has there: a norm of x + residual in front; behind it rotary
positions, a gate, or a sum.  Results are rounded where those of `hmt.kernels.reference` are.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hmt.kernels.triton import device_math, pdl
from hmt.kernels.triton.gemm.gemv_w4_activations import keep_inputs
from hmt.kernels.triton.gemm.gemv_w4_mma import advance

# Triton 3.9 has other names for them than 3.6.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_memory = gl.shared_memory_descriptor
_seen_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret

_next_may_begin = gluon.jit(pdl.next_may_begin.fn)
_activated = gluon.jit(device_math.activated.fn)
_rounded = gluon.jit(device_math.rounded.fn)

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
                    totals = advance(
                        totals, kept, step, slot, lane_block, half, PARTS, E2M1, WARPS, QUADS,
                        THREADS, OF,
                    )
                else:
                    others = advance(
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
def gemv_w4(
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
    totals, others = _sums(
        kept, rings, codes, scales, WARPS, STEPS, SLOTS, SETS, GROUP_BLOCKS, E2M1,
    )
    _store(
        out + column, totals, others, (bias_0, bias_1, bias_2), (factor_0, factor_1, factor_2),
        last, row, which, COUNT, WARPS, APART, ACTIVATION, TURN, ADD, E2M1, KIND,
    )

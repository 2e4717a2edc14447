"""What `gemv_w4` multiplies weights with: a token, perhaps normed, as integers of 16 bits.

Each block of 32 inputs has a unit of its own, with which its largest becomes LARGEST.  That is 128
times as fine as bf16 has the largest.  For weights that take tokens of int8 all blocks have one
unit, and the integers are the codes of `reference.quantize_activations`.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hmt.kernels.triton import device_math, pdl

_inputs_are_there = gluon.jit(pdl.inputs_are_there.fn)
_rounded = gluon.jit(device_math.rounded.fn)

LARGEST = tl.constexpr(32512.0)
LEAST = tl.constexpr(2.0**-100)  # blocks of less are rounded as if that was in them
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: f32 has no digits after the point there
_MAGIC_BITS = tl.constexpr(0x4B400000)


# fmt: off
@gluon.jit
def keep_inputs(
    shared, x, more, norm, eps, offset, PADDED: gl.constexpr, WARPS: gl.constexpr,
    STEPS: gl.constexpr, NORM: gl.constexpr, GEMMA: gl.constexpr, CODES: gl.constexpr,
    E2M1: gl.constexpr, PARTS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Wait for the kernels ahead, and keep their results, or a norm of these, in `shared`.

    shared   operands, int8 [steps * warps * 4, 128]: of each thread h or l of four inputs, in both
             halves of two blocks; units of blocks, f32 [steps, warps, 4, 2]; and what all codes
             are too large by, times x, int32 like these, but not of e2m1.  With two PARTS these
             are steps, and have halves of blocks: zeros in place of the others
    """
    KIND: gl.constexpr = x.dtype.element_ty
    EIGHTS: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    eight = gl.arange(0, PADDED * WARPS * 32, layout=gl.SliceLayout(1, EIGHTS))
    inside = (eight < STEPS * WARPS * 32)[:, None]
    at = (eight * 8)[:, None] + gl.arange(0, 8, layout=gl.SliceLayout(0, EIGHTS))[None, :]
    if NORM:
        by = gl.load(norm + at, mask=inside, other=0.0)
    _inputs_are_there(DEPENDENT)
    values = gl.load(x + at, mask=inside, other=0.0).to(gl.float32)
    if NORM:
        if more is not None:
            added = gl.load(more + at, mask=inside, other=0.0).to(gl.float32)
            values = _rounded(values + added, KIND)
        WIDTH: gl.constexpr = STEPS * WARPS * 256
        values = _normed(values, by.to(gl.float32), eps, offset, WIDTH, GEMMA, KIND)
    _keep(shared, values, EIGHTS, PADDED, WARPS, CODES, E2M1, PARTS)


@gluon.jit
def _normed(
    values, by, eps, offset, WIDTH: gl.constexpr, GEMMA: gl.constexpr, KIND: gl.constexpr,
):
    mean = gl.sum(gl.sum(values * values, 1), 0) / WIDTH
    values = values * gl.rsqrt(mean + eps)
    if GEMMA:
        values *= offset + by
    else:
        values = _rounded(values, KIND)
        values *= _rounded(by, KIND)
    return _rounded(values, KIND)


@gluon.jit
def _keep(
    kept, values, EIGHTS: gl.constexpr, PADDED: gl.constexpr, WARPS: gl.constexpr,
    CODES: gl.constexpr, E2M1: gl.constexpr, PARTS: gl.constexpr,
):
    """Keep inputs [eights of inputs, 8] in shared memory: operands, units and sums of blocks."""
    inputs, units, offsets = kept
    BLOCKS: gl.constexpr = PADDED * WARPS * 8
    # The bits of NaN are above those of all others, so that it reaches the unit.
    bits = gl.max(gl.abs(values).to(gl.int32, bitcast=True), 1)
    if CODES:
        bits = gl.max(bits, 0) + (bits & 0)
    bits = gl.reshape(bits, [BLOCKS, 4])
    most = gl.max(bits, 1)
    largest = most.to(gl.float32, bitcast=True)
    if CODES:  # divided as the reference divides, which is not what `/` does
        unit = gl.div_rn(largest, (most & 0).to(gl.float32) + 127.0)
        by = gl.where(unit > 0, unit, 1.0)
    else:
        unit = gl.where(largest < LEAST, LEAST, largest) * (1.0 / LARGEST)
        by = unit
    divisor = gl.reshape(by[:, None] + (bits & 0).to(gl.float32), [BLOCKS * 4])
    divisor = gl.convert_layout(divisor, gl.SliceLayout(1, EIGHTS), assert_trivial=True)[:, None]
    if CODES:
        nothing = (values.to(gl.int32, bitcast=True) & 0).to(gl.float32)
        numbers = gl.div_rn(values, divisor + nothing)
    else:
        numbers = values * (1.0 / divisor)
    numbers = (numbers + _MAGIC).to(gl.int32, bitcast=True) - _MAGIC_BITS
    if PARTS == 2:
        _keep_halves(inputs, units, numbers, bits, unit, EIGHTS, PADDED, WARPS)
    else:
        shape: gl.constexpr = [PADDED, WARPS, 2, 4]
        units.store(gl.permute(gl.reshape(unit, shape), (0, 1, 3, 2)))
        if not E2M1:
            total = gl.sum(gl.reshape(gl.sum(numbers, 1), [BLOCKS, 4]), 1) * -8
            offsets.store(gl.permute(gl.reshape(total, shape), (0, 1, 3, 2)))
        # step, warp, which four blocks, block, half, j (two bits), i, h or l
        both = gl.reshape(_bytes(numbers), [PADDED, WARPS, 2, 4, 2, 4, 4, 2])
        if E2M1:
            both = gl.permute(both, (0, 1, 3, 7, 5, 2, 6, 4))
        else:
            both = gl.permute(both, (0, 1, 3, 7, 5, 2, 4, 6))
        inputs.store(gl.reshape(both, [PADDED * WARPS * 4, 128]))


@gluon.jit
def _bytes(numbers):
    """Integers of 16 bits as 256 h + l."""
    return gl.join(((numbers + 128) >> 8).to(gl.int8), numbers.to(gl.int8))


@gluon.jit
def _keep_halves(
    inputs, units, numbers, bits, unit, EIGHTS: gl.constexpr, PADDED: gl.constexpr,
    WARPS: gl.constexpr,
):
    """As `_keep` keeps them, of groups of 16 inputs."""
    eight = gl.arange(0, PADDED * WARPS * 32, layout=gl.SliceLayout(1, EIGHTS))
    half = (eight // 2 % 2)[:, None] + (numbers & 0)
    both = gl.join(
        _bytes(gl.where(half == 0, numbers, 0)), _bytes(gl.where(half == 1, numbers, 0))
    )
    # step, warp, part, which two blocks, block, half, j, i, h or l, half of a byte's nibble
    both = gl.reshape(both, [PADDED, WARPS, 2, 2, 2, 2, 4, 4, 2, 2])
    both = gl.permute(both, (0, 2, 1, 4, 5, 8, 6, 3, 7, 9))
    inputs.store(gl.reshape(both, [PADDED * 2 * WARPS * 4, 128]))
    unit = gl.reshape(unit[:, None] + (bits & 0).to(gl.float32), [PADDED * WARPS * 8, 2, 2])
    unit = gl.reshape(gl.max(unit, 2), [PADDED, WARPS, 2, 2, 2, 2])
    units.store(gl.reshape(gl.permute(unit, (0, 2, 1, 4, 5, 3)), [PADDED * 2, WARPS, 4, 2]))

"""What several kernels do with single numbers: rounding, quantising, comparing, activations."""

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: f32 has no digits after the point there


@triton.jit
def rounded(values, KIND: tl.constexpr):
    """Values as a tensor of dtype KIND has them, in f32."""
    return values.to(KIND).to(tl.float32)


@triton.jit
def nearest(values):
    """To integers, ties to even; for numbers below 2^22."""
    return (values + _ROUND) - _ROUND


@triton.jit
def token_codes(values, axis: tl.constexpr):
    """Rows to int8 with one scale each, as `reference.quantize_activations`: (codes, scales)."""
    # The bits of NaN are above those of all others, so that it reaches the scale.
    bits = tl.max(tl.abs(values).to(tl.int32, bitcast=True), axis=axis, keep_dims=True)
    scales = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
    divisors = tl.where(scales > 0, scales, 1.0)
    codes = nearest(tl.div_rn(values, divisors + tl.zeros_like(values)))
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    return codes.to(tl.int8), scales


@triton.jit
def store_block_codes(values, token, block, there, blocks, numbers, scales, sums):
    """Round rows [rows, 256], each a block of 256 inputs of a token, and store them as BlockTokens.

    token, block, there   [rows, 1]: whose block a row is, which one, and whether there is one
    numbers               int8 [tokens, 64, blocks, 4]
    scales, sums          f32 [tokens, blocks]; int32 [tokens, 16, blocks]
    """
    codes, scale = token_codes(values, 1)
    column = tl.arange(0, 256)[None, :]
    word = (token * 64 + column // 4) * blocks + block
    tl.store(numbers + word * 4 + column % 4, codes, mask=there)
    tl.store(scales + token * blocks + block, scale, mask=there)
    sixteen = tl.reshape(codes.to(tl.int32), (values.shape[0], 16, 16))
    place = (token * 16 + tl.arange(0, 16)[None, :]) * blocks + block
    tl.store(sums + place, tl.sum(sixteen, axis=2), mask=there)


@triton.jit
def rank(values):
    """Int32 in the order of f32 values: -0 equals 0, NaN is above everything."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, 0x7FFFFFFF, ordered)


@triton.jit
def keys(values, indices):
    """Int64 that are larger for larger values and, where these are equal, for lower indices."""
    return (rank(values).to(tl.int64) << 32) + (0x7FFFFFFF - indices).to(tl.int64)


@triton.jit
def key_index(key):
    """The index that went into a key."""
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def activated(values, ACTIVATION: tl.constexpr):
    """Silu, gelu, gelu_tanh, clamped_swish, clamped_silu or relu of f32 values."""
    if ACTIVATION == "silu":
        out = values / (1.0 + tl.exp(-values))
    elif ACTIVATION == "clamped_swish":
        least = tl.where(values > 7.0, 7.0, values)  # which NaN passes
        out = least / (1.0 + tl.exp(-1.702 * least))
    elif ACTIVATION == "clamped_silu":
        least = tl.where(values > 10.0, 10.0, values)  # which NaN passes
        out = least / (1.0 + tl.exp(-least))
    elif ACTIVATION == "relu":
        out = tl.where(values < 0.0, 0.0, values)  # which NaN passes
    elif ACTIVATION == "gelu":
        out = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (values + 0.044715 * values * values * values)
        out = 0.5 * values * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    return out


@triton.jit
def gated_product(gate, up, ACTIVATION: tl.constexpr, KIND: tl.constexpr):
    """`reference.gated` of f32 numbers, brought to KIND where that rounds: f32."""
    gate = rounded(activated(rounded(gate, KIND), ACTIVATION), KIND)
    up = rounded(up, KIND)
    if ACTIVATION == "clamped_swish":
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        up = rounded(up + 1.0, KIND)
    elif ACTIVATION == "clamped_silu":
        up = tl.where(up > 10.0, 10.0, tl.where(up < -10.0, -10.0, up))
    return rounded(gate * up, KIND)


def interpreted() -> bool:
    """True where kernels run in Triton's interpreter, on CPU tensors."""
    return isinstance(rounded, InterpretedFunction)

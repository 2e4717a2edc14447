"""Codes of ggml's blocks (Packing.BLOCKS) as bytes in registers: 16 numbers of a row at a time.

A lane works on a part of a block of one row: 64 numbers, or all 32 of a small block.  It takes them
16 at a time, as four words of four codes, with the integer scale that they share.  What the bytes
of each type mean is said in `reference.gguf_blocks`; here are the same integers.  Where codes are
multiplied, `OFFSETS` of their type is still to be taken off.

Every function takes
    data    int32 pointers [lanes, rows] to word 0 of blocks; a block's words lie 16 apart
    part    int32 [lanes, 1]: which part of the block a lane has
    G       which 16 of the part's numbers: 0 to 3, or 0 and 1
and gives four words of codes [lanes, rows], the scale, and the minimum (0 where there are none).
"""

import triton
import triton.language as tl

# Names by which kernels are compiled, and what is taken off the codes that these functions give.
OFFSETS = {"q5_0": 16, "q3_k": 4, "q6_k": 32, "tq1_0": 1, "tq2_0": 1}
MINIMA = ("q5_1", "q2_k", "q4_k", "q5_k")
# Types of which a lane's numbers are 16 of each 32 of 128; of the others 64 in a row.
STRIDED = ("q2_k", "q3_k", "q6_k", "tq2_0")

_SPREAD = tl.constexpr(0x00204081)  # times four bits: each at the bottom of a byte
_ONES = tl.constexpr(0x01010101)
# Values of IQ2, and of IQ1 eightfold with an eighth added or taken off, by their place in a grid.
_IQ2 = tl.constexpr(0x002B1908)
_IQ1_PLUS = tl.constexpr(0x000901F9)
_IQ1_MINUS = tl.constexpr(0x0007FFF7)
# Those of IQ4, in order.
_IQ4_0, _IQ4_1 = tl.constexpr(-0x4052677F), tl.constexpr(-0x09152231)
_IQ4_2, _IQ4_3 = tl.constexpr(0x26190D01), tl.constexpr(0x71594535)


@triton.jit
def half_number(word):
    """The f16 in the low half of words, in f32."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _four_bits(bits):
    """Bits 0 to 3 at the bottom of four bytes."""
    return ((bits & 15) * _SPREAD) & _ONES


@triton.jit
def _signed(words, bits):
    """Four positive bytes, negative where bits 0 to 3 are set."""
    ones = _four_bits(bits)
    return (words ^ (ones * 255)) + ones


@triton.jit
def _even(seven):
    """Seven sign bits, and an eighth that makes the number of minus signs even."""
    seven = seven & 127
    return seven | (((0x6996 >> ((seven ^ (seven >> 4)) & 15)) & 1) << 7)


@triton.jit
def _picked(low, high, words, ASM: tl.constexpr):
    """Bytes of a table of eight in two words, by the four nibbles 0 to 7 at the bottom of words."""
    if ASM:
        out = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r",
            [low + tl.zeros_like(words), high + tl.zeros_like(words), words],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        out = tl.zeros_like(words)
        for i in tl.static_range(4):
            place = (words >> (4 * i)) & 7
            table = tl.where(place < 4, low, high)
            out |= ((table >> (8 * (place & 3))) & 255) << (8 * i)
    return out


@triton.jit
def _iq4_bytes(words, HIGH: tl.constexpr, ASM: tl.constexpr):
    """What the low, or high, nibbles of four bytes stand for in IQ4_NL and IQ4_XS."""
    codes = (words >> 4) & 0x0F0F0F0F if HIGH else words & 0x0F0F0F0F
    places = codes | (codes >> 4)  # nibbles of bytes 0 and 1, and of 2 and 3, side by side
    places = (places & 0xFF) | ((places >> 8) & 0xFF00)
    first = _picked(_IQ4_0, _IQ4_1, places & 0x7777, ASM)
    second = _picked(_IQ4_2, _IQ4_3, places & 0x7777, ASM)
    upper = ((codes >> 3) & _ONES) * 255
    return (first & ~upper) | (second & upper)


# Blocks of 32


@triton.jit
def _q5(data, G: tl.constexpr, FIRST: tl.constexpr):
    """Q5_0 and Q5_1: the fifth bits in word FIRST, then the nibbles."""
    fifth = tl.load(data + FIRST * 16) >> (16 * G)
    return (
        ((tl.load(data + (FIRST + 1) * 16) >> (4 * G)) & 0x0F0F0F0F) | (_four_bits(fifth) << 4),
        ((tl.load(data + (FIRST + 2) * 16) >> (4 * G)) & 0x0F0F0F0F)
        | (_four_bits(fifth >> 4) << 4),
        ((tl.load(data + (FIRST + 3) * 16) >> (4 * G)) & 0x0F0F0F0F)
        | (_four_bits(fifth >> 8) << 4),
        ((tl.load(data + (FIRST + 4) * 16) >> (4 * G)) & 0x0F0F0F0F)
        | (_four_bits(fifth >> 12) << 4),
        1,
        1,
    )


@triton.jit
def _q8_0(data, G: tl.constexpr):
    own = data + G * 64
    return tl.load(own), tl.load(own + 16), tl.load(own + 32), tl.load(own + 48), 1, 0


@triton.jit
def _iq4_nl(data, G: tl.constexpr, ASM: tl.constexpr):
    return (
        _iq4_bytes(tl.load(data), G == 1, ASM),
        _iq4_bytes(tl.load(data + 16), G == 1, ASM),
        _iq4_bytes(tl.load(data + 32), G == 1, ASM),
        _iq4_bytes(tl.load(data + 48), G == 1, ASM),
        1,
        0,
    )


# K types


@triton.jit
def _two_bits(own, G: tl.constexpr):
    return (
        (tl.load(own) >> (2 * G)) & 0x03030303,
        (tl.load(own + 16) >> (2 * G)) & 0x03030303,
        (tl.load(own + 32) >> (2 * G)) & 0x03030303,
        (tl.load(own + 48) >> (2 * G)) & 0x03030303,
    )


@triton.jit
def _q2_k(data, part, G: tl.constexpr):
    chunk, side = part // 2, part % 2
    a, b, c, d = _two_bits(data + (4 + 4 * part) * 16, G)
    both = tl.load(data + (2 * chunk + G // 2) * 16) >> (8 * (2 * (G % 2) + side))
    return a, b, c, d, both & 15, (both >> 4) & 15


@triton.jit
def _q3_k(data, part, G: tl.constexpr):
    chunk, side = part // 2, part % 2
    a, b, c, d = _two_bits(data + (8 + 4 * part) * 16, G)
    third = data + side * 64
    at = 4 * chunk + G
    a |= ((tl.load(third) >> at) & _ONES) << 2
    b |= ((tl.load(third + 16) >> at) & _ONES) << 2
    c |= ((tl.load(third + 32) >> at) & _ONES) << 2
    d |= ((tl.load(third + 48) >> at) & _ONES) << 2
    byte = 8 * (2 * (G % 2) + side)
    low = (tl.load(data + (24 + G // 2) * 16) >> (byte + 4 * chunk)) & 15
    high = (tl.load(data + 26 * 16) >> (byte + 2 * (2 * chunk + G // 2))) & 3
    return a, b, c, d, (low | (high << 4)) - 32, 0


@triton.jit
def _k_scale(data, part, G: tl.constexpr):
    """ggml's get_scale_min_k4 of group 2 part + G // 2: (scale, minimum)."""
    first, second = tl.load(data + 16), tl.load(data + 32)
    third = tl.load(data + 48)
    early = part < 2
    scales = tl.where(early, first & 0x3F3F3F3F, (third & 0x0F0F0F0F) | ((first >> 2) & 0x30303030))
    minima = tl.where(
        early, second & 0x3F3F3F3F, ((third >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030)
    )
    at = 8 * (2 * (part % 2) + G // 2)
    return (scales >> at) & 63, (minima >> at) & 63


@triton.jit
def _nibbles(own, HIGH: tl.constexpr):
    return (
        (tl.load(own) >> (4 * HIGH)) & 0x0F0F0F0F,
        (tl.load(own + 16) >> (4 * HIGH)) & 0x0F0F0F0F,
        (tl.load(own + 32) >> (4 * HIGH)) & 0x0F0F0F0F,
        (tl.load(own + 48) >> (4 * HIGH)) & 0x0F0F0F0F,
    )


@triton.jit
def _q4_k(data, part, G: tl.constexpr):
    a, b, c, d = _nibbles(data + (4 + 8 * part + 4 * (G % 2)) * 16, G // 2)
    scale, least = _k_scale(data, part, G)
    return a, b, c, d, scale, least


@triton.jit
def _q5_k(data, part, G: tl.constexpr):
    a, b, c, d = _nibbles(data + (12 + 8 * part + 4 * (G % 2)) * 16, G // 2)
    fifth = data + (4 + 4 * (G % 2)) * 16
    at = 2 * part + G // 2
    a |= ((tl.load(fifth) >> at) & _ONES) << 4
    b |= ((tl.load(fifth + 16) >> at) & _ONES) << 4
    c |= ((tl.load(fifth + 32) >> at) & _ONES) << 4
    d |= ((tl.load(fifth + 48) >> at) & _ONES) << 4
    scale, least = _k_scale(data, part, G)
    return a, b, c, d, scale, least


@triton.jit
def _q6_k(data, part, G: tl.constexpr):
    chunk, side = part // 2, part % 2
    a, b, c, d = _nibbles(data + (16 * chunk + 8 * (G % 2) + 4 * side) * 16, G // 2)
    e, f, g, h = _two_bits(data + (32 + 4 * part) * 16, G)
    scale = tl.load(data + (48 + 2 * chunk + G // 2) * 16) >> (8 * (2 * (G % 2) + side))
    scale = (scale << 24) >> 24
    return a | (e << 4), b | (f << 4), c | (g << 4), d | (h << 4), scale, 0


@triton.jit
def _iq4_xs(data, part, G: tl.constexpr, ASM: tl.constexpr):
    own = data + (2 + 8 * part + 4 * (G // 2)) * 16
    group = 2 * part + G // 2
    low = (tl.load(data + 16) >> (4 * group)) & 15
    high = (tl.load(data) >> (16 + 2 * group)) & 3
    return (
        _iq4_bytes(tl.load(own), G % 2 == 1, ASM),
        _iq4_bytes(tl.load(own + 16), G % 2 == 1, ASM),
        _iq4_bytes(tl.load(own + 32), G % 2 == 1, ASM),
        _iq4_bytes(tl.load(own + 48), G % 2 == 1, ASM),
        (low | (high << 4)) - 32,
        0,
    )


@triton.jit
def _tq2_0(data, part, G: tl.constexpr):
    a, b, c, d = _two_bits(data + 4 * part * 16, G)
    return a, b, c, d, 1, 0


@triton.jit
def _ternary(words, power):
    """A digit of base 3 of four bytes, of which bytes times `power` begin with it."""
    low = ((words & 0x00FF00FF) * power) & 0x00FF00FF
    high = (((words >> 8) & 0x00FF00FF) * power) & 0x00FF00FF
    return (((low * 3) >> 8) & 0x00030003) | ((high * 3) & 0x03000300)


@triton.jit
def _power(exponent):
    early = tl.where(exponent == 0, 1, tl.where(exponent == 1, 3, 9))
    return tl.where(exponent < 3, early, tl.where(exponent == 3, 27, 81))


@triton.jit
def _tq1_0(data, part, G: tl.constexpr):
    run = 4 * part + G  # of 16 numbers
    last = run == 15
    word = tl.where(run < 10, 4 * (run % 2), tl.where(last, 12, 8))
    step = tl.where(last, 0, 16)
    own = data + word * 16
    digit = tl.where(run < 10, run // 2, run - 10)
    power = _power(digit)
    return (
        _ternary(tl.load(own), tl.where(last, 1, power)),
        _ternary(tl.load(own + step), tl.where(last, 3, power)),
        _ternary(tl.load(own + 2 * step), tl.where(last, 9, power)),
        _ternary(tl.load(own + 3 * step), tl.where(last, 27, power)),
        1,
        0,
    )


# IQ types with grids.  `grid` has a word per entry: eight nibbles, or four bytes.


@triton.jit
def _entry(grid, entry, ASM: tl.constexpr):
    """Words of a grid, by their places.

    Triton would load them in another layout than weights came in, and move places and words through
    shared memory for that, with barriers; assembler leaves them where they are.
    """
    if ASM:
        word = tl.inline_asm_elementwise(
            "{ .reg .b64 a; mad.wide.u32 a, $1, 4, $2; ld.global.nc.b32 $0, [a]; }", "=r,r,l",
            [entry, grid.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = tl.load(grid + entry)
    return word


@triton.jit
def _eight(grid, entry, table, ASM: tl.constexpr):
    """An entry of eight numbers: two words of bytes of `table`, by the places that the grid has."""
    places = _entry(grid, entry, ASM)
    return _picked(table, table, places, ASM), _picked(table, table, (places >> 16) & 0xFFFF, ASM)


@triton.jit
def _iq2_xxs(data, part, grid, G: tl.constexpr, ASM: tl.constexpr):
    own = data + (4 * part + 2 * (G // 2)) * 16
    indices = tl.load(own) >> (16 * (G % 2))
    packed = tl.load(own + 16)
    a, b = _eight(grid, indices & 255, _IQ2, ASM)
    c, d = _eight(grid, (indices >> 8) & 255, _IQ2, ASM)
    one = _even(packed >> (14 * (G % 2)))
    two = _even(packed >> (14 * (G % 2) + 7))
    scale = 2 * ((packed >> 28) & 15) + 1
    return _signed(a, one), _signed(b, one >> 4), _signed(c, two), _signed(d, two >> 4), scale, 0


@triton.jit
def _nibble_scale(data, part, G: tl.constexpr):
    """2 s + 1 of nibble 4 part + G of two words."""
    word = tl.load(data + (part // 2) * 16)
    return 2 * ((word >> (16 * (part % 2) + 4 * G)) & 15) + 1


@triton.jit
def _iq2_xs(data, part, grid, G: tl.constexpr, ASM: tl.constexpr):
    both = tl.load(data + (4 * part + G) * 16)
    a, b = _eight(grid, both & 511, _IQ2, ASM)
    c, d = _eight(grid, (both >> 16) & 511, _IQ2, ASM)
    one, two = _even(both >> 9), _even(both >> 25)
    scale = _nibble_scale(data + 16 * 16, part, G)
    return _signed(a, one), _signed(b, one >> 4), _signed(c, two), _signed(d, two >> 4), scale, 0


@triton.jit
def _iq2_s(data, part, grid, G: tl.constexpr, ASM: tl.constexpr):
    own = data + (2 * part + G // 2) * 16
    low = tl.load(own) >> (16 * (G % 2))
    signs = tl.load(own + 8 * 16) >> (16 * (G % 2))
    high = tl.load(data + (16 + part // 2) * 16) >> (16 * (part % 2) + 4 * G)
    a, b = _eight(grid, (low & 255) | ((high & 3) << 8), _IQ2, ASM)
    c, d = _eight(grid, ((low >> 8) & 255) | (((high >> 2) & 3) << 8), _IQ2, ASM)
    scale = _nibble_scale(data + 18 * 16, part, G)
    return (
        _signed(a, signs), _signed(b, signs >> 4), _signed(c, signs >> 8), _signed(d, signs >> 12),
        scale, 0,
    )  # fmt: skip


@triton.jit
def _iq3_xxs(data, part, grid, G: tl.constexpr, ASM: tl.constexpr):
    indices = tl.load(data + (4 * part + G) * 16)
    packed = tl.load(data + (16 + 2 * part + G // 2) * 16)
    one = _even(packed >> (14 * (G % 2)))
    two = _even(packed >> (14 * (G % 2) + 7))
    return (
        _signed(_entry(grid, (indices & 255), ASM), one),
        _signed(_entry(grid, ((indices >> 8) & 255), ASM), one >> 4),
        _signed(_entry(grid, ((indices >> 16) & 255), ASM), two),
        _signed(_entry(grid, ((indices >> 24) & 255), ASM), two >> 4),
        2 * ((packed >> 28) & 15) + 1,
        0,
    )


@triton.jit
def _iq3_s(data, part, grid, G: tl.constexpr, ASM: tl.constexpr):
    indices = tl.load(data + (4 * part + G) * 16)
    ninth = tl.load(data + (16 + part // 2) * 16) >> (16 * (part % 2) + 4 * G)
    signs = tl.load(data + (18 + 2 * part + G // 2) * 16) >> (16 * (G % 2))
    scale = tl.load(data + 26 * 16) >> (8 * part + 4 * (G // 2))
    return (
        _signed(_entry(grid, ((indices & 255) | ((ninth & 1) << 8)), ASM), signs),
        _signed(_entry(grid, (((indices >> 8) & 255) | ((ninth & 2) << 7)), ASM), signs >> 4),
        _signed(_entry(grid, (((indices >> 16) & 255) | ((ninth & 4) << 6)), ASM), signs >> 8),
        _signed(_entry(grid, (((indices >> 24) & 255) | ((ninth & 8) << 5)), ASM), signs >> 12),
        2 * (scale & 15) + 1,
        0,
    )


@triton.jit
def _iq1_s(data, part, grid, G: tl.constexpr, ASM: tl.constexpr):
    low = tl.load(data + (2 * part + G // 2) * 16) >> (16 * (G % 2))
    high = tl.load(data + (8 + part) * 16) >> (16 * (G // 2))
    table = tl.where((high & 0x8000) != 0, _IQ1_MINUS, _IQ1_PLUS)
    a, b = _eight(grid, (low & 255) | (((high >> (6 * (G % 2))) & 7) << 8), table, ASM)
    c, d = _eight(grid, ((low >> 8) & 255) | (((high >> (6 * (G % 2) + 3)) & 7) << 8), table, ASM)
    return a, b, c, d, 2 * ((high >> 12) & 7) + 1, 0


@triton.jit
def _iq1_m(data, part, grid, G: tl.constexpr, ASM: tl.constexpr):
    low = tl.load(data + (2 * part + G // 2) * 16) >> (16 * (G % 2))
    high = tl.load(data + (8 + part) * 16) >> (8 * G)
    one = tl.where((high & 8) != 0, _IQ1_MINUS, _IQ1_PLUS)
    two = tl.where((high & 0x80) != 0, _IQ1_MINUS, _IQ1_PLUS)
    a, b = _eight(grid, (low & 255) | ((high & 7) << 8), one, ASM)
    c, d = _eight(grid, ((low >> 8) & 255) | (((high >> 4) & 7) << 8), two, ASM)
    scale = tl.load(data + (12 + part // 2) * 16) >> (16 * (part % 2) + 3 * G)
    return a, b, c, d, 2 * (scale & 7) + 1, 0


# Of any type


@triton.jit
def sixteen(data, part, grid, KIND: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr):
    """See the head of this file."""
    if KIND == "q5_0":
        out = _q5(data, G, 0)
    elif KIND == "q5_1":
        out = _q5(data, G, 1)
    elif KIND == "q8_0":
        out = _q8_0(data, G)
    elif KIND == "iq4_nl":
        out = _iq4_nl(data, G, ASM)
    elif KIND == "q2_k":
        out = _q2_k(data, part, G)
    elif KIND == "q3_k":
        out = _q3_k(data, part, G)
    elif KIND == "q4_k":
        out = _q4_k(data, part, G)
    elif KIND == "q5_k":
        out = _q5_k(data, part, G)
    elif KIND == "q6_k":
        out = _q6_k(data, part, G)
    elif KIND == "iq4_xs":
        out = _iq4_xs(data, part, G, ASM)
    elif KIND == "tq1_0":
        out = _tq1_0(data, part, G)
    elif KIND == "tq2_0":
        out = _tq2_0(data, part, G)
    elif KIND == "iq2_xxs":
        out = _iq2_xxs(data, part, grid, G, ASM)
    elif KIND == "iq2_xs":
        out = _iq2_xs(data, part, grid, G, ASM)
    elif KIND == "iq2_s":
        out = _iq2_s(data, part, grid, G, ASM)
    elif KIND == "iq3_xxs":
        out = _iq3_xxs(data, part, grid, G, ASM)
    elif KIND == "iq3_s":
        out = _iq3_s(data, part, grid, G, ASM)
    elif KIND == "iq1_s":
        out = _iq1_s(data, part, grid, G, ASM)
    else:
        tl.static_assert(KIND == "iq1_m")
        out = _iq1_m(data, part, grid, G, ASM)
    return out


@triton.jit
def block_scales(data, scales, KIND: tl.constexpr):
    """What multiplies scales and minima of blocks: d and e of `gguf_blocks.Integers`, f32.

    scales   f16 pointers to what was taken out of them
    """
    if KIND == "q5_1":
        both = tl.load(data)
        d, e = half_number(both), half_number(both >> 16)
    elif KIND == "q4_k" or KIND == "q5_k":
        both = tl.load(data)
        d, e = half_number(both), -half_number(both >> 16)
    elif KIND == "q2_k":
        both = tl.load(data + 20 * 16)
        d, e = half_number(both), -half_number(both >> 16)
    elif KIND == "iq4_xs":
        d = half_number(tl.load(data))
        e = d
    elif KIND == "iq1_m":
        first, second = tl.load(data + 12 * 16), tl.load(data + 13 * 16)
        bits = ((first >> 12) & 0x000F) | ((first >> 24) & 0x00F0)
        bits |= ((second >> 4) & 0x0F00) | ((second >> 16) & 0xF000)
        d = half_number(bits) * 0.125
        e = d
    else:
        d = tl.load(scales).to(tl.float32)
        if KIND == "iq3_xxs":
            d *= 0.25
        elif KIND == "iq2_xxs" or KIND == "iq2_xs" or KIND == "iq2_s" or KIND == "iq1_s":
            d *= 0.125
        e = d
    return d, e

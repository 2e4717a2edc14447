"""Weights of the kernels for several tokens: codes and scales brought to operands, in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def half_layout(blocks: int, warps: int) -> gl.DistributedLinearLayout:
    """Of scales of halves of blocks [blocks, panels, 2, 16]: a thread has those of its words."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0]]
    registers += [[1 << i, 0, 0, 0] for i in range(blocks.bit_length() - 1)]
    lanes = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 4], [0, 0, 0, 8], [0, 1, 0, 0]]
    across = [[0, 2 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [blocks, 2 * warps, 2, 16])


_half_layout = gluon.constexpr_function(half_layout)


@gluon.jit
def by_nibbles(values, TOKENS: gl.constexpr, BLOCKS: gl.constexpr):
    """Inputs [TOKENS, 32 BLOCKS] in bf16, of int8 2^-6 of them, in the order of `weights_of`."""
    if values.dtype == gl.int8:
        values = _int8_numbers(values)
    # half of a block, j, i >= 2, odd i
    values = gl.reshape(values, (TOKENS, 2 * BLOCKS, 4, 2, 2))
    return gl.reshape(gl.permute(values, (0, 1, 4, 2, 3)), (TOKENS, 32 * BLOCKS))


@gluon.jit
def scales_of_part(
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
def weights_of(
    words, low, high, OPERAND: gl.constexpr, BLOCKS: gl.constexpr, WARPS: gl.constexpr,
    E2M1: gl.constexpr,
):  # fmt: skip
    """Words [BLOCKS, panels, 4, 16] and scales [BLOCKS, panels, 16]: [32 WARPS, 32 BLOCKS].

    Rows come in the order (two rows of 64, warp, of 8, panel, q), inputs as in `by_nibbles`.
    """
    words, low = gl.broadcast(words, gl.expand_dims(low, 2))
    if E2M1:
        words, high = gl.broadcast(words, gl.expand_dims(high, 2))
        a, b, c, d = _e2m1_numbers(words, low, high)
    else:
        a, b, c, d = _int4_numbers(words, low)
    return _operand(a, b, c, d, OPERAND, BLOCKS, WARPS)


@gluon.jit
def exact_weights(words, scales, OPERAND: gl.constexpr, BLOCKS: gl.constexpr, WARPS: gl.constexpr):
    """`weights_of` of int4, 2^-6 of them, and what rounding took from them."""
    words, scales = gl.broadcast(words, gl.expand_dims(scales, 2))
    a, b, c, d, e, f, g, h = _int4_exact(words, scales)
    weights = _operand(a, b, c, d, OPERAND, BLOCKS, WARPS)
    return weights, _operand(e, f, g, h, OPERAND, BLOCKS, WARPS)


@gluon.jit
def _operand(a, b, c, d, OPERAND: gl.constexpr, BLOCKS: gl.constexpr, WARPS: gl.constexpr):
    both = gl.join(gl.join(pair_of(a), pair_of(b)), gl.join(pair_of(c), pair_of(d)))
    # block, warp, panel, j, q, two rows of 64, of 8, i >= 2, odd i, half
    both = gl.reshape(both, (BLOCKS, WARPS, 2, 4, 4, 2, 2, 2, 2, 2))
    both = gl.permute(both, (5, 1, 6, 2, 4, 0, 9, 8, 3, 7))
    both = gl.reshape(both, (32 * WARPS, 32 * BLOCKS))
    return gl.convert_layout(both, OPERAND, assert_trivial=True)


@gluon.jit
def pair_of(word):
    """The two numbers of bf16 in a word."""
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
def _int4_exact(words, scales):
    """As `_int4_numbers`, 2^-6 of the weights, and behind them what rounding took from each.

    A code less 8 times a scale has eleven bits at most, and what is not in the first eight of them
    is a number of bf16, too.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 u, v, m, n, s, s0, s1;
        .reg .b16 a, b;
        mov.b32 {a, b}, $18;
        mov.b32 s0, {a, a};
        mov.b32 s1, {b, b};
        shr.b32 u, $16, 8;
        shr.b32 v, $17, 8;
        and.b32 $0, $16, 0x000F000F;
        and.b32 $1, $17, 0x000F000F;
        and.b32 $2, u, 0x000F000F;
        and.b32 $3, v, 0x000F000F;
        and.b32 $4, $16, 0x00F000F0;
        and.b32 $5, $17, 0x00F000F0;
        and.b32 $6, u, 0x00F000F0;
        and.b32 $7, v, 0x00F000F0;
        mov.b32 m, 0x7F007F00;
        mov.b32 n, 0xBE00BE00;
        fma.rn.bf16x2 $0, $0, m, n;
        fma.rn.bf16x2 $1, $1, m, n;
        fma.rn.bf16x2 $2, $2, m, n;
        fma.rn.bf16x2 $3, $3, m, n;
        mov.b32 m, 0x7D007D00;
        fma.rn.bf16x2 $4, $4, m, n;
        fma.rn.bf16x2 $5, $5, m, n;
        fma.rn.bf16x2 $6, $6, m, n;
        fma.rn.bf16x2 $7, $7, m, n;
        mul.bf16x2 u, $0, s0;
        xor.b32 v, u, 0x80008000;
        fma.rn.bf16x2 $8, $0, s0, v;
        mov.b32 $0, u;
        mul.bf16x2 u, $1, s1;
        xor.b32 v, u, 0x80008000;
        fma.rn.bf16x2 $9, $1, s1, v;
        mov.b32 $1, u;
        mul.bf16x2 u, $2, s0;
        xor.b32 v, u, 0x80008000;
        fma.rn.bf16x2 $10, $2, s0, v;
        mov.b32 $2, u;
        mul.bf16x2 u, $3, s1;
        xor.b32 v, u, 0x80008000;
        fma.rn.bf16x2 $11, $3, s1, v;
        mov.b32 $3, u;
        mul.bf16x2 u, $4, s0;
        xor.b32 v, u, 0x80008000;
        fma.rn.bf16x2 $12, $4, s0, v;
        mov.b32 $4, u;
        mul.bf16x2 u, $5, s1;
        xor.b32 v, u, 0x80008000;
        fma.rn.bf16x2 $13, $5, s1, v;
        mov.b32 $5, u;
        mul.bf16x2 u, $6, s0;
        xor.b32 v, u, 0x80008000;
        fma.rn.bf16x2 $14, $6, s0, v;
        mov.b32 $6, u;
        mul.bf16x2 u, $7, s1;
        xor.b32 v, u, 0x80008000;
        fma.rn.bf16x2 $15, $7, s1, v;
        mov.b32 $7, u;
        }
        """,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [words, scales],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
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


@gluon.jit
def e4m3_pairs(words):
    """Codes of e4m3 in bytes 0 and 1, 2 and 3, in bf16, as `unpack.byte_numbers`."""
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
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )

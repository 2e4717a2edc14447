"""Words of codes brought to operands of tensor cores, f16 or bf16, in a few logical instructions.

A register of an operand holds two numbers, and the assembler makes both at once.  It hands them on
as words, which are split by shifts: LLVM sees that halves of a word become neighbours again and
leaves them in place, where numbers of 16 bits each would be moved, a fifth of all instructions.
The interpreter knows no assembler and takes arithmetic.
"""

import triton
import triton.language as tl

from hmt.kernels.triton.gemm.unpack import ASSEMBLER, e2m1_or_int4


@triton.jit
def word_codes(words, E2M1: tl.constexpr, BF16: tl.constexpr):
    """Words of panels as f16 or bf16: low nibbles of bytes 0, 2, 1, 3, then the high ones.

    Neighbours in a register of the tensor cores are bytes that are neighbours after a shift by 16.
    Codes of int4 are less 8 (f16); or 2^-133 of the code, where high nibbles are 16 times as large
    (bf16).  Codes of e2m1 are 2^-14 (f16) or 2^-126 (bf16) of their numbers.
    """
    if ASSEMBLER:
        KIND: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        if E2M1:
            a, b, c, d = _e2m1_bf16(words) if BF16 else _e2m1_f16(words)
        else:
            a, b, c, d = _int4_bf16(words) if BF16 else _int4_f16(words)
        found = _two(a, KIND) + _two(b, KIND) + _two(c, KIND) + _two(d, KIND)
    else:
        found = (
            _plain(words, 0, E2M1, BF16),
            _plain(words, 16, E2M1, BF16),
            _plain(words, 8, E2M1, BF16),
            _plain(words, 24, E2M1, BF16),
            _plain(words, 4, E2M1, BF16),
            _plain(words, 20, E2M1, BF16),
            _plain(words, 12, E2M1, BF16),
            _plain(words, 28, E2M1, BF16),
        )
    return found


@triton.jit
def _two(pairs, KIND: tl.constexpr):
    """The numbers in the halves of words.  LLVM sees that they stay in one register."""
    low = pairs.to(tl.int16).to(KIND, bitcast=True)
    return low, (pairs >> 16).to(tl.int16).to(KIND, bitcast=True)


@triton.jit
def _plain(words, SHIFT: tl.constexpr, E2M1: tl.constexpr, BF16: tl.constexpr):
    codes = (words >> SHIFT) & 15
    if E2M1:
        unit: tl.constexpr = 2.0**-127 if BF16 else 2.0**-15
        numbers = e2m1_or_int4(codes, True).to(tl.float32) * unit
    elif BF16:
        numbers = codes.to(tl.float32) * (2.0**-133 * (1 + SHIFT // 4 % 2 * 15))
    else:
        numbers = (codes - 8).to(tl.float32)
    return numbers.to(tl.bfloat16 if BF16 else tl.float16)


@triton.jit
def minus_eights(words):
    """What -8 is where `word_codes` makes bf16 of int4, for each of its numbers."""
    low, high = tl.inline_asm_elementwise(
        "mov.b32 $0, 0x80088008; mov.b32 $1, 0x80808080;",
        "=r,=r,r",
        [words],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    found = _two(low, tl.bfloat16) + _two(low, tl.bfloat16)
    return found + _two(high, tl.bfloat16) + _two(high, tl.bfloat16)


@triton.jit
def word_pieces(words):
    """Words [n, m] as bytes [n, 4 m], in the lowest bits of int32.

    Bytes that a loop hands on to its next step would be packed and unpacked each time.
    """
    # join puts its own index last: [n, m, upper half, odd].
    both = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
    return tl.reshape(both & 255, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def word_bytes(words):
    """Words of four int8 as bf16: 2^-133 of the codes and 128, of bytes 0, 1, 2 and 3."""
    low, high = tl.inline_asm_elementwise(
        """
        {
        xor.b32 $1, $2, 0x80808080;
        prmt.b32 $0, $1, 0, 0x4140;
        prmt.b32 $1, $1, 0, 0x4342;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    return _two(low, tl.bfloat16) + _two(high, tl.bfloat16)


@triton.jit
def minus_128s(words):
    """What -128 is where `word_bytes` makes bf16 of int8, for each of its numbers."""
    both = tl.inline_asm_elementwise(
        "mov.b32 $0, 0x80808080;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
    )
    return _two(both, tl.bfloat16) + _two(both, tl.bfloat16)


@triton.jit
def times(x, by, KIND: tl.constexpr):
    """x * by, f16 or bf16 of one shape."""
    if ASSEMBLER and KIND == tl.bfloat16:  # noqa: SIM300
        x = tl.inline_asm_elementwise(
            "mul.bf16x2 $0, $1, $2;",
            "=r,r,r",
            [x, by],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        x = x * by
    return x


@triton.jit
def word_numbers(words, scales):
    """Codes of int4 words, less 8, times bf16 scales, as pairs of bf16 in words.

    Of low nibbles of bytes 0 and 1, 2 and 3, then of high ones.  A code is brought from the lowest
    bits to 2^-6 of itself, and its product is exact before -8 scales are added.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 p, q, m, n, s, c, k;
        .reg .b16 a, b;
        prmt.b32 p, $8, 0, 0x4140;
        prmt.b32 q, $9, 0, 0x4140;
        and.b32 $0, p, 0x000F000F;
        and.b32 $1, q, 0x000F000F;
        and.b32 $4, p, 0x00F000F0;
        and.b32 $5, q, 0x00F000F0;
        prmt.b32 p, $8, 0, 0x4342;
        prmt.b32 q, $9, 0, 0x4342;
        and.b32 $2, p, 0x000F000F;
        and.b32 $3, q, 0x000F000F;
        and.b32 $6, p, 0x00F000F0;
        and.b32 $7, q, 0x00F000F0;
        mov.b32 m, 0x7F007F00;
        mov.b32 n, 0x7D007D00;
        mul.bf16x2 $0, $0, m;
        mul.bf16x2 $1, $1, m;
        mul.bf16x2 $2, $2, m;
        mul.bf16x2 $3, $3, m;
        mul.bf16x2 $4, $4, n;
        mul.bf16x2 $5, $5, n;
        mul.bf16x2 $6, $6, n;
        mul.bf16x2 $7, $7, n;
        mov.b32 k, 0x42804280;
        mul.bf16x2 s, $10, k;
        mov.b32 k, 0xC100C100;
        mul.bf16x2 c, $10, k;
        mov.b32 {a, b}, s;
        mov.b32 m, {a, a};
        mov.b32 n, {b, b};
        mov.b32 {a, b}, c;
        mov.b32 p, {a, a};
        mov.b32 q, {b, b};
        fma.rn.bf16x2 $0, $0, m, p;
        fma.rn.bf16x2 $1, $1, n, q;
        fma.rn.bf16x2 $2, $2, m, p;
        fma.rn.bf16x2 $3, $3, n, q;
        fma.rn.bf16x2 $4, $4, m, p;
        fma.rn.bf16x2 $5, $5, n, q;
        fma.rn.bf16x2 $6, $6, m, p;
        fma.rn.bf16x2 $7, $7, n, q;
        }
        """,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [words, scales],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _int4_bf16(words):
    # The lowest eight bits of bf16 count in steps of 2^-133, with subnormals and above them.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 u;
        shr.b32 u, $4, 8;
        and.b32 $0, $4, 0x000F000F;
        and.b32 $1, u, 0x000F000F;
        and.b32 $2, $4, 0x00F000F0;
        and.b32 $3, u, 0x00F000F0;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _int4_f16(words):
    # 1024 + code is exact in f16, with the code in the lowest bits, and 1024 + 16 code, too.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 u;
        shr.b32 u, $4, 8;
        lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $1, u, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 $2, $4, 0x00F000F0, 0x64006400, 0xEA;
        lop3.b32 $3, u, 0x00F000F0, 0x64006400, 0xEA;
        mov.b32 u, 0x64086408;
        sub.f16x2 $0, $0, u;
        sub.f16x2 $1, $1, u;
        { .reg .b32 m, n; mov.b32 m, 0x2C002C00; mov.b32 n, 0xD480D480;
        fma.rn.f16x2 $2, $2, m, n;
        fma.rn.f16x2 $3, $3, m, n; }
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _e2m1_bf16(words):
    # One product moves the sign to bit 15 and exponent and mantissa to bits 8 to 6.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 u;
        shr.b32 u, $4, 8;
        and.b32 $0, $4, 0x000F000F;
        and.b32 $1, u, 0x000F000F;
        and.b32 $2, $4, 0x00F000F0;
        and.b32 $3, u, 0x00F000F0;
        mul.lo.u32 $0, $0, 0x1040;
        mul.lo.u32 $1, $1, 0x1040;
        mul.lo.u32 $2, $2, 0x0104;
        mul.lo.u32 $3, $3, 0x0104;
        and.b32 $0, $0, 0x81C081C0;
        and.b32 $1, $1, 0x81C081C0;
        and.b32 $2, $2, 0x81C081C0;
        and.b32 $3, $3, 0x81C081C0;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _e2m1_f16(words):
    # The sign goes to bit 15, exponent and mantissa to bits 11 to 9.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 u;
        shr.b32 u, $4, 8;
        { .reg .b32 s;
        shl.b32 s, $4, 12;
        and.b32 s, s, 0x80008000;
        shl.b32 $0, $4, 9;
        lop3.b32 $0, $0, 0x0E000E00, s, 0xEA;
        shl.b32 s, u, 12;
        and.b32 s, s, 0x80008000;
        shl.b32 $1, u, 9;
        lop3.b32 $1, $1, 0x0E000E00, s, 0xEA;
        shl.b32 s, $4, 8;
        and.b32 s, s, 0x80008000;
        shl.b32 $2, $4, 5;
        lop3.b32 $2, $2, 0x0E000E00, s, 0xEA;
        shl.b32 s, u, 8;
        and.b32 s, s, 0x80008000;
        shl.b32 $3, u, 5;
        lop3.b32 $3, $3, 0x0E000E00, s, 0xEA; }
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )

"""4-bit codes in panels brought to numbers that tensor cores take.

Four bytes of a panel lie in one register.  On the card a few logical instructions make numbers of
all eight codes at once; Triton's own arithmetic takes three times as many.  The interpreter knows
no assembler and takes the arithmetic.
"""

import torch
import triton
import triton.language as tl

from hmt.contracts.encoding import Encoding

INTERPRETED: bool = triton.knobs.runtime.interpret
ASSEMBLER = tl.constexpr(not INTERPRETED)

# bf16 numbers of codes are made without arithmetic, from their bits alone: of int4 they are 2^-133
# of the code, of e2m1 2^-126 of the number.  Activations are made larger by 2^64 in turn, so that
# products stay in f32's range.
BF16_X_SCALE = tl.constexpr(2.0**64)


def code_unit(encoding: Encoding, dtype: torch.dtype) -> float:
    """What a product of `word_codes` or `int8_codes` with x of `dtype` is to be multiplied by."""
    if encoding is Encoding.INT4_GROUP:
        return {torch.int8: 0.0625, torch.float16: 1.0, torch.bfloat16: 2.0**69}[dtype]
    return {torch.int8: 0.5, torch.float16: 2.0**14, torch.bfloat16: 2.0**62}[dtype]


@triton.jit
def word_codes(words, E2M1: tl.constexpr, BF16: tl.constexpr):
    """Words of panels as numbers, f16 or bf16: of low nibbles of bytes 0, 2, 1, 3, then of high ones.

    Neighbours in a register of the tensor cores are bytes that are neighbours after a shift by 16.
    Codes of int4 are less 8 (f16); or 2^-133 of the code, where high nibbles are 16 times as large
    (bf16).  Codes of e2m1 are 2^-14 (f16) or 2^-126 (bf16) of their numbers.
    """
    if ASSEMBLER:
        if E2M1:
            found = _e2m1_bf16(words) if BF16 else _e2m1_f16(words)
        else:
            found = _int4_bf16(words) if BF16 else _int4_f16(words)
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
def _plain(words, SHIFT: tl.constexpr, E2M1: tl.constexpr, BF16: tl.constexpr):
    codes = (words >> SHIFT) & 15
    if E2M1:
        unit: tl.constexpr = 2.0**-127 if BF16 else 2.0**-15
        numbers = _integer(codes, True).to(tl.float32) * unit
    elif BF16:
        numbers = codes.to(tl.float32) * (2.0**-133 * (1 + SHIFT // 4 % 2 * 15))
    else:
        numbers = (codes - 8).to(tl.float32)
    return numbers.to(tl.bfloat16 if BF16 else tl.float16)


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
def e2m1_halves(pairs):
    """Bytes of panels as f16, low and high nibbles: 2^-14 of the numbers of e2m1."""
    if ASSEMBLER:
        low, high = _e2m1_f16_bytes(pairs)
    else:
        low, high = panel_integers(pairs, True)
        low, high = (low.to(tl.float32) * 2.0**-15), (high.to(tl.float32) * 2.0**-15)
        low, high = low.to(tl.float16), high.to(tl.float16)
    return low, high


@triton.jit
def int8_codes(pairs, E2M1: tl.constexpr):
    """Bytes of panels as int8, low and high nibbles.

    Codes of int4 are less 8 and times 16, numbers of e2m1 are doubled.
    """
    if ASSEMBLER:
        low, high = _e2m1_int8(pairs) if E2M1 else _int4_int8(pairs)
    else:
        low, high = panel_integers(pairs, E2M1)
        if not E2M1:
            low, high = low * 16, high * 16
        low, high = low.to(tl.int8), high.to(tl.int8)
    return low, high


@triton.jit
def scale_numbers(scales):
    """Scales as f32; bytes are exponents of two (MXFP4)."""
    if scales.dtype == tl.uint8:
        exponents = scales.to(tl.int32)
        bits = tl.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is subnormal
        numbers = bits.to(tl.float32, bitcast=True)
    else:
        numbers = scales.to(tl.float32)
    return numbers


@triton.jit
def byte_numbers(codes, DTYPE: tl.constexpr):
    """Codes of int8 or e4m3 in DTYPE."""
    if ASSEMBLER and DTYPE == tl.bfloat16 and codes.dtype == tl.float8e4nv:  # noqa: SIM300
        numbers = _e4m3_bf16(codes)
    else:
        numbers = codes.to(DTYPE)
    return numbers


@triton.jit
def word_bytes(words):
    """Words of four int8 as bf16: 2^-133 of the codes and 128, of bytes 0, 1, 2 and 3."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        xor.b32 b, $4, 0x80808080;
        prmt.b32 a, b, 0, 0x4140;
        prmt.b32 b, b, 0, 0x4342;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }
        """,
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def minus_128s(words):
    """What -128 is where `word_bytes` makes bf16 of int8, for each of its numbers."""
    return tl.inline_asm_elementwise(
        """
        mov.b16 $0, 0x8080;
        mov.b16 $1, 0x8080;
        mov.b16 $2, 0x8080;
        mov.b16 $3, 0x8080;
        """,
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def panel_integers(pairs, E2M1: tl.constexpr):
    """Low and high nibbles: codes of int4 less 8, or numbers of e2m1 doubled; int32."""
    return _integer(pairs & 15, E2M1), _integer(pairs >> 4, E2M1)


@triton.jit
def _integer(codes, E2M1: tl.constexpr):
    """Codes of int4 less 8, or numbers of e2m1 doubled: int32."""
    numbers = codes.to(tl.int32)
    if E2M1:
        exponent, mantissa = (numbers >> 1) & 3, numbers & 1
        size = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
        numbers = tl.where(numbers >= 8, -size, size)
    else:
        numbers -= 8
    return numbers


@triton.jit
def _int4_bf16(words):
    # The lowest eight bits of bf16 count in steps of 2^-133, with subnormals and above them.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, u;
        shr.b32 u, $8, 8;
        and.b32 a, $8, 0x000F000F;
        and.b32 b, u, 0x000F000F;
        and.b32 c, $8, 0x00F000F0;
        and.b32 d, u, 0x00F000F0;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def minus_eights(words):
    """What -8 is where `word_codes` makes bf16 of int4, for each of its numbers."""
    return tl.inline_asm_elementwise(
        """
        mov.b16 $0, 0x8008;
        mov.b16 $1, 0x8008;
        mov.b16 $2, 0x8008;
        mov.b16 $3, 0x8008;
        mov.b16 $4, 0x8080;
        mov.b16 $5, 0x8080;
        mov.b16 $6, 0x8080;
        mov.b16 $7, 0x8080;
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _int4_f16(words):
    # 1024 + code is exact in f16, with the code in the lowest bits, and 1024 + 16 code, too.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, u;
        shr.b32 u, $8, 8;
        lop3.b32 a, $8, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 b, u, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 c, $8, 0x00F000F0, 0x64006400, 0xEA;
        lop3.b32 d, u, 0x00F000F0, 0x64006400, 0xEA;
        mov.b32 u, 0x64086408;
        sub.f16x2 a, a, u;
        sub.f16x2 b, b, u;
        { .reg .b32 m, n; mov.b32 m, 0x2C002C00; mov.b32 n, 0xD480D480;
        fma.rn.f16x2 c, c, m, n;
        fma.rn.f16x2 d, d, m, n; }
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _e2m1_bf16(words):
    # One product moves the sign to bit 15 and exponent and mantissa to bits 8 to 6.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, u;
        shr.b32 u, $8, 8;
        and.b32 a, $8, 0x000F000F;
        and.b32 b, u, 0x000F000F;
        and.b32 c, $8, 0x00F000F0;
        and.b32 d, u, 0x00F000F0;
        mul.lo.u32 a, a, 0x1040;
        mul.lo.u32 b, b, 0x1040;
        mul.lo.u32 c, c, 0x0104;
        mul.lo.u32 d, d, 0x0104;
        and.b32 a, a, 0x81C081C0;
        and.b32 b, b, 0x81C081C0;
        and.b32 c, c, 0x81C081C0;
        and.b32 d, d, 0x81C081C0;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _e2m1_f16(words):
    # The sign goes to bit 15, exponent and mantissa to bits 11 to 9.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, u;
        shr.b32 u, $8, 8;
        { .reg .b32 s;
        shl.b32 s, $8, 12;
        and.b32 s, s, 0x80008000;
        shl.b32 a, $8, 9;
        lop3.b32 a, a, 0x0E000E00, s, 0xEA;
        shl.b32 s, u, 12;
        and.b32 s, s, 0x80008000;
        shl.b32 b, u, 9;
        lop3.b32 b, b, 0x0E000E00, s, 0xEA;
        shl.b32 s, $8, 8;
        and.b32 s, s, 0x80008000;
        shl.b32 c, $8, 5;
        lop3.b32 c, c, 0x0E000E00, s, 0xEA;
        shl.b32 s, u, 8;
        and.b32 s, s, 0x80008000;
        shl.b32 d, u, 5;
        lop3.b32 d, d, 0x0E000E00, s, 0xEA; }
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _e2m1_f16_bytes(pairs):
    # All bits go to the upper byte: the sign to bit 7, exponent and mantissa to bits 3 to 1.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        shr.b32 b, $4, 3;
        and.b32 a, $4, 0x80808080;
        lop3.b32 b, b, 0x0E0E0E0E, a, 0xEA;
        prmt.b32 $2, b, 0, 0x1404;
        prmt.b32 $3, b, 0, 0x3424;
        shl.b32 a, $4, 4;
        and.b32 a, a, 0x80808080;
        shl.b32 b, $4, 1;
        lop3.b32 b, b, 0x0E0E0E0E, a, 0xEA;
        prmt.b32 $0, b, 0, 0x1404;
        prmt.b32 $1, b, 0, 0x3424;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _int4_int8(pairs):
    # A nibble in the upper half of a byte, its highest bit turned, is 16 (code - 8).
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        shl.b32 a, $2, 4;
        lop3.b32 $0, a, 0xF0F0F0F0, 0x80808080, 0x6A;
        lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
        }
        """,
        "=&r,=&r,r",
        [pairs],
        dtype=(tl.int8, tl.int8),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _e2m1_int8(pairs):
    # Nibbles select from tables of eight bytes, one of positive and one of negative numbers.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, t, a, b, c, d, m;
        and.b32 s, $2, 0x77777777;
        shr.b32 t, s, 16;
        prmt.b32 a, 0x03020100, 0x0C080604, s;
        prmt.b32 b, 0x03020100, 0x0C080604, t;
        prmt.b32 c, 0xFDFEFF00, 0xF4F8FAFC, s;
        prmt.b32 d, 0xFDFEFF00, 0xF4F8FAFC, t;
        prmt.b32 s, a, b, 0x6420;
        prmt.b32 t, c, d, 0x6420;
        prmt.b32 a, a, b, 0x7531;
        prmt.b32 c, c, d, 0x7531;
        prmt.b32 m, $2, 0, 0xBA98;
        lop3.b32 $1, m, c, a, 0xCA;
        shl.b32 d, $2, 4;
        prmt.b32 m, d, 0, 0xBA98;
        lop3.b32 $0, m, t, s, 0xCA;
        }
        """,
        "=&r,=&r,r",
        [pairs],
        dtype=(tl.int8, tl.int8),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _e4m3_bf16(codes):
    # Exponent and mantissa go to bits 10 to 4, which is 2^-120 of the number.  The instruction that
    # converts makes f16 of them, and f16 is made bf16 one at a time, at an eighth of the rate.
    return tl.inline_asm_elementwise(
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
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )

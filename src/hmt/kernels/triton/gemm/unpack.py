"""Codes brought to numbers that tensor cores take, byte for byte; see `unpack_words` for words.

Four bytes lie in one register.  On the card a few logical instructions make numbers of all of them
at once; Triton's own arithmetic takes three times as many.  The interpreter knows no assembler and
takes the arithmetic.
"""

import torch
import triton
import triton.language as tl

from hmt.contracts.encoding import Encoding

INTERPRETED: bool = triton.knobs.runtime.interpret
ASSEMBLER = tl.constexpr(not INTERPRETED)

# How many neighbouring inputs Triton gives to a thread of the tensor cores, over those that fill a
# register: operands are made in that order, or they would be moved between threads.
WIDE = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8))

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
def panel_integers(pairs, E2M1: tl.constexpr):
    """Low and high nibbles: codes of int4 less 8, or numbers of e2m1 doubled; int32."""
    return e2m1_or_int4(pairs & 15, E2M1), e2m1_or_int4(pairs >> 4, E2M1)


@triton.jit
def e2m1_or_int4(codes, E2M1: tl.constexpr):
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


@triton.jit
def int8_bf16(codes):
    """2^-6 of codes of int8 in bf16; not for the interpreter."""
    # A byte in the lowest bits of bf16 counts in steps of 2^-133, with subnormals and above them.
    # Converted one at a time by way of f32, a number takes three times as long.
    return tl.inline_asm_elementwise(
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
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def byte_of_words(words, BYTE: tl.constexpr, E4M3: tl.constexpr):
    """Byte BYTE of words, codes of e4m3, or 2^-6 of those of int8, in bf16; two words at once."""
    if E4M3:
        if BYTE == 0:
            both = _two_e4m3(words, "0x4400")
        elif BYTE == 1:
            both = _two_e4m3(words, "0x5511")
        elif BYTE == 2:
            both = _two_e4m3(words, "0x6622")
        else:
            both = _two_e4m3(words, "0x7733")
    elif BYTE == 0:
        both = _two_int8(words, "0x4400")
    elif BYTE == 1:
        both = _two_int8(words, "0x5511")
    elif BYTE == 2:
        both = _two_int8(words, "0x6622")
    else:
        both = _two_int8(words, "0x7733")
    return both


@triton.jit
def _two_int8(words, BYTES: tl.constexpr):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, m, n; prmt.b32 a, $1, $2, "
        + BYTES
        + "; lop3.b32 a, a, 0x00FF00FF, 0x00800080, 0x6A; mov.b32 m, 0x7F007F00;"
        " mov.b32 n, 0xC000C000; fma.rn.bf16x2 $0, a, m, n; }",
        "=r,r,r",
        [words],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _two_e4m3(words, BYTES: tl.constexpr):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, m; prmt.b32 a, $1, $2, "
        + BYTES
        + "; and.b32 b, a, 0x80008000; shr.b32 a, a, 4; mov.b32 m, 0x7B807B80;"
        " lop3.b32 a, a, 0x07F007F0, b, 0xEA; mul.bf16x2 $0, a, m; }",
        "=r,r,r",
        [words],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )

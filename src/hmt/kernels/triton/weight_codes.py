"""Weights' codes in registers: 4-bit codes to bytes, exact dot products of bytes, scales."""

import triton
import triton.language as tl


@triton.jit
def dot4(a, b, c, ASM: tl.constexpr):
    """C plus the dot product of the four signed bytes in each of a and b, all int32."""
    if ASM:
        out = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        out = c
        for i in tl.static_range(4):
            out += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return out


@triton.jit
def doubled_e2m1(code):
    """Twice the number that a code 0..15 of e2m1 stands for, as an integer."""
    magnitude = code & 7
    large = tl.where(magnitude == 5, 6, tl.where(magnitude == 6, 8, 12))
    number = tl.where(magnitude < 5, magnitude, large)
    return tl.where(code > 7, -number, number)


@triton.jit
def nibble_bytes(words, E2M1: tl.constexpr, ASM: tl.constexpr):
    """Codes of int32 words as bytes: (of the low nibbles, of the high nibbles).

    Codes of e2m1 become the doubled numbers; others stay as they are, 0..15.
    """
    if not E2M1:
        low = words & 0x0F0F0F0F
        high = (words >> 4) & 0x0F0F0F0F
    elif ASM:
        # prmt picks four bytes of eight by four selectors: a table of magnitudes and one of their
        # negatives; with bit 3 of a selector set it spreads the sign of a byte instead.
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, p, q, n, m, s, t;
            and.b32 a, $2, 0x77777777;
            shr.u32 b, a, 16;
            shl.b32 c, $2, 4;
            prmt.b32 p, 0x03020100, 0x0C080604, a;
            prmt.b32 q, 0x03020100, 0x0C080604, b;
            prmt.b32 n, 0xFDFEFF00, 0xF4F8FAFC, a;
            prmt.b32 m, 0xFDFEFF00, 0xF4F8FAFC, b;
            prmt.b32 s, c, $2, 0xD9C8;
            prmt.b32 t, c, $2, 0xFBEA;
            lop3.b32 p, s, n, p, 0xCA;
            lop3.b32 q, t, m, q, 0xCA;
            prmt.b32 $0, p, q, 0x6420;
            prmt.b32 $1, p, q, 0x7531;
            }
            """,
            "=&r,=&r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = tl.zeros_like(words)
        high = tl.zeros_like(words)
        for i in tl.static_range(4):
            low |= (doubled_e2m1((words >> (8 * i)) & 15) & 255) << (8 * i)
            high |= (doubled_e2m1((words >> (8 * i + 4)) & 15) & 255) << (8 * i)
    return low, high


@triton.jit
def scale_numbers(stored, factor, KIND: tl.constexpr):
    """Scales as stored, to f32: what the integers of `nibble_bytes` are multiplied with."""
    if KIND == "mxfp4":
        bits = stored.to(tl.int32)
        numbers = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True) * 0.5
    elif KIND == "nvfp4":
        numbers = stored.to(tl.float32) * factor * 0.5
    else:
        numbers = stored.to(tl.float32)
    return numbers


@triton.jit
def pointers(addresses, KIND: tl.constexpr, ALIGNED: tl.constexpr = 16):
    """Int64 addresses, multiples of ALIGNED, as pointers to numbers of dtype KIND."""
    # Said of the pointer: what is known of an integer is forgotten when it becomes one.
    pointer = addresses.to(tl.pointer_type(KIND))
    if len(addresses.shape) == 3:
        aligned = tl.multiple_of(pointer, [ALIGNED, ALIGNED, ALIGNED])
    elif len(addresses.shape) == 2:
        aligned = tl.multiple_of(pointer, [ALIGNED, ALIGNED])
    else:
        aligned = tl.multiple_of(pointer, [ALIGNED])
    return aligned

"""Tiles of weights as tensor cores take them, from bytes as they lie.

Nothing is moved between lanes to make numbers of 4-bit codes.  Each nibble of a tile of words is a
tile of numbers by itself: nibble 2 i + h of word w of a row is input 32 (w / 4) + 16 h + 4 (w % 4)
+ i, so activations come with all inputs of one nibble side by side, see `by_nibbles`.
"""

import triton
import triton.language as tl

from hmt.kernels.triton.weight_codes import doubled_e2m1, pointers, scale_numbers


@triton.jit
def nibble_numbers(words, NIBBLE: tl.constexpr, by, offset, E2M1: tl.constexpr):
    """The numbers of the nibble 4 * NIBBLE bits up, in f32."""
    if E2M1:
        # Its three bits as the lowest of the exponent and the highest of the mantissa of f32 are
        # the number times 2^-126, the subnormal 0.5 as well; 2^127 doubles it.
        AT: tl.constexpr = 22 - 4 * NIBBLE
        bits = words << AT if AT > 0 else words >> -AT
        sign = (words << (28 - 4 * NIBBLE)) & -0x80000000
        number = ((bits & 0x01C00000) | sign).to(tl.float32, bitcast=True)
        out = (number * 1.7014118346046923e38) * by
    else:
        # In the mantissa of a number between 1 and 2 a code is 1 + code / 256 or 1 + code / 16:
        # one operation less than a conversion, and exact with scales of 16 bits.
        SHIFT: tl.constexpr = 15 - 8 * (NIBBLE // 2)
        bits = words << SHIFT if SHIFT > 0 else words >> -SHIFT
        kept = bits & (0x00780000 if NIBBLE % 2 == 1 else 0x00078000)
        out = (kept | 0x3F800000).to(tl.float32, bitcast=True) * by + offset
    return out


@triton.jit
def panel_words(
    data, scales, extra, factor, first, start, rows, columns,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, EXTRA: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Rows `first` and on, inputs `start` and on, not yet numbers: five of [ROWS, WORDS].

    Words, and what `nibble_numbers` multiplies with and adds: of low nibbles, of high nibbles.
    """
    e2m1: tl.constexpr = KIND != "int4"
    row = first + tl.arange(0, ROWS)[:, None]
    word = start // 8 + tl.arange(0, WORDS)[None, :]
    mask = (row // 16 * 16 < rows) & (word * 8 < columns)
    place = (row // 16 * (columns // 8) + word) * 16 + row % 16
    words = tl.load(pointers(data, tl.int32) + place, mask=mask, other=0)
    at = (row // 16 * (columns // GROUP) + word // 4 * 32 // GROUP) * 16 + row % 16
    by = scale_numbers(tl.load(pointers(scales, SCALE) + at, mask=mask, other=0.0), factor, KIND)
    high_by = by
    if GROUP == 16:
        stored = tl.load(pointers(scales, SCALE) + at + 16, mask=mask, other=0.0)
        high_by = scale_numbers(stored, factor, KIND)
    offset = by
    high_offset = high_by
    if not e2m1:
        offset = -264.0 * by
        high_offset = -24.0 * high_by
        if EXTRA != "":
            KEPT: tl.constexpr = tl.uint8 if EXTRA == "zeros" else SCALE
            added = pointers(extra, KEPT) + at
            more = tl.load(added, mask=mask, other=0.0).to(tl.float32)
            high_more = more
            if GROUP == 16:
                high_more = tl.load(added + 16, mask=mask, other=0.0).to(tl.float32)
            if EXTRA == "zeros":
                offset = -(256.0 + more) * by
                high_offset = -(16.0 + high_more) * high_by
            else:
                offset = more - 256.0 * by
                high_offset = high_more - 16.0 * high_by
        by = 256.0 * by
        high_by = 16.0 * high_by
    return words, by, offset, high_by, high_offset


@triton.jit
def joined(a, b, c, d, e, f, g, h, PANELS: tl.constexpr, WORDS: tl.constexpr):
    """Eight [PANELS, WORDS, 16], of low nibbles 0 to 3 and high ones, as rows of [.., 8]."""
    first = tl.join(tl.join(a, e), tl.join(c, g))
    second = tl.join(tl.join(b, f), tl.join(d, h))
    both = tl.permute(tl.join(first, second), (0, 2, 1, 3, 4, 5))
    return tl.reshape(both, (PANELS * 16, WORDS * 8))


@triton.jit
def _integer(words, NIBBLE: tl.constexpr, zero, keep, E2M1: tl.constexpr):
    """The integers of a nibble as int8, 0 where not `keep`."""
    code = (words >> (4 * NIBBLE)) & 15
    number = doubled_e2m1(code) if E2M1 else code - zero
    return tl.where(keep, number, 0).to(tl.int8)


@triton.jit
def panel_codes(
    data, scales, extra, factor, first, start, rows, columns, HALF: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, EXTRA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Inputs of one group: (int8 [ROWS, COLUMNS], scales f32 [ROWS], minima f32 [ROWS]).

    Groups of 16 are the low or the high nibbles of 32 inputs: those of HALF; the rest is 0.
    """
    WORDS: tl.constexpr = COLUMNS // 8
    e2m1: tl.constexpr = KIND != "int4"
    panel = first // 16 + tl.arange(0, ROWS // 16)[:, None, None]
    word = start // 8 + tl.arange(0, WORDS)[None, :, None]
    row = tl.arange(0, 16)[None, None, :]
    inside = panel * 16 < rows
    words = tl.load(
        pointers(data, tl.int32) + (panel * (columns // 8) + word) * 16 + row, mask=inside, other=0
    )
    at = (panel * (columns // GROUP) + start // GROUP + HALF) * 16 + row
    by = scale_numbers(tl.load(pointers(scales, SCALE) + at, mask=inside, other=0.0), factor, KIND)
    least = tl.zeros_like(by)
    zero = 8
    if EXTRA == "zeros":
        zero = tl.load(pointers(extra, tl.uint8) + at, mask=inside, other=0).to(tl.int32)
    elif EXTRA == "minima":
        zero = 0
        stored = tl.load(pointers(extra, SCALE) + at, mask=inside, other=0.0)
        least = stored.to(tl.float32)
    low = (word >= 0) if GROUP > 16 or HALF == 0 else (word < 0)
    high = (word >= 0) if GROUP > 16 or HALF == 1 else (word < 0)
    codes = joined(
        _integer(words, 0, zero, low, e2m1),
        _integer(words, 2, zero, low, e2m1),
        _integer(words, 4, zero, low, e2m1),
        _integer(words, 6, zero, low, e2m1),
        _integer(words, 1, zero, high, e2m1),
        _integer(words, 3, zero, high, e2m1),
        _integer(words, 5, zero, high, e2m1),
        _integer(words, 7, zero, high, e2m1),
        ROWS // 16,
        WORDS,
    )
    return codes, tl.reshape(by, (ROWS,)), tl.reshape(least, (ROWS,))


@triton.jit
def row_tile(
    data, scales, first, start, rows, columns,
    KIND: tl.constexpr, DATA: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RESULT: tl.constexpr,
):  # fmt: skip
    """As `panel_tile`, of row-major numbers, inputs in their own order."""
    row = first + tl.arange(0, ROWS)[:, None]
    column = start + tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    at = pointers(data, DATA, ALIGNED) + row.to(tl.int64) * columns + column
    numbers = tl.load(at, mask=mask, other=0.0)
    if KIND != "float":
        by = pointers(scales, tl.float32, ALIGNED)
        if KIND == "fp8":
            by += row // TILE_ROWS * tl.cdiv(columns, TILE_COLUMNS) + column // TILE_COLUMNS
        elif KIND == "int8-group":
            by += row * (columns // GROUP) + column // GROUP
        else:
            by += row + column * 0
        numbers = numbers.to(tl.float32) * tl.load(by, mask=mask, other=0.0)
    return numbers.to(RESULT)

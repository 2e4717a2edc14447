"""Products of many int8 tokens with int8 weights, on tensor cores."""

import triton
import triton.language as tl

# As a number, 1.5 * 2^23; as bits, what an integer is added to so that it becomes a number.  That
# takes one subtraction where a conversion takes four times as long.
_BITS = tl.constexpr(0x4B400000)
_NUMBER = tl.constexpr(12582912.0)


@triton.jit
def many_tokens_int8(
    out,
    x,
    token_scales,
    codes,
    scales,
    added,
    bias,
    tokens,
    rows,
    columns,
    out_stride,
    scale_row,
    scale_group,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
):
    """x int8 [tokens, in] times codes int8 [out, in].

    scales    f32, of row r and group g at r * scale_row + g * scale_group
    added     f32 [tokens, rows], or None: added before the token's scale is applied
    GROUP     inputs per scale; 0 stands for one scale per row
    COLUMNS   inputs per step; a divisor of GROUP, or 32 where GROUP is 16
    BAND      tiles of tokens that follow each other, so that weights are found in the cache
    """
    tile = tl.program_id(0)
    high, wide = tl.cdiv(tokens, TOKENS), tl.cdiv(rows, ROWS)
    band = tile // (BAND * wide)
    height = tl.minimum(high - band * BAND, BAND)
    within = tile % (BAND * wide)
    token = (band * BAND + within % height) * TOKENS + tl.arange(0, TOKENS)
    row = within // height * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    x_at = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * columns + column[None, :]
    code_at = codes + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * columns + column[:, None]
    scale_at = scales + tl.minimum(row, rows - 1).to(tl.int64) * scale_row
    total = tl.zeros((TOKENS, ROWS), tl.int32 if GROUP == 0 else tl.float32)
    for start in range(0, columns, COLUMNS):
        known = column + start < columns
        values = tl.load(x_at + start, mask=known[None, :], other=0)
        weights = tl.load(code_at + start, mask=known[:, None], other=0)
        if GROUP == 0:
            total = tl.dot(values, weights, total, out_dtype=tl.int32)
        elif GROUP < COLUMNS:
            low = tl.where((column < GROUP)[None, :], values, 0)
            high_half = tl.where((column >= GROUP)[None, :], values, 0)
            group = start // GROUP
            total += _scaled(low, weights, scale_at + group * scale_group)
            total += _scaled(high_half, weights, scale_at + (group + 1) * scale_group)
        else:
            total += _scaled(values, weights, scale_at + start // GROUP * scale_group)
    inside = (token < tokens)[:, None] & (row < rows)[None, :]
    result = total.to(tl.float32)
    if GROUP == 0:
        result *= tl.load(scale_at)[None, :]
    if added is not None:
        at = added + token.to(tl.int64)[:, None] * rows + row[None, :]
        result += tl.load(at, mask=inside, other=0.0)
    result *= tl.load(token_scales + token, mask=token < tokens, other=0.0)[:, None]
    if bias is not None:
        result += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    at = out + token.to(tl.int64)[:, None] * out_stride + row[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(values, weights, scale_at):
    """A step's products, exact below 2^22 (as 256 products of int8 are), times its scales: f32."""
    start = tl.full((values.shape[0], weights.shape[1]), _BITS, tl.int32)
    product = tl.dot(values, weights, start, out_dtype=tl.int32)
    return (product.to(tl.float32, bitcast=True) - _NUMBER) * tl.load(scale_at)[None, :]

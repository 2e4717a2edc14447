"""Products of few tokens with 8-bit weights in rows: every byte of the weights is read once.

As in `few.py`, a thread loads the numbers that its lane of a warp holds for the tensor cores: 16
bytes of a row, or 8 where groups are no longer than 32 inputs.
"""

import triton
import triton.language as tl

from hmt.kernels.triton.unpack import byte_numbers

# Scales are f32 [out / TILE_ROWS, in / GROUP]; GROUP 0 stands for one scale per row.  Others:
#
# DEPTH       dots that a warp takes at once
# CHUNKS      inputs of a dot, over 32: 1 or 2; GROUP is a multiple
# EIGHTS      rows of a program, over 8
# TOKENS      tokens of a program: 8, 16 or 32
# STAGES      steps whose inputs are on their way while one is computed
# EVEN        columns are a multiple of 32 * WARPS * DEPTH * CHUNKS


@triton.jit
def few_tokens_rows(
    out,
    x,
    token_scales,
    codes,
    scales,
    bias,
    rows,
    columns,
    tokens,
    x_stride,
    out_stride,
    scale_columns,
    TILE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    EIGHTS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """x [tokens, in] times codes [out, in], int8 or e4m3."""
    DOTS: tl.constexpr = WARPS * DEPTH
    INT8: tl.constexpr = x.dtype.element_ty == tl.int8
    first_row = tl.program_id(0) * (8 * EIGHTS)
    first_token = tl.program_id(1) * TOKENS
    # Lanes first: [EIGHTS, DOTS, row of 8, part of 4], each with 8 * CHUNKS inputs.
    at = tl.arange(0, EIGHTS * DOTS * 32)
    row = first_row + at // (32 * DOTS) * 8 + at // 4 % 8
    row = tl.minimum(row, rows - 1)
    begin = (at // 32 % DOTS) * (32 * CHUNKS) + at % 4 * (8 * CHUNKS)
    column = begin[:, None] + tl.arange(0, 8 * CHUNKS)[None, :]
    code_at = codes + row.to(tl.int64)[:, None] * columns + column
    scale_at = scales + (row // TILE_ROWS).to(tl.int64) * scale_columns
    # [TOKENS / 8, CHUNKS, DOTS, token of 8, part of 4], each with 8 inputs.
    xs = tl.arange(0, TOKENS * 4 * CHUNKS * DOTS)
    token = first_token + xs // (32 * DOTS * CHUNKS) * 8 + xs // 4 % 8
    x_begin = xs // 32 % DOTS * (32 * CHUNKS) + xs % 4 * (8 * CHUNKS)
    x_begin += xs // (32 * DOTS) % CHUNKS * 8
    x_column = x_begin[:, None] + tl.arange(0, 8)[None, :]
    x_at = x + token.to(tl.int64)[:, None] * x_stride + x_column
    known = (token < tokens)[:, None]

    SUM: tl.constexpr = tl.int32 if INT8 else tl.float32
    total = tl.zeros((DOTS, 8 * EIGHTS, TOKENS), SUM if GROUP == 0 else tl.float32)
    for start in tl.range(0, columns, DOTS * 32 * CHUNKS, num_stages=STAGES):
        if EVEN:
            weights = tl.load(code_at + start)
            values = tl.load(x_at + start, mask=known, other=0.0)
        else:
            weights = tl.load(code_at + start, mask=column + start < columns, other=0.0)
            values = tl.load(x_at + start, mask=known & (x_column + start < columns), other=0.0)
        weights = byte_numbers(weights, x.dtype.element_ty)
        weights, values = _operands(weights, values, EIGHTS, DOTS, CHUNKS, TOKENS)
        product = tl.dot(weights, values, out_dtype=SUM)
        if GROUP == 0:
            total += product
        else:
            group = start + at // 32 % DOTS * (32 * CHUNKS)
            scale = tl.load(scale_at + group // GROUP, mask=group < columns, other=0.0)
            total += product.to(tl.float32) * _over_tokens(scale, EIGHTS, DOTS, TOKENS)
    result = tl.sum(total, 0).to(tl.float32)
    row = first_row + tl.arange(0, 8 * EIGHTS)
    inside = row < rows
    token = first_token + tl.arange(0, TOKENS)
    if GROUP == 0:
        result *= tl.load(scales + row, mask=inside, other=0.0)[:, None]
    if token_scales is not None:
        result *= tl.load(token_scales + token, mask=token < tokens, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    out_at = out + token.to(tl.int64)[None, :] * out_stride + row[:, None]
    tl.store(
        out_at, result.to(out.dtype.element_ty), mask=inside[:, None] & (token < tokens)[None, :]
    )


@triton.jit
def _operands(
    weights,
    values,
    EIGHTS: tl.constexpr,
    DOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """What is multiplied: [DOTS, rows, inputs] and [DOTS, inputs, tokens].

    Inputs come in the order (chunk, half of eight, part, i): so Triton multiplies loaded bytes.
    """
    weights = tl.reshape(weights, (EIGHTS, DOTS, 8, 4, CHUNKS, 2, 4))
    weights = tl.permute(weights, (1, 0, 2, 4, 5, 3, 6))
    weights = tl.reshape(weights, (DOTS, 8 * EIGHTS, 32 * CHUNKS))
    values = tl.reshape(values, (TOKENS // 8, CHUNKS, DOTS, 8, 4, 2, 4))
    values = tl.permute(values, (2, 1, 5, 4, 6, 0, 3))
    return weights, tl.reshape(values, (DOTS, 32 * CHUNKS, TOKENS))


@triton.jit
def _over_tokens(scale, EIGHTS: tl.constexpr, DOTS: tl.constexpr, TOKENS: tl.constexpr):
    """Scales of rows, one for each thread, for all tokens: [DOTS, rows, TOKENS]."""
    scale = tl.permute(tl.reshape(scale, (EIGHTS, DOTS, 8, 4)), (1, 0, 2, 3))
    scale = tl.reshape(scale, (DOTS, 8 * EIGHTS, 1, 4, 1))
    scale = tl.broadcast_to(scale, (DOTS, 8 * EIGHTS, TOKENS // 8, 4, 2))
    return tl.reshape(scale, (DOTS, 8 * EIGHTS, TOKENS))

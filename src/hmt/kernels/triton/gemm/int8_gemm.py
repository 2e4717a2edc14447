"""Products of many int8 tokens with weights, on tensor cores.

Tensor cores add int8 products up as int32, which has to become f32 and be scaled for each group: at
groups of 32 that takes five times as long as the products.  A number of four bits times a scale of
at most eight, however, is exact in f16 or bf16, as is an int8 token; so their products and sums are
as good in f32, and cuBLAS makes them at the rate of bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels.reference.packing import integer_scales, minima, unpack_groups
from hmt.kernels.triton.gemm.dequantize import dequantize_into

# As a number, 1.5 * 2^23; as bits, what an integer is added to so that it becomes a number.  That
# takes one subtraction where a conversion takes four times as long.
_BITS = tl.constexpr(0x4B400000)
_NUMBER = tl.constexpr(12582912.0)


_EXACT = {
    Encoding.INT4_GROUP: (torch.bfloat16, torch.float16),
    Encoding.NVFP4: (torch.float8_e4m3fn, torch.bfloat16),
    Encoding.MXFP4: (torch.uint8, torch.bfloat16),
}


def is_exact(w: WeightTensor) -> bool:
    """True where `multiply_exact` takes w: where codes times scales need no more bits than it has.

    (code - 8) times a scale in bf16 has 11 bits, as f16 does; that of e2m1 and e4m3 has 6.
    """
    return w.scales is not None and _EXACT.get(w.encoding, (None,))[0] == w.scales.dtype


def multiply_exact(
    out: Tensor, codes: Tensor, token_scales: Tensor, w: WeightTensor, bias: Tensor | None
) -> None:
    """int8 tokens [tokens, in] times w, as floats that hold them exactly, to out [tokens, out]."""
    assert w.scales is not None
    rows, columns = w.shape
    dtype = _EXACT[w.encoding][1]
    if w.encoding is Encoding.INT4_GROUP:
        # Powers of two, so that scales fit f16: what is 2^14 times smaller than the largest of its
        # row may lose bits, which are 2^-25 of the largest.
        largest = w.scales.abs().amax(1).flatten().float()
        exponents = torch.frexp(largest).exponent
        units = torch.ldexp(torch.ones_like(largest), exponents)
    else:
        assert w.factor is not None or w.encoding is Encoding.MXFP4
        units = torch.ones(w.scales.shape[0] * 16, device=codes.device)
    numbers = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    dequantize_into(numbers, w, units=units)
    if codes.is_cuda:
        sums = torch.mm(codes.to(dtype), numbers.t(), out_dtype=torch.float32)
    else:  # only CUDA has products with another dtype
        sums = codes.float() @ numbers.float().t()
    if w.factor is not None:
        units = units * w.factor
    _finish(out, sums, units, _offsets(codes, w), token_scales, bias)


def _offsets(codes: Tensor, w: WeightTensor) -> Tensor | None:
    """What zeros, less 8, or minima add to products, before tokens are scaled: [tokens, rows]."""
    if w.zeros is None and w.minima is None:
        return None
    everything = slice(0, w.shape[0])
    added = integer_scales(w, everything) * 8
    if w.zeros is not None:
        zeros = unpack_groups(w.zeros, everything, w.shape[0])
        added -= integer_scales(w, everything) * zeros
    else:
        least = minima(w, everything)
        assert least is not None
        added += least
    sums = codes.view(len(codes), -1, w.group_size).sum(-1, dtype=torch.int32)
    return sums.float() @ added.t()


def _finish(
    out: Tensor,
    sums: Tensor,
    units: Tensor,
    added: Tensor | None,
    token_scales: Tensor,
    bias: Tensor | None,
) -> None:
    tokens, rows = out.shape
    grid = (tokens, triton.cdiv(rows, 1024))
    _finish_tokens[grid](
        out, sums, units, added, token_scales, bias, rows, out.stride(0), ROWS=1024, num_warps=4
    )


@triton.jit
def _finish_tokens(
    out, sums, units, added, token_scales, bias, rows, out_stride, ROWS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    result = tl.load(sums + token * rows + row, mask=inside, other=0).to(tl.float32)
    result *= tl.load(units + row, mask=inside, other=0.0)
    if added is not None:
        result += tl.load(added + token * rows + row, mask=inside, other=0.0)
    result *= tl.load(token_scales + token)
    if bias is not None:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + row, result.to(out.dtype.element_ty), mask=inside)


# One variant for all numbers of tokens: a second, for multiples of 16, took 0.3 to 3 s to compile.
@triton.jit(do_not_specialize=["tokens"])
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

"""Linear layers on every encoding, in plain torch."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hmt.base.units import MIB, round_down
from hmt.contracts.encoding import Activations, Encoding, WeightTensor

# Converted weights are alive one chunk of rows at a time, so a model that computes in another
# dtype than it is stored in never needs memory for both.  4 MiB stays in the cache; chunks of
# 64 MiB made the product 3 to 7 times slower, because each is freshly mapped memory.
_CHUNK_BYTES = 4 * MIB
# The W4A8 product adds the groups of a row in this many interleaved sums, because that is the
# order in which a SIMD register of 16 floats adds them.
LANES = 16


def linear(x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, in] times the transpose of `w` [out, in], plus bias [out]: [tokens, out].

    The result has the dtype of `x`.  With Activations.FLOAT the weights are brought to that dtype
    first; with Activations.INT8_TOKEN see `linear_int8_tokens`.
    """
    if w.activations is Activations.INT8_TOKEN:
        return linear_int8_tokens(x, w, bias)
    if w.data.dtype == x.dtype and w.encoding.is_float:
        return functional.linear(x, w.data, None if bias is None else bias.to(x.dtype))
    return linear_by_chunks(x, w, bias, dequantize)


def linear_by_chunks(
    x: Tensor,
    w: WeightTensor,
    bias: Tensor | None,
    dequantize: Callable[[WeightTensor, torch.dtype, slice], Tensor],
) -> Tensor:
    """`linear` with rows of `w` brought to x.dtype by `dequantize`, one chunk after the other."""
    out = x.new_empty(x.shape[0], w.shape[0])
    for rows in _row_chunks(w, 4 * w.shape[1]):
        part = None if bias is None else bias[rows].to(x.dtype)
        out[:, rows] = functional.linear(x, dequantize(w, x.dtype, rows), part)
    return out


def dequantize(w: WeightTensor, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
    """Rows of a weight as numbers: [rows, in] in `dtype`; a view where nothing has to be converted.

    Codes are multiplied with their scales in f32 and rounded once, to `dtype`.
    """
    start, stop, _ = (rows or slice(None)).indices(w.shape[0])
    data = w.data[start:stop]
    if w.encoding.is_float:
        return data.to(dtype)
    assert w.scales is not None
    match w.encoding:
        case Encoding.FP8_BLOCK:
            first = torch.arange(start, stop, device=data.device) // w.tile[0]
            values = _scale_columns(data.float(), w.scales[first], w.tile[1])
        case Encoding.INT8_CHANNEL:
            values = data.float().mul_(w.scales[start:stop, None])
        case _:
            codes = unpack_int4(data)
            values = _scale_columns(codes.float(), w.scales[start:stop], w.group_size)
    return values.to(dtype)


def unpack_int4(packed: Tensor) -> Tensor:
    """Codes -8..7 of uint8 [rows, in / 2] with two in each byte: int8 [rows, in]."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1)  # [rows, in / 2, 2]
    return nibbles.flatten(1).view(torch.int8).sub_(8)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each token to int8 with one scale: (codes int8 [tokens, in], scales f32 [tokens]).

    Symmetric: scale = max|x| / 127, codes in -127..127, ties to even.  A row of zeros has scale 0.
    """
    values = x.float()
    scales = values.abs().amax(dim=-1) / 127
    divisors = torch.where(scales > 0, scales, 1.0)
    codes = values.div(divisors[:, None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scales


def linear_int8_tokens(x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """W8A8 and W4A8: x is rounded to int8 per token, and the products are exact integers.

    The dot product over one group of inputs is an integer; times the group's scale in f32; the
    groups add up in f32 in the order of `_sum_groups`; times the token's scale; plus bias in f32;
    then rounded to x.dtype.  So the result is defined to the bit, whatever the other tokens are.
    """
    assert w.scales is not None
    codes, token_scales = quantize_activations(x)
    group = w.group_size or w.shape[1]
    groups = w.shape[1] // group
    # Sums up to 2^24 are exact in f32; an int8 row of more than 1032 inputs can pass that.
    exact = torch.float32 if group * 127 * 128 <= 1 << 24 else torch.float64
    activations = codes.view(len(codes), groups, group).transpose(0, 1).to(exact)
    lanes = min(LANES, groups)
    out = x.new_empty(x.shape[0], w.shape[0])
    for rows in _row_chunks(w, 4 * max(w.shape[1], lanes * len(codes))):
        data = unpack_int4(w.data[rows]) if w.encoding is Encoding.INT4_GROUP else w.data[rows]
        weights = data.view(len(data), groups, group).permute(1, 2, 0).to(exact)
        scales = w.scales[rows].view(len(data), groups).T  # [groups, rows]
        sums = _sum_groups(activations, weights, scales).mul_(token_scales[:, None])
        out[:, rows] = sums if bias is None else sums.add_(bias[rows])
    return out


def _sum_groups(activations: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Dot products of each group, times its scale, added up over the groups: f32 [tokens, rows].

    activations [groups, tokens, group], weights [groups, group, rows], scales [groups, rows].
    Group g is added to sum g mod 16, in ascending order; then the 16 sums are folded in halves.
    """
    groups, tokens, _ = activations.shape
    used = 1 << (min(groups, LANES) - 1).bit_length()  # the sums beyond stay 0
    lanes = scales.new_zeros(used, tokens, scales.shape[1])
    for first in range(0, groups, LANES):
        part = slice(first, first + LANES)
        products = torch.bmm(activations[part], weights[part]).float() * scales[part, None]
        lanes[: len(products)] += products
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def _scale_columns(values: Tensor, scales: Tensor, width: int) -> Tensor:
    """Multiply, in place, each `width` columns of values [rows, in] with one column of scales."""
    whole = values.shape[1] // width
    head, tail = values[:, : whole * width], values[:, whole * width :]
    head.view(len(values), whole, width).mul_(scales[:, :whole, None])
    tail.mul_(scales[:, whole:])
    return values


def _row_chunks(w: WeightTensor, row_bytes: int) -> Iterator[slice]:
    """Slices of rows, in whole tiles, with about _CHUNK_BYTES when a row needs `row_bytes`."""
    rows = w.shape[0]
    tile = max(1, w.tile[0])
    step = max(tile, round_down(_CHUNK_BYTES // row_bytes, tile))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))

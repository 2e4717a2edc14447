"""Linear layers on every encoding, in plain torch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hmt.base.units import MIB, round_down
from hmt.contracts.encoding import (
    ACTIVATION_BLOCK,
    ACTIVATION_GROUP,
    BLOCK_SHAPES,
    Activations,
    Encoding,
    Packing,
    WeightTensor,
)
from hmt.kernels.reference.gguf_blocks import Integers, block_integers
from hmt.kernels.reference.packing import integer_codes, integer_scales, minima, unpack_blocks

# Converted weights are alive one chunk of rows at a time, so a model that computes in another
# dtype than it is stored in never needs memory for both.  4 MiB stays in the cache; chunks of
# 64 MiB made the product 3 to 7 times slower, because each is freshly mapped memory.
_CHUNK_BYTES = 4 * MIB


def linear(x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, in] times the transpose of `w` [out, in], plus bias [out]: [tokens, out].

    The result has the dtype of `x`.  With Activations.FLOAT the weights are brought to that dtype
    first; with Activations.INT8_TOKEN see `linear_int8_tokens`, with INT8_BLOCK and INT8_GROUP
    `linear_int8_blocks` of blocks and `linear_int8_groups` of others.
    """
    if w.activations is Activations.INT8_TOKEN:
        return linear_int8_tokens(x, w, bias)
    if w.activations.are_integers:
        blocks = w.encoding.packing is Packing.BLOCKS
        return (linear_int8_blocks if blocks else linear_int8_groups)(x, w, bias)
    if w.data.dtype == x.dtype and w.encoding.is_float:
        return functional.linear(x, w.data, None if bias is None else bias.to(x.dtype))
    return linear_by_chunks(x, w, bias, dequantize)


def linear_many(x: Tensor, params: Mapping[str, WeightTensor], names: tuple[str, ...]) -> Tensor:
    """`linear` of one x with several weights, side by side: [tokens, sum of all out].

    Biases are called after their weights: "q_proj_bias" goes with "q_proj".
    """
    biases = [params.get(f"{name}_bias") for name in names]
    return torch.cat(
        [
            linear(x, params[name], None if bias is None else bias.data)
            for name, bias in zip(names, biases, strict=True)
        ],
        dim=1,
    )


def linear_into(out: Tensor, x: Tensor, w: WeightTensor, kernels: Any = None) -> None:
    """`linear` written to out [tokens, out] of x.dtype, perhaps columns of a larger tensor.

    kernels   whose `linear` computes; None: the reference's own
    """
    out.copy_(linear(x, w) if kernels is None else kernels.linear(x, w))


def head_products(x: Tensor, matrices: Tensor) -> Tensor:
    """Each head's numbers times its matrix: x [tokens, heads, in] to [tokens, heads, out].

    matrices [heads, in, out], of any strides; all in x.dtype, summed in f32.
    """
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)


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

    Codes are multiplied with their scales in f32 (and minima added) and rounded once, to `dtype`.
    """
    start, stop, _ = (rows or slice(None)).indices(w.shape[0])
    rows = slice(start, stop)
    if w.encoding.is_float:
        return w.data[rows].to(dtype)
    if w.encoding is Encoding.FP8_BLOCK:
        assert w.scales is not None
        data = w.data[rows]
        first = torch.arange(start, stop, device=data.device) // w.tile[0]
        return _scale_columns(data.float(), w.scales[first], w.tile[1]).to(dtype)
    if w.encoding.packing is Packing.BLOCKS:
        return _numbers_of_blocks(w, rows).to(dtype)
    codes, scales = integer_codes(w, rows).float(), integer_scales(w, rows)
    groups = codes.view(len(codes), scales.shape[1], -1)
    groups *= scales[..., None]
    added = minima(w, rows)
    if added is not None:
        groups += added[..., None]
    return codes.to(dtype)


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
    groups add up in f32 in ascending order, each followed by the sum of the group's codes times
    its minimum where there are minima; times the token's scale; plus bias in f32; then rounded to
    x.dtype.  So the result is defined to the bit, whatever the other tokens are.
    """
    codes, token_scales = quantize_activations(x)
    return _int8_groups(x, codes, token_scales[:, None], w, bias)


def linear_int8_groups(x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """Groups of 32 inputs times x rounded to int8 with a scale s per group; products are integers.

    As `linear_int8_tokens`, but what is multiplied with a group's integer is the group's scale
    times s, rounded to f32, and with its minimum the sum of codes times s.
    """
    assert w.group_size == ACTIVATION_GROUP
    codes, scales = quantize_activation_blocks(x, ACTIVATION_GROUP)
    return _int8_groups(x, codes, scales, w, bias)


def _int8_groups(
    x: Tensor, codes: Tensor, token_scales: Tensor, w: WeightTensor, bias: Tensor | None
) -> Tensor:
    """Products of codes [tokens, in] with scales [tokens, 1] or [tokens, groups]."""
    group = w.group_size or w.shape[1]
    groups = w.shape[1] // group
    # Sums up to 2^24 are exact in f32; an int8 row of more than 1032 inputs can pass that.
    exact = torch.float32 if group * 127 * 128 <= 1 << 24 else torch.float64
    activations = codes.view(len(codes), groups, group).transpose(0, 1).to(exact)
    sums = activations.sum(-1).float()  # [groups, tokens]
    by_group = w.activations is Activations.INT8_GROUP
    if by_group:
        sums *= token_scales.T
    out = x.new_empty(x.shape[0], w.shape[0])
    for rows in _row_chunks(w, 4 * max(w.shape[1], groups * len(codes))):
        weights = integer_codes(w, rows)
        weights = weights.view(len(weights), groups, group).permute(1, 2, 0).to(exact)
        scales, added = integer_scales(w, rows), minima(w, rows)
        products = torch.bmm(activations, weights).float()  # [groups, tokens, rows]
        total = torch.zeros_like(products[0])
        for index, product in enumerate(products):
            by = scales[:, index]
            total += product.mul_(token_scales[:, index, None] * by if by_group else by)
            if added is not None:
                total += sums[index, :, None] * added[:, index]
        if not by_group:
            total *= token_scales
        out[:, rows] = total if bias is None else total.add_(bias[rows])
    return out


def quantize_activation_blocks(x: Tensor, width: int = ACTIVATION_BLOCK) -> tuple[Tensor, Tensor]:
    """Round x to int8 with one scale per `width` inputs of a token, the last may be fewer.

    (codes int8 [tokens, in], scales f32 [tokens, ceil(in / width)]); each block is rounded as
    `quantize_activations` rounds a token.
    """
    blocks = -(-x.shape[1] // width)
    padded = functional.pad(x.float(), (0, blocks * width - x.shape[1]))
    codes, scales = quantize_activations(padded.view(-1, width))
    return codes.view(padded.shape)[:, : x.shape[1]], scales.view(len(x), blocks)


def linear_int8_blocks(x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """Weights in Packing.BLOCKS times x rounded to int8; products are integers.

    x has a scale per 32 inputs with Activations.INT8_GROUP, which blocks of 32 take, else per 256.

    Of each block of the weight, with the d, e, integer scales and minima of
    `gguf_blocks.Integers` and the scale s of the activations, all products rounded to f32:

        total = total + float(sum over groups of scale * (codes . x)) * (d * s)
        total = total + float(sum over groups of minimum * sum(x)) * (e * s)     where it has e

    Both sums are exact in int32.  Blocks add up in f32 in ascending order; then the bias is added,
    and the result rounded to x.dtype.  So it is defined to the bit, whatever the other tokens are.
    """
    grouped = w.activations is Activations.INT8_GROUP
    width = ACTIVATION_GROUP if grouped else ACTIVATION_BLOCK
    codes, scales = quantize_activation_blocks(x, width)
    shape = BLOCK_SHAPES[w.encoding]
    blocks = w.shape[1] // shape.numbers
    step = torch.arange(blocks, device=x.device) * shape.numbers // width
    scales = scales[:, step].T.contiguous()  # [blocks, tokens]
    # Integers below 2^53 are exact in f64.
    groups = codes.view(len(codes), blocks, shape.numbers // shape.group, shape.group).double()
    sums = groups.sum(-1)  # [tokens, blocks, groups]
    out = x.new_empty(x.shape[0], w.shape[0])
    for rows in _row_chunks(w, 8 * max(w.shape[1], blocks * len(codes))):
        held = _integers_of(w, rows, blocks)
        count = held.codes.shape[0]
        scaled = held.codes.view(count, blocks, -1, shape.group).double()
        scaled = scaled * held.scales[..., None]
        total = x.new_zeros(len(x), count, dtype=torch.float32)
        for block in range(blocks):
            product = groups[:, block].flatten(1) @ scaled[:, block].flatten(1).T
            total += product.float() * (held.d[:, block] * scales[block][:, None])
            if held.minima is not None and held.e is not None:
                added = sums[:, block] @ held.minima[:, block].double().T
                total += added.float() * (held.e[:, block] * scales[block][:, None])
        out[:, rows] = total if bias is None else total.add_(bias[rows])
    return out


def _integers_of(w: WeightTensor, rows: slice, blocks: int) -> Integers:
    """`block_integers` of some rows, each part [rows, blocks, ...]; d and e [rows, blocks]."""
    parts = block_integers(w.encoding, unpack_blocks(w, rows))
    per_row = [None if part is None else part.view(-1, blocks, part.shape[1]) for part in parts]
    found = Integers(*per_row)  # type: ignore[arg-type]
    return found._replace(d=found.d[..., 0], e=None if found.e is None else found.e[..., 0])


def _numbers_of_blocks(w: WeightTensor, rows: slice) -> Tensor:
    """Numbers of some rows in f32, as ggml's dequantisers compute them."""
    found = block_integers(w.encoding, unpack_blocks(w, rows))
    groups = found.codes.view(len(found.codes), found.scales.shape[1], -1).float()
    groups *= (found.d * found.scales)[..., None]
    if found.minima is not None and found.e is not None:
        groups += (found.e * found.minima)[..., None]
    return groups.view(-1, w.shape[1])


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
    tile = max(w.encoding.panel_rows, w.tile[0])
    step = max(tile, round_down(_CHUNK_BYTES // row_bytes, tile))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))

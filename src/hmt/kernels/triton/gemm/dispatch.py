"""Linear layers on the GPU: which kernel multiplies which weight with how many tokens.

Few tokens read the weights once, as they lie.  Many tokens are multiplied by cuBLAS, with weights
brought to their dtype first, or as int8.  With weights of ggml's blocks these are not rounded to
int8: what is multiplied on tensor cores takes them as they are.

Calls allocate results and workspaces, and nothing else: after a first call for each kind of weight
they can be captured in a CUDA graph.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from hmt.base.units import MIB, round_down
from hmt.contracts.encoding import Activations, Encoding, Packing, WeightTensor
from hmt.kernels import reference
from hmt.kernels.reference.packing import integer_scales, minima
from hmt.kernels.triton.elementwise.rope_gate import ACTIVATIONS, gated_pair
from hmt.kernels.triton.gemm import wgmma_launch
from hmt.kernels.triton.gemm.block_dots import BlockTokens, block_tokens
from hmt.kernels.triton.gemm.dequantize import dequantize, dequantize_into, quantize_activations
from hmt.kernels.triton.gemm.gemv_blocks import multiply_blocks, takes_blocks
from hmt.kernels.triton.gemm.gemv_float import multiply_numbers, takes_numbers
from hmt.kernels.triton.gemm.gemv_mma import multiply_mma, take_mma_at_once, takes_mma
from hmt.kernels.triton.gemm.gemv_w4_launch import multiply_one, takes_one_token
from hmt.kernels.triton.gemm.gemv_w8 import takes_one_row
from hmt.kernels.triton.gemm.int8_gemm import is_exact, many_tokens_int8, multiply_exact
from hmt.kernels.triton.gemm.low_rank import add_low_rank
from hmt.kernels.triton.gemm.skinny_launch import (
    are_chunks,
    multiply_chunks,
    multiply_gated,
    multiply_panels,
    multiply_rows,
)
from hmt.kernels.triton.single_tokens import are_single, single_tokens

__all__ = [
    "add_low_rank",
    "dequantize",
    "linear",
    "linear_add",
    "linear_gated",
    "linear_into",
    "linear_many",
    "linear_many_float",
    "quantize_activations",
    "single_tokens",
]

# Up to so many tokens weights are read as they lie; above, cuBLAS multiplies with numbers made of
# them.  Measured on an H200: even at 64 tokens, and at 32 with groups of 16.  In NVFP4 on
# Hopper at 64, too: 28672 rows of 4096 inputs 61 us where it was 151.
_FEW_TOKENS = 64
_FEW_TOKENS_OF_16 = 32
_CHUNK_BYTES = 256 * MIB  # of numbers made of weights at a time
_TENSOR_CORE_FLOATS = (torch.float16, torch.bfloat16)


# Activations rounded to int8: `quantize_activations`, or what the kernels of blocks take.
Rounded = tuple[Tensor, Tensor] | BlockTokens


def linear(x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear`: x [tokens, in] -> [tokens, out] in x.dtype."""
    if _is_plain(x, w) and not (takes_mma(x, w) or takes_numbers(x, w)):
        if one_by_one(x, [w]):
            return torch.cat([reference.linear(row, w, bias) for row in x.split(1)])
        return reference.linear(x, w, bias)
    out = x.new_empty(x.shape[0], w.shape[0])
    _write(out, x, [w], [bias])
    return out


def linear_into(out: Tensor, x: Tensor, w: WeightTensor) -> None:
    """`linear` written to out [tokens, out] of x.dtype, perhaps columns of a larger tensor.

    As a part of a matrix, with the results that `linear_many` has for it and the others at once.
    """
    _write(out, x, [w], [None], chunk=True)


def linear_many(
    x: Tensor,
    params: Mapping[str, WeightTensor],
    names: tuple[str, ...],
    rounded: Rounded | None = None,
) -> Tensor:
    """See `reference.linear_many`: x [tokens, in] -> [tokens, sum of all out] in x.dtype.

    If there are few tokens, up to three 4-bit weights of one encoding are one launch, and so are
    all parts of one matrix of int8.  rounded: what is known of x rounded to int8.
    """
    weights = [params[name] for name in names]
    found = [params.get(f"{name}_bias") for name in names]
    out = x.new_empty(x.shape[0], sum(w.shape[0] for w in weights))
    _write(out, x, weights, [None if bias is None else bias.data for bias in found], rounded)
    return out


def linear_many_float(
    x: Tensor, params: Mapping[str, WeightTensor], names: tuple[str, ...]
) -> Tensor:
    """`linear_many` of weights without biases, its results in f32; for one token in one launch."""
    weights = [params[name] for name in names]
    if one_by_one(x, weights):
        return torch.cat([linear_many_float(row, params, names) for row in x.split(1)])
    whole = len(weights) > 1 and takes_one_row(x, weights[0])
    if whole and are_chunks(weights, [None] * len(weights)):
        rows = sum(w.shape[0] for w in weights)
        out = torch.empty(1, rows, dtype=torch.float32, device=x.device)
        multiply_chunks(out, x, None, weights)
        return out
    return linear_many(x, params, names).float()


def linear_add(total: Tensor, x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> None:
    """Adds `linear(x, w, bias)` to total [tokens, out]: in one launch for few tokens."""
    if total.numel() == 0:
        return
    if one_by_one(x, [w]):
        for own, row in zip(total.split(1), x.split(1), strict=True):
            linear_add(own, row, w, bias)
        return
    if takes_mma(x, w) and total.stride(1) == 1:
        multiply_mma(total, x, [w], [bias], add=True)
        return
    if takes_numbers(x, w) and total.stride(1) == 1:
        multiply_numbers(total, x, w, bias, add=True)
        return
    if takes_blocks(x, w) and x.stride(1) == 1 and total.stride(1) == 1:
        multiply_blocks(total, x, [w], [bias], add=True)
        return
    if _is_plain(x, w) or len(x) > _few(w) or x.stride(1) != 1 or total.stride(1) != 1:
        total += linear(x, w, bias)
        return
    if takes_one_token(x, [w]):
        multiply_one(total, x, [w], [bias], add=True)
        return
    codes, token_scales = x, None
    if w.activations is Activations.INT8_TOKEN:
        codes, token_scales = quantize_activations(x)
    if wgmma_launch.takes_panels(codes, w):
        wgmma_launch.multiply_panels(total, codes, token_scales, [w], [bias], add=True)
    elif _in_panels(w, codes.dtype):
        multiply_panels(total, codes, token_scales, [w], [bias], add=True)
    elif wgmma_launch.takes_rows(codes, w):
        wgmma_launch.multiply_rows(total, codes, token_scales, w, bias, add=True)
    elif _in_rows(w, codes.dtype):
        multiply_rows(total, codes, token_scales, w, bias, add=True)
    else:
        total += linear(x, w, bias)


def linear_gated(
    x: Tensor,
    params: Mapping[str, WeightTensor],
    names: tuple[str, str],
    activation: str,
    rounded: Rounded | None = None,
) -> Tensor:
    """`gated_pair` of `linear_many(x, params, names, rounded)`: in one launch for few tokens."""
    weights = [params[name] for name in names]
    if one_by_one(x, weights):
        rows = [linear_gated(row, params, names, activation) for row in x.split(1)]
        return torch.cat(rows)
    w = weights[0]
    few = 0 < len(x) <= _few(w) and x.stride(1) == 1
    kind = torch.int8 if w.activations is Activations.INT8_TOKEN else x.dtype
    alike = w.shape == weights[1].shape and agree(*weights)
    if alike and takes_blocks(x, w) and activation in ACTIVATIONS:
        out = x.new_empty(x.shape[0], w.shape[0])
        found = [params.get(f"{name}_bias") for name in names]
        biases = [None if bias is None else bias.data for bias in found]
        x = x if x.stride(1) == 1 else x.contiguous()
        tokens = rounded if isinstance(rounded, BlockTokens) else None
        multiply_blocks(out, x, weights, biases, tokens, activation=activation)
        return out
    if not (few and alike and _in_panels(w, kind) and activation in ACTIVATIONS):
        return gated_pair(linear_many(x, params, names, rounded), activation)
    found = [params.get(f"{name}_bias") for name in names]
    biases = [None if bias is None else bias.data for bias in found]
    out = x.new_empty(x.shape[0], w.shape[0])
    if takes_one_token(x, weights, gated=True):
        multiply_one(out, x, weights, biases, activation=activation)
        return out
    codes, token_scales = x, None
    if w.activations is Activations.INT8_TOKEN:
        codes, token_scales = rounded if isinstance(rounded, tuple) else quantize_activations(x)
    if all(wgmma_launch.takes_panels(codes, one) for one in weights):
        wgmma_launch.multiply_panels(
            out, codes, token_scales, weights, biases, activation=activation
        )
    else:
        multiply_gated(out, codes, token_scales, weights, biases, activation)
    return out


def one_by_one(x: Tensor, weights: Sequence[WeightTensor]) -> bool:
    """Whether tokens of x [tokens, in] are multiplied each by itself: see `single_tokens`.

    Not with weights whose kernel for one token takes several, and sums up each as it does one.
    """
    several = are_single() and len(x) > 1
    return several and not all(_takes_several(x, w) for w in weights)


def _takes_several(x: Tensor, w: WeightTensor) -> bool:
    if takes_mma(x, w) or takes_numbers(x, w) or takes_blocks(x, w):
        return True
    row = x[:1]
    gemv = takes_one_token(row, [w]) or takes_one_token(row, [w], gated=True)
    kind = torch.int8 if w.activations is Activations.INT8_TOKEN else x.dtype
    panels_or_rows = _in_panels(w, kind) or _in_rows(w, kind)
    return panels_or_rows and not gemv and not takes_one_row(row, w)


def _write(
    out: Tensor,
    x: Tensor,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    rounded: Rounded | None = None,
    *,
    chunk: bool = False,
) -> None:
    """x times all weights, side by side, to out [tokens, rows of all]."""
    if out.numel() == 0:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    if one_by_one(x, weights):
        for own, row in zip(out.split(1), x.split(1), strict=True):
            _write(own, row, weights, biases, chunk=chunk)
        return
    at = column = 0
    tokens = rounded if isinstance(rounded, BlockTokens) else None
    codes = rounded if isinstance(rounded, tuple) else None
    while at < len(weights):
        w = weights[at]
        count = 1
        blocks = takes_blocks(x, w)
        if on_tensor_cores := take_mma_at_once(x, weights[at:], biases[at:]):
            count = on_tensor_cores
        elif blocks or (len(x) <= _few(w) and _in_panels(w, x.dtype)):
            while count < 3 and at + count < len(weights) and agree(w, weights[at + count]):
                count += 1
        elif (
            len(x) <= _few(w)
            and len(weights) > 1
            and _in_rows(w, x.dtype)
            and are_chunks(weights, biases)
        ):
            count = len(weights)
        rows = sum(one.shape[0] for one in weights[at : at + count])
        part = out[:, column : column + rows]
        some = weights[at : at + count], biases[at : at + count], chunk or len(weights) > 3
        if on_tensor_cores:
            multiply_mma(part, x, *some[:2])
        elif blocks:
            if tokens is None:
                tokens = block_tokens(x, rounded=w.activations.are_integers)
            multiply_blocks(part, x, *some[:2], tokens)
        elif not some[2] and takes_one_token(x, some[0]):
            multiply_one(part, x, *some[:2])
        elif w.activations is Activations.INT8_TOKEN:
            if codes is None:
                codes = quantize_activations(x)
            _multiply_int8(part, x, codes, *some)
        else:
            _multiply_floats(part, x, *some)
        at, column = at + count, column + rows


def _multiply_floats(
    out: Tensor,
    x: Tensor,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    chunk: bool,
) -> None:
    w, bias = weights[0], biases[0]
    if takes_numbers(x, w):
        return multiply_numbers(out, x, w, bias)
    as_it_lies = not _is_plain(x, w) and w.encoding.packing is not Packing.BLOCKS
    if len(x) <= _few(w) and as_it_lies:
        if all(wgmma_launch.takes_panels(x, one) for one in weights):
            return wgmma_launch.multiply_panels(out, x, None, weights, biases, alone=chunk)
        if _in_panels(w, x.dtype):
            return multiply_panels(out, x, None, weights, biases, alone=chunk)
        if wgmma_launch.takes_chunks(x, weights):
            return wgmma_launch.multiply_chunks(out, x, None, weights)
        if len(weights) > 1:
            return multiply_chunks(out, x, None, weights)
        if wgmma_launch.takes_rows(x, w):
            return wgmma_launch.multiply_rows(out, x, None, w, bias, chunk=chunk)
        if _in_rows(w, x.dtype):
            return multiply_rows(out, x, None, w, bias, chunk=chunk)
    step = max(1, _CHUNK_BYTES // (x.element_size() * w.shape[1]))
    step = len(w.data) if _is_plain(x, w) else round_down(step, 16) or 16
    for start in range(0, w.shape[0], step):
        rows = slice(start, min(start + step, w.shape[0]))
        numbers = dequantize(w, x.dtype, rows)
        if bias is None:
            torch.mm(x, numbers.t(), out=out[:, rows])  # in place, also where rows lie apart
        else:
            out[:, rows] = functional.linear(x, numbers, bias[rows].to(x.dtype))
    return None


def _multiply_int8(
    out: Tensor,
    x: Tensor,
    rounded: tuple[Tensor, Tensor],
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    chunk: bool,
) -> None:
    codes, token_scales = rounded
    w, bias = weights[0], biases[0]
    few = len(x) <= _few(w)
    if few and all(wgmma_launch.takes_panels(codes, one) for one in weights):
        wgmma_launch.multiply_panels(out, codes, token_scales, weights, biases, alone=chunk)
    elif few and _in_panels(w, torch.int8):
        multiply_panels(out, codes, token_scales, weights, biases, alone=chunk)
    elif wgmma_launch.takes_chunks(codes, weights):
        wgmma_launch.multiply_chunks(out, codes, token_scales, weights)
    elif len(weights) > 1:
        multiply_chunks(out, codes, token_scales, weights)
    elif few and wgmma_launch.takes_rows(codes, w):
        wgmma_launch.multiply_rows(out, codes, token_scales, w, bias, chunk=chunk)
    elif few and _in_rows(w, torch.int8):
        multiply_rows(out, codes, token_scales, w, bias, chunk=chunk)
    elif is_exact(w):
        multiply_exact(out, codes, token_scales, w, bias)
    elif _has_int8_steps(w):
        _many_int8(out, codes, token_scales, w, bias)
    else:
        # Groups that are neither 16 nor multiples of 32 inputs: no kernel is made for them.
        out.copy_(reference.linear(x, w, bias))


def _many_int8(
    out: Tensor, codes: Tensor, token_scales: Tensor, w: WeightTensor, bias: Tensor | None
) -> None:
    """`many_tokens_int8`, on codes brought to one byte each."""
    rows, columns = w.shape
    everything = slice(0, rows)
    integers = w.data
    if w.encoding.packing is Packing.PANELS:
        integers = torch.empty(rows, columns, dtype=torch.int8, device=codes.device)
        dequantize_into(integers, w)
    scales = integer_scales(w, everything)
    least, added = minima(w, everything), None
    if least is not None:
        sums = codes.view(len(codes), -1, w.group_size).sum(-1, dtype=torch.int32)
        added = sums.float() @ least.t()
    group = 0 if w.encoding is Encoding.INT8_CHANNEL else w.group_size
    sizes = _int8_sizes(len(codes), group)
    grid = (triton.cdiv(len(codes), sizes["TOKENS"]) * triton.cdiv(rows, sizes["ROWS"]),)
    many_tokens_int8[grid](
        out,
        codes,
        token_scales,
        integers,
        scales,
        added,
        bias,
        len(codes),
        rows,
        columns,
        out.stride(0),
        *scales.stride(),
        GROUP=group,
        **{name: size for name, size in sizes.items() if name.isupper()},
        num_warps=sizes["num_warps"],
        num_stages=sizes["num_stages"],
    )


def _int8_sizes(tokens: int, group: int) -> dict[str, int]:
    """Block sizes of `many_tokens_int8`."""
    step = next((size for size in (128, 64, 32) if group % size == 0), 32)
    wide = group == 0
    return {
        "TOKENS": 64 if tokens <= 64 else 128,
        "ROWS": 256 if wide else 64,
        "COLUMNS": step,
        "BAND": 8,
        "num_warps": 8 if wide else 4,
        "num_stages": 3 if wide else 4,
    }


def _few(w: WeightTensor) -> int:
    hopper = w.encoding is Encoding.NVFP4 and wgmma_launch.is_hopper(w.data.device)
    return _FEW_TOKENS_OF_16 if w.group_size == 16 and not hopper else _FEW_TOKENS


def _is_plain(x: Tensor, w: WeightTensor) -> bool:
    return w.encoding.is_float and w.data.dtype == x.dtype


def _in_panels(w: WeightTensor, dtype: torch.dtype) -> bool:
    """True where `few_tokens` multiplies w with activations of `dtype`."""
    if w.activations is Activations.FLOAT and dtype not in _TENSOR_CORE_FLOATS:
        return False
    groups_fit = w.group_size == 16 or w.group_size % 32 == 0
    return w.encoding.packing is Packing.PANELS and groups_fit


def _in_rows(w: WeightTensor, dtype: torch.dtype) -> bool:
    """True where `few_tokens_rows` multiplies w with activations of `dtype`."""
    if dtype not in (*_TENSOR_CORE_FLOATS, torch.int8) or w.encoding.is_float:
        return False
    if w.minima is not None:
        return False
    group = w.tile[1] if w.encoding is Encoding.FP8_BLOCK else w.group_size
    return w.encoding.packing is Packing.ROWS and group % 32 == 0


def _has_int8_steps(w: WeightTensor) -> bool:
    return w.group_size == 16 or w.group_size % 32 == 0


def agree(one: WeightTensor, other: WeightTensor) -> bool:
    """True where both can be multiplied in one launch."""

    def kind(w: WeightTensor) -> tuple[Any, ...]:
        parts = (w.scales, w.zeros, w.minima, w.factor)
        dtypes = tuple(None if part is None else part.dtype for part in parts)
        return (w.encoding, w.shape[1], w.group_size, w.activations, dtypes)

    return kind(one) == kind(other)

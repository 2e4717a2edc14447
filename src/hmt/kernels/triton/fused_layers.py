"""Parts of a decoder layer as few launches, for few tokens: the FFN, and attention's inputs.

A decode step is as long as its launches are many, so what the projections make is worked on where
it is made.  Results are rounded where those of `hmt.kernels.reference.sublayers` are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import Activations, WeightTensor
from hmt.kernels.reference.sublayers import (
    GATE_UP,
    QUERY_KEY_VALUE,
    AttentionInputs,
    FeedForward,
    NormOptions,
)
from hmt.kernels.triton.device_math import rounded
from hmt.kernels.triton.elementwise.norms import (
    add_rms_norm,
    add_rms_norm_quantize,
    rms_norm,
    rms_norm_blocks,
    rms_norm_inplace,
    rms_norm_quantize,
)
from hmt.kernels.triton.elementwise.rope_gate import ACTIVATIONS, rope_inplace
from hmt.kernels.triton.gemm.block_dots import BlockTokens
from hmt.kernels.triton.gemm.dispatch import (
    Rounded,
    agree,
    linear,
    linear_add,
    linear_gated,
    linear_many,
    one_by_one,
)
from hmt.kernels.triton.gemm.gemv_blocks import takes_blocks
from hmt.kernels.triton.gemm.gemv_w4_launch import Norm, Turn, multiply_one, takes_one_token
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin


def feed_forward(
    hidden: Tensor, x: Tensor | None, params: Mapping[str, WeightTensor], layer: FeedForward
) -> None:
    """See `reference.feed_forward`: changes hidden [tokens, width]; of layers that are usual."""
    assert layer.norm is not None
    if one_by_one(hidden, [params[name] for name in (*GATE_UP, "down_proj")]):
        for at, row in enumerate(hidden.split(1)):
            feed_forward(row, None if x is None else x[at : at + 1], params, layer)
        return
    if _is_one_token(hidden, x, params, layer):
        _feed_one_token(hidden, x, params, layer)
        return
    normed, rounded_too = _normed_input(hidden, x, params, layer.norm, GATE_UP)
    inner = linear_gated(normed, params, GATE_UP, layer.activation, rounded_too)
    bias = params.get("down_proj_bias")
    found = None if bias is None else bias.data
    if layer.post_norm is None:
        linear_add(hidden, inner, params["down_proj"], found)
    else:
        out = linear(inner, params["down_proj"], found)
        post, by = layer.post_norm, params["post_norm"].data
        hidden += rms_norm(out, by, post.eps, offset=post.offset)


def _is_one_token(
    hidden: Tensor,
    x: Tensor | None,
    params: Mapping[str, WeightTensor],
    layer: FeedForward,
) -> bool:
    """Whether two launches do: of gate and up, and of what goes down."""
    alike = x is None or (x.dtype == hidden.dtype and x.shape == hidden.shape and x.stride(1) == 1)
    gate, up = (params[name] for name in GATE_UP)
    return (
        layer.post_norm is None
        and alike
        and layer.activation in ACTIVATIONS
        and gate.shape == up.shape
        and takes_one_token(hidden, (gate, up), gated=True)
        and takes_one_token(hidden, (params["down_proj"],))
        and agree(gate, up)
    )


def _feed_one_token(
    hidden: Tensor, x: Tensor | None, params: Mapping[str, WeightTensor], layer: FeedForward
) -> None:
    """hidden + x is computed twice, as no program of the first launch may write what all read."""
    assert layer.norm is not None
    weights = [params[name] for name in GATE_UP]
    biases = [_bias_of(params, name) for name in GATE_UP]
    inner = hidden.new_empty(1, weights[0].shape[0])
    norm = Norm(params["norm"].data, layer.norm)
    multiply_one(inner, hidden, weights, biases, more=x, norm=norm, activation=layer.activation)
    down = params["down_proj"]
    multiply_one(hidden, inner, [down], [_bias_of(params, "down_proj")], more=x, add=True)


def _bias_of(params: Mapping[str, WeightTensor], name: str) -> Tensor | None:
    bias = params.get(f"{name}_bias")
    return None if bias is None else bias.data


def _normed_input(
    hidden: Tensor,
    x: Tensor | None,
    params: Mapping[str, WeightTensor],
    norm: NormOptions,
    names: Sequence[str],
) -> tuple[Tensor, Rounded | None]:
    """The norm of hidden += x, and it rounded to int8 where weights `names` want that."""
    by, eps, offset = params["norm"].data, norm.eps, norm.offset
    if all(
        takes_blocks(hidden, w) and w.activations.are_integers for w in (params[n] for n in names)
    ):
        given, residual = (hidden, None) if x is None else (x, hidden)
        made = rms_norm_blocks(given, by, eps, offset=offset, residual=residual)
        if made is not None:
            return made[0], BlockTokens(*made[1:], rounded=True)
    int8 = any(params[name].activations is Activations.INT8_TOKEN for name in names)
    if int8 and hidden.shape[1] % 64 == 0:  # so that codes are not padded
        if x is None:
            normed, codes, scales, _ = rms_norm_quantize(hidden, by, eps, offset=offset)
        else:
            normed, codes, scales, _ = add_rms_norm_quantize(hidden, x, by, eps, offset=offset)
        return normed, (codes, scales)
    if x is None:
        return rms_norm(hidden, by, eps, offset=offset), None
    return add_rms_norm(hidden, x, by, eps, offset=offset), None


def attention_inputs(
    hidden: Tensor,
    params: Mapping[str, WeightTensor],
    layer: AttentionInputs,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """See `reference.attention_inputs`: [tokens, heads + 2 * kv_heads, head_dim]."""
    weights = [params[name] for name in QUERY_KEY_VALUE]
    if one_by_one(hidden, weights):
        rows = zip(hidden.split(1), cos.split(1), sin.split(1), strict=True)
        return torch.cat([attention_inputs(row, params, layer, *turn) for row, *turn in rows])
    if takes_one_token(hidden, weights) and agree(*weights[:2]) and agree(*weights[1:]):
        biases = [_bias_of(params, name) for name in QUERY_KEY_VALUE]
        heads = hidden.new_empty(1, sum(w.shape[0] for w in weights))
        turn = _turn_of(layer, cos, sin)
        norm = Norm(params["norm"].data, layer.norm)
        multiply_one(heads, hidden, weights, biases, norm=norm, turn=turn)
        heads = heads.unflatten(1, (-1, layer.head_dim))
        if turn is not None:
            return heads
    else:
        x, rounded_too = _normed_input(hidden, None, params, layer.norm, QUERY_KEY_VALUE)
        heads = linear_many(x, params, QUERY_KEY_VALUE, rounded_too)
        heads = heads.unflatten(1, (-1, layer.head_dim))
    turned = layer.heads + layer.kv_heads
    query, key = heads[:, : layer.heads], heads[:, layer.heads : turned]
    if layer.head_norm is None:
        rope_inplace(query, key, cos, sin)
        return heads
    by = params["q_norm"].data, params["k_norm"].data
    half = cos.shape[-1] // 2
    powers = all(n & (n - 1) == 0 and n > 0 for n in (layer.head_dim, half))
    if powers and layer.head_dim <= 1024 and cos.stride() == sin.stride() and cos.stride(-1) == 1:
        _norm_rope(heads, layer.heads, turned, *by, cos, sin, layer.head_norm)
        return heads
    eps, offset = layer.head_norm.eps, layer.head_norm.offset
    rms_norm_inplace(query, by[0], eps, offset=offset)
    rms_norm_inplace(key, by[1], eps, offset=offset)
    rope_inplace(query, key, cos, sin)
    return heads


def _turn_of(layer: AttentionInputs, cos: Tensor, sin: Tensor) -> Turn | None:
    """Rotary positions, where all of a head is rotated, and nothing is done to it before."""
    whole = cos.shape[-1] == layer.head_dim and layer.head_dim % 32 == 0
    if layer.head_norm is None and whole and cos.stride(-1) == sin.stride(-1) == 1:
        return Turn(cos, sin)
    return None


def _norm_rope(
    heads: Tensor,
    queries: int,
    turned: int,
    query_norm: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: NormOptions,
) -> None:
    """Norms and turns the first `turned` heads of heads [tokens, all heads, dim], in place."""
    if len(heads) == 0:
        return
    options: dict[str, Any] = dependent(heads.device)
    _norm_rope_kernel[(len(heads), turned)](
        heads, query_norm.contiguous(), key_norm.contiguous(), cos, sin,
        queries, heads.stride(0), heads.stride(1), cos.stride(0), norm.eps, norm.offset,
        DIM=heads.shape[2], HALF=cos.shape[-1] // 2, GEMMA=norm.offset != 0,
        num_warps=1, enable_fp_fusion=False, **options,
    )  # fmt: skip


@triton.jit
def _norm_rope_kernel(
    heads, query_norm, key_norm, cos, sin,
    queries, token_stride, head_stride, angle_stride, eps, offset,
    DIM: tl.constexpr, HALF: tl.constexpr, GEMMA: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: tokens; axis 1: heads.

    Numbers behind those that are turned are normed only.
    """
    next_may_begin(DEPENDENT)
    kind: tl.constexpr = heads.dtype.element_ty
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = heads + token * token_stride + head * head_stride
    norm = query_norm
    if head >= queries:
        norm = key_norm
    pair = tl.arange(0, HALF)
    at = tl.arange(0, DIM)
    inputs_are_there(DEPENDENT)
    all_values = tl.load(here + at).to(tl.float32)
    first = tl.load(here + pair).to(tl.float32)
    second = tl.load(here + HALF + pair).to(tl.float32)
    by_cos = rounded(tl.load(cos + token * angle_stride + pair).to(tl.float32), kind)
    by_sin = rounded(tl.load(sin + token * angle_stride + pair).to(tl.float32), kind)
    factor = tl.rsqrt(tl.sum(all_values * all_values, 0) / DIM + eps)
    rest = _normed(all_values, factor, norm + at, offset, kind, GEMMA)
    first = _normed(first, factor, norm + pair, offset, kind, GEMMA)
    second = _normed(second, factor, norm + HALF + pair, offset, kind, GEMMA)
    one = rounded(first * by_cos, kind) - rounded(second * by_sin, kind)
    two = rounded(second * by_cos, kind) + rounded(first * by_sin, kind)
    tl.debug_barrier()  # lanes that store are not those that loaded
    tl.store(here + pair, one.to(kind))
    tl.store(here + HALF + pair, two.to(kind))
    if DIM > 2 * HALF:
        tl.store(here + at, rest.to(kind), mask=at >= 2 * HALF)


@triton.jit
def _normed(values, factor, weight, offset, kind: tl.constexpr, GEMMA: tl.constexpr):
    by = tl.load(weight).to(tl.float32)
    if GEMMA:
        out = rounded(values * factor * (offset + by), kind)
    else:
        out = rounded(rounded(values * factor, kind) * rounded(by, kind), kind)
    return out

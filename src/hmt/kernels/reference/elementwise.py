"""Norm, rotary embedding and gated activation, rounding where transformers rounds."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hmt.base.errors import ConfigError
from hmt.kernels.reference.matmul import quantize_activations

_LIMIT, _SLOPE = 7.0, 1.702
_SILU_LIMIT = 10.0  # of DeepSeek-V4


def _clamped_swish(x: Tensor) -> Tensor:
    """gpt-oss: y sigmoid(1.702 y), where y is x, at most 7."""
    y = x.float().clamp(max=_LIMIT)
    return (y * torch.sigmoid(_SLOPE * y)).to(x.dtype)


def _clamped_silu(x: Tensor) -> Tensor:
    """DeepSeek-V4: silu of x, at most 10."""
    return functional.silu(x.clamp(max=_SILU_LIMIT))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "clamped_swish": _clamped_swish,
    "clamped_silu": _clamped_silu,
    "relu": functional.relu,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """x [..., width] divided by its root mean square, times weight [width]; result in x.dtype.

    The norm is computed in f32.  With offset 0 it is rounded to x.dtype before the weight is
    applied (Llama); otherwise multiplied with (offset + weight) in f32 and rounded last (Gemma).
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset == 0:
        return weight.to(x.dtype) * normed.to(x.dtype)
    return (normed * (offset + weight.float())).to(x.dtype)


def rms_norm_inplace(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> None:
    """`rms_norm` written over x, which may be a part of a larger tensor."""
    x.copy_(rms_norm(x, weight, eps, offset=offset))


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> Tensor:
    """Adds x to `residual`, in place and rounded to its dtype, and returns the sum's `rms_norm`."""
    residual += x
    return rms_norm(residual, weight, eps, offset=offset)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rms_norm` of x [tokens, width], and its `quantize_activations`, padded as kernels want it.

    Returns the norm [tokens, width] in x.dtype; codes int8 [tokens, stride], where stride is the
    next multiple of 64 and what lies beyond the width is 0; scales f32 [tokens]; and the sum of
    each 16 codes, int32 [tokens, stride / 16].
    """
    normed = rms_norm(x, weight, eps, offset=offset)
    codes, scales = quantize_activations(normed)
    codes = functional.pad(codes, (0, -codes.shape[1] % 64))
    return normed, codes, scales, codes.unflatten(1, (-1, 16)).sum(-1, dtype=torch.int32)


def add_rms_norm_quantize(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Adds x to `residual`, in place, and returns the sum's `rms_norm_quantize`."""
    residual += x
    return rms_norm_quantize(residual, weight, eps, offset=offset)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first `rot` numbers of every head of x [tokens, heads, dim] (arXiv 2104.09864).

    cos and sin are [tokens, rot] with each angle twice, as [angles, angles].  Pairs are (i,
    i + rot / 2), or (2i, 2i + 1) when interleaved; then the result has the first numbers of all
    pairs before the second ones, as DeepSeek-V3 in transformers.  Computed in x.dtype.
    """
    rot = cos.shape[-1]
    half = rot // 2
    cos = cos[:, None, :half].to(x.dtype)
    sin = sin[:, None, :half].to(x.dtype)
    turning = x[..., :rot]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, x[..., rot:]), dim=-1)


def rope_inplace(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> None:
    """`rope` of queries and keys, written over them; both may be parts of a larger tensor."""
    q.copy_(rope(q, cos, sin, interleaved=interleaved))
    k.copy_(rope(k, cos, sin, interleaved=interleaved))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), in f32, the same for a number wherever it stands.

    torch.sigmoid computes the end of a tensor, behind the last whole vector, by other code, which
    rounds otherwise: a token's result would depend on how many others are computed with it.
    """
    return 1 / (1 + torch.exp(-x.float().contiguous()))


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x [tokens, width] times the sigmoid of `gate` [tokens, width or 1], rounded to x.dtype."""
    return x * sigmoid(gate).to(x.dtype)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, elementwise, in their dtype.

    `activation` is "silu", "gelu", "gelu_tanh", "relu", or one that bounds `up`, too: to -7 and 7
    "clamped_swish", which then adds 1, to -10 and 10 "clamped_silu".  ConfigError for anything
    else.
    """
    try:
        function = _ACTIVATIONS[activation]
    except KeyError:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"activation {activation!r} is unknown; HMT has {known}") from None
    if function is _clamped_swish:
        up = up.clamp(-_LIMIT, _LIMIT) + 1
    elif function is _clamped_silu:
        up = up.clamp(-_SILU_LIMIT, _SILU_LIMIT)
    return function(gate) * up


def gated_pair(gate_up: Tensor, activation: str) -> Tensor:
    """`gated` of the two halves of gate_up [tokens, 2 * width]: [tokens, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gated(gate, up, activation)

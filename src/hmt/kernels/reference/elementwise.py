"""Norm, rotary embedding and gated activation, rounding where transformers rounds."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hmt.base.errors import ConfigError

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
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


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, elementwise, in their dtype.

    `activation` is "silu", "gelu" or "gelu_tanh"; ConfigError for anything else.
    """
    try:
        function = _ACTIVATIONS[activation]
    except KeyError:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"activation {activation!r} is unknown; HMT has {known}") from None
    return function(gate) * up

"""The operations that layers are made of, each on the fastest kernel that this machine has.

Shapes, dtypes and rounding are those of `hmt.kernels.reference`, where each operation is
described.  `hmt.kernels.cpu.matmul` says where the compiled kernels round differently.
"""

from types import ModuleType

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels import reference
from hmt.kernels.cpu import elementwise, extension, matmul, routing, sampling
from hmt.kernels.reference import (
    ATTENTION_WORKSPACE_BYTES,
    Survey,
    attention,
    attention_output,
    merge_attention,
)

__all__ = [
    "ATTENTION_WORKSPACE_BYTES",
    "Survey",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "attention",
    "attention_output",
    "biased_sigmoid_topk",
    "dequantize",
    "draw",
    "gated",
    "gated_pair",
    "grouped_softmax_topk",
    "largest",
    "linear",
    "merge_attention",
    "quantize_activations",
    "rms_norm",
    "rms_norm_inplace",
    "rms_norm_quantize",
    "rope",
    "rope_inplace",
    "softmax_topk",
    "survey",
]


def linear(x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear`: x [tokens, in] -> [tokens, out] in x.dtype."""
    native = _native_for(x)
    if native is None:
        return reference.linear(x, w, bias)
    return matmul.linear(native, x, w, bias)


def dequantize(w: WeightTensor, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
    """See `reference.dequantize`: [rows, in] in `dtype`."""
    native = _native_for(w.data)
    if native is None:
        return reference.dequantize(w, dtype, rows)
    return matmul.dequantize(native, w, dtype, rows)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_activations`: (int8 [tokens, in], f32 [tokens])."""
    native = _native_for(x)
    if native is None:
        return reference.quantize_activations(x)
    return matmul.quantize_activations(native, x)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """See `reference.rms_norm`: x [..., width] normed, in x.dtype."""
    native = _native_for(x)
    if native is None:
        return reference.rms_norm(x, weight, eps, offset=offset)
    return elementwise.rms_norm(native, x, weight, eps, offset)


def rms_norm_inplace(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> None:
    """See `reference.rms_norm_inplace`: changes x [tokens, width] or [tokens, heads, dim]."""
    native = _native_for(x)
    if native is None:
        return reference.rms_norm_inplace(x, weight, eps, offset=offset)
    return elementwise.rms_norm_inplace(native, x, weight, eps, offset)


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> Tensor:
    """See `reference.add_rms_norm`: changes `residual`, returns its norm."""
    native = _native_for(x)
    if native is None:
        return reference.add_rms_norm(residual, x, weight, eps, offset=offset)
    return elementwise.add_rms_norm(native, residual, x, weight, eps, offset)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.rms_norm_quantize`: the norm, its codes, scales and sums of codes."""
    native = _native_for(x)
    if native is None:
        return reference.rms_norm_quantize(x, weight, eps, offset=offset)
    return elementwise.rms_norm_quantize(native, x, weight, eps, offset)


def add_rms_norm_quantize(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.add_rms_norm_quantize`: changes `residual`."""
    native = _native_for(x)
    if native is None:
        return reference.add_rms_norm_quantize(residual, x, weight, eps, offset=offset)
    return elementwise.rms_norm_quantize(native, x, weight, eps, offset, residual)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """See `reference.rope`: x [tokens, heads, dim] turned, in x.dtype."""
    native = _native_for(x)
    if native is None:
        return reference.rope(x, cos, sin, interleaved=interleaved)
    return elementwise.rope(native, x, cos, sin, interleaved)


def rope_inplace(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> None:
    """See `reference.rope_inplace`: changes q and k, both [tokens, heads, dim]."""
    native = _native_for(q)
    if native is None:
        return reference.rope_inplace(q, k, cos, sin, interleaved=interleaved)
    return elementwise.rope_inplace(native, q, k, cos, sin, interleaved)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See `reference.gated`: activation(gate) * up, in their dtype."""
    native = _native_for(gate)
    if native is None:
        return reference.gated(gate, up, activation)
    return elementwise.gated(native, gate, up, activation)


def gated_pair(gate_up: Tensor, activation: str) -> Tensor:
    """See `reference.gated_pair`: gate_up [tokens, 2 * width] to [tokens, width]."""
    native = _native_for(gate_up)
    if native is None:
        return reference.gated_pair(gate_up, activation)
    return elementwise.gated_pair(native, gate_up, activation)


def softmax_topk(logits: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See `reference.softmax_topk`: experts and scales [tokens, k]."""
    native = _native_for(logits)
    if native is None or not routing.can_route(logits, k, 1, 1):
        return reference.softmax_topk(logits, k, renormalise=renormalise)
    return routing.route(native, logits, None, k, 1, 1, renormalise, 1.0)


def grouped_softmax_topk(
    logits: Tensor, k: int, *, groups: int, kept_groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See `reference.grouped_softmax_topk`: experts and scales [tokens, k]."""
    native = _native_for(logits)
    if native is None or not routing.can_route(logits, k, groups, kept_groups):
        return reference.grouped_softmax_topk(
            logits, k, groups=groups, kept_groups=kept_groups, scale=scale
        )
    return routing.route(native, logits, None, k, groups, kept_groups, False, scale)


def biased_sigmoid_topk(
    logits: Tensor,
    bias: Tensor,
    k: int,
    *,
    groups: int,
    kept_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `reference.biased_sigmoid_topk`: experts and scales [tokens, k]."""
    native = _native_for(logits)
    if native is None or not routing.can_route(logits, k, groups, kept_groups):
        return reference.biased_sigmoid_topk(
            logits,
            bias,
            k,
            groups=groups,
            kept_groups=kept_groups,
            renormalise=renormalise,
            scale=scale,
        )
    bias = bias.float().contiguous()
    return routing.route(native, logits, bias, k, groups, kept_groups, renormalise, scale)


def survey(logits: Tensor) -> Survey:
    """See `reference.survey`: what one look at logits [vocab] tells."""
    native = _native_for(logits)
    return reference.survey(logits) if native is None else sampling.survey(native, logits)


def draw(
    scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """See `reference.draw`: a token by scores [vocab]."""
    native = _native_for(scores)
    if native is None:
        return reference.draw(scores, temperature, top_k, top_p, min_p, uniform)
    return sampling.draw(native, scores, temperature, top_k, top_p, min_p, uniform)


def largest(scores: Tensor, count: int) -> Tensor:
    """See `reference.largest`: ids of the largest scores [vocab]."""
    native = _native_for(scores)
    if native is None:
        return reference.largest(scores, count)
    return sampling.largest(native, scores, count)


def _native_for(tensor: Tensor) -> ModuleType | None:
    return extension.load() if tensor.is_cpu else None

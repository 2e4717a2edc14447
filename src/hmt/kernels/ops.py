"""The operations that layers are made of, each on the fastest kernel that this machine has.

Shapes, dtypes and rounding are those of `hmt.kernels.reference`, where each operation is
described.  `hmt.kernels.cpu.linear` says where the compiled kernels round differently.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels import reference
from hmt.kernels.cpu import experts as cpu_experts
from hmt.kernels.cpu import extension
from hmt.kernels.cpu import linear as cpu_linear
from hmt.kernels.reference import (
    ATTENTION_WORKSPACE_BYTES,
    Expert,
    attention,
    attention_output,
    gated,
    merge_attention,
    rms_norm,
    rope,
)

__all__ = [
    "ATTENTION_WORKSPACE_BYTES",
    "Expert",
    "attention",
    "attention_output",
    "dequantize",
    "experts",
    "gated",
    "linear",
    "linear_many",
    "merge_attention",
    "quantize_activations",
    "rms_norm",
    "rope",
]


def linear(x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear`: x [tokens, in] -> [tokens, out] in x.dtype."""
    native = _native_for(x)
    if native is None:
        return reference.linear(x, w, bias)
    return cpu_linear.linear(native, x, w, bias)


def linear_many(
    x: Tensor, weights: Sequence[WeightTensor], biases: Sequence[Tensor | None]
) -> Tensor:
    """See `reference.linear_many`: x [tokens, in] -> [tokens, sum of all out] in x.dtype."""
    native = _native_for(x)
    if native is None:
        return reference.linear_many(x, weights, biases)
    return cpu_linear.linear_many(native, x, weights, biases)


def dequantize(w: WeightTensor, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
    """See `reference.dequantize`: [rows, in] in `dtype`."""
    native = _native_for(w.data)
    if native is None:
        return reference.dequantize(w, dtype, rows)
    return cpu_linear.dequantize(native, w, dtype, rows)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_activations`: (int8 [tokens, in], f32 [tokens])."""
    native = _native_for(x)
    if native is None:
        return reference.quantize_activations(x)
    return cpu_linear.quantize_activations(native, x)


def experts(
    x: Tensor,
    given: Sequence[Expert],
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    total: Tensor | None = None,
    *,
    last: bool = True,
) -> Tensor:
    """See `reference.experts`: the sum of scaled outputs, [tokens, out]."""
    native = _native_for(x)
    if native is None:
        return reference.experts(x, given, chosen, scales, activation, total, last=last)
    out = cpu_experts.experts(native, x, given, chosen, scales, activation, total, last=last)
    if out is not None:
        return out
    return reference.experts(
        x, given, chosen, scales, activation, total, last=last, linear=linear, gated=gated
    )


def _native_for(tensor: Tensor) -> ModuleType | None:
    return extension.load() if tensor.device.type == "cpu" else None

"""Every operation in plain torch, on any device: what the other kernels are tested against."""

from hmt.kernels.reference.attend import (
    ATTENTION_WORKSPACE_BYTES,
    attention,
    attention_output,
    merge_attention,
)
from hmt.kernels.reference.elementwise import (
    add_rms_norm,
    add_rms_norm_quantize,
    gated,
    gated_pair,
    rms_norm,
    rms_norm_inplace,
    rms_norm_quantize,
    rope,
    rope_inplace,
)
from hmt.kernels.reference.experts import Expert, experts
from hmt.kernels.reference.matmul import (
    dequantize,
    linear,
    linear_by_chunks,
    linear_many,
    quantize_activations,
)

__all__ = [
    "ATTENTION_WORKSPACE_BYTES",
    "Expert",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "attention",
    "attention_output",
    "dequantize",
    "experts",
    "gated",
    "gated_pair",
    "linear",
    "linear_by_chunks",
    "linear_many",
    "merge_attention",
    "quantize_activations",
    "rms_norm",
    "rms_norm_inplace",
    "rms_norm_quantize",
    "rope",
    "rope_inplace",
]

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
from hmt.kernels.reference.matmul import (
    dequantize,
    linear,
    linear_by_chunks,
    quantize_activations,
)
from hmt.kernels.reference.routing import (
    biased_sigmoid_topk,
    grouped_softmax_topk,
    softmax_topk,
)
from hmt.kernels.reference.sampling import Survey, draw, largest, support, survey

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
    "linear_by_chunks",
    "merge_attention",
    "quantize_activations",
    "rms_norm",
    "rms_norm_inplace",
    "rms_norm_quantize",
    "rope",
    "rope_inplace",
    "softmax_topk",
    "support",
    "survey",
]

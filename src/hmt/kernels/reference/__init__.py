"""Every operation in plain torch, on any device: what the other kernels are tested against."""

from hmt.kernels.reference.attend import (
    ATTENTION_WORKSPACE_BYTES,
    attention,
    attention_output,
    merge_attention,
    paged_attention,
    paged_attention_output,
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
from hmt.kernels.reference.pages import (
    PagedRun,
    PagedRuns,
    PageEncoding,
    PageLayout,
    Pages,
    append_pages,
    encode_rows,
    read_pages,
)
from hmt.kernels.reference.routing import (
    biased_sigmoid_topk,
    grouped_softmax_topk,
    softmax_topk,
)
from hmt.kernels.reference.sampling import Survey, draw, largest, support, survey
from hmt.kernels.reference.sublayers import (
    AttentionInputs,
    FeedForward,
    NormOptions,
    attention_inputs,
    feed_forward,
)

__all__ = [
    "ATTENTION_WORKSPACE_BYTES",
    "AttentionInputs",
    "Expert",
    "FeedForward",
    "NormOptions",
    "PageEncoding",
    "PageLayout",
    "PagedRun",
    "PagedRuns",
    "Pages",
    "Survey",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "append_pages",
    "attention",
    "attention_inputs",
    "attention_output",
    "biased_sigmoid_topk",
    "dequantize",
    "draw",
    "encode_rows",
    "experts",
    "feed_forward",
    "gated",
    "gated_pair",
    "grouped_softmax_topk",
    "largest",
    "linear",
    "linear_by_chunks",
    "linear_many",
    "merge_attention",
    "paged_attention",
    "paged_attention_output",
    "quantize_activations",
    "read_pages",
    "rms_norm",
    "rms_norm_inplace",
    "rms_norm_quantize",
    "rope",
    "rope_inplace",
    "softmax_topk",
    "support",
    "survey",
]

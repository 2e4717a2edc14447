"""Every operation of `hmt.kernels.reference` for CUDA tensors: a kernel, or plain torch.

Plain torch are chains of the others, and what a step does not wait for.
"""

from hmt.kernels.reference import draw, largest
from hmt.kernels.triton.attention.append import append_pages
from hmt.kernels.triton.attention.combine_host_part import join
from hmt.kernels.triton.attention.metadata import fixed_runs, update_runs
from hmt.kernels.triton.attention.mla_layer import add_latent_attention
from hmt.kernels.triton.attention.paged import (
    append_attend_pages,
    attend_part,
    attention,
    paged_attention,
    paged_attention_output,
)
from hmt.kernels.triton.elementwise.embedding import code_rows_at, rows_at
from hmt.kernels.triton.elementwise.norms import (
    add_rms_norm,
    add_rms_norm_quantize,
    rms_norm,
    rms_norm_inplace,
    rms_norm_quantize,
)
from hmt.kernels.triton.elementwise.rope_gate import gated, gated_pair, rope, rope_inplace
from hmt.kernels.triton.elementwise.sampling import greedy, logit_stats, survey_rows
from hmt.kernels.triton.fused_layers import attention_inputs, feed_forward
from hmt.kernels.triton.gemm.dequantize import dequantize, quantize_activations
from hmt.kernels.triton.gemm.dispatch import (
    linear,
    linear_gated,
    linear_into,
    linear_many,
    linear_many_float,
)
from hmt.kernels.triton.moe.moe_dispatch import experts, experts_by_table
from hmt.kernels.triton.moe.router import biased_sigmoid_topk, grouped_softmax_topk, softmax_topk
from hmt.kernels.triton.moe.router_norm import router_inputs
from hmt.kernels.triton.transfer.kv_repack import (
    can_rewrite,
    fetch_layer,
    fetch_pages,
    fetch_rows,
    send_pages,
)

__all__ = [
    "add_latent_attention",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "append_attend_pages",
    "append_pages",
    "attend_part",
    "attention",
    "attention_inputs",
    "biased_sigmoid_topk",
    "can_rewrite",
    "code_rows_at",
    "dequantize",
    "draw",
    "experts",
    "experts_by_table",
    "feed_forward",
    "fetch_layer",
    "fetch_pages",
    "fetch_rows",
    "fixed_runs",
    "gated",
    "gated_pair",
    "greedy",
    "grouped_softmax_topk",
    "join",
    "largest",
    "linear",
    "linear_gated",
    "linear_into",
    "linear_many",
    "linear_many_float",
    "logit_stats",
    "paged_attention",
    "paged_attention_output",
    "quantize_activations",
    "rms_norm",
    "rms_norm_inplace",
    "rms_norm_quantize",
    "rope",
    "rope_inplace",
    "router_inputs",
    "rows_at",
    "send_pages",
    "softmax_topk",
    "survey_rows",
    "update_runs",
]

"""Every operation of `hmt.kernels.reference` for CUDA tensors: a kernel, or plain torch.

Plain torch are chains of the others, and what a step does not wait for.
"""

from hmt.kernels.reference import draw, largest
from hmt.kernels.triton.attention.append import append_pages
from hmt.kernels.triton.attention.combine_host_part import join as combine_parts
from hmt.kernels.triton.attention.index_selection import index_topk, paged_index_topk
from hmt.kernels.triton.attention.metadata import fixed_runs, update_runs
from hmt.kernels.triton.attention.mla_layer import add_latent_attention, head_products
from hmt.kernels.triton.attention.paged import (
    append_attend_pages,
    attend_part,
    attention,
    paged_attention,
    paged_attention_output,
)
from hmt.kernels.triton.elementwise.embedding import rows_at
from hmt.kernels.triton.elementwise.norms import (
    add_rms_norm,
    add_rms_norm_quantize,
    rms_norm,
    rms_norm_inplace,
    rms_norm_quantize,
)
from hmt.kernels.triton.elementwise.rope_gate import (
    gated,
    gated_pair,
    rope,
    rope_inplace,
    sigmoid_gated,
)
from hmt.kernels.triton.elementwise.sampling import greedy, logit_stats
from hmt.kernels.triton.elementwise.sampling import survey_rows as logit_stats_of
from hmt.kernels.triton.fused_layers import attention_inputs, feed_forward
from hmt.kernels.triton.gemm.code_rows import code_rows_at
from hmt.kernels.triton.gemm.dequantize import dequantize, quantize_activations
from hmt.kernels.triton.gemm.dispatch import (
    add_low_rank,
    linear,
    linear_gated,
    linear_into,
    linear_many,
    linear_many_float,
    single_tokens,
)
from hmt.kernels.triton.moe import (
    Mailbox,
    biased_sigmoid_topk,
    block_table,
    divide_experts,
    experts,
    experts_by_table,
    fetch_experts,
    grouped_softmax_topk,
    router_inputs,
    scattered_experts,
    softmax_topk,
)
from hmt.kernels.triton.moe import ask as ask_host
from hmt.kernels.triton.moe import take as take_from_host
from hmt.kernels.triton.recurrent import (
    causal_conv,
    fixed_state_runs,
    gated_delta_rule,
    selective_scan,
    state_space_scan,
    time_steps,
    update_state_runs,
)
from hmt.kernels.triton.transfer import (
    can_copy_pages,
    copy_pairs,
    fetch_layer,
    fetch_pages,
    fetch_rows,
    send_pages,
)

__all__ = [
    "Mailbox",
    "add_latent_attention",
    "add_low_rank",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "append_attend_pages",
    "append_pages",
    "ask_host",
    "attend_part",
    "attention",
    "attention_inputs",
    "biased_sigmoid_topk",
    "block_table",
    "can_copy_pages",
    "causal_conv",
    "code_rows_at",
    "combine_parts",
    "copy_pairs",
    "dequantize",
    "divide_experts",
    "draw",
    "experts",
    "experts_by_table",
    "feed_forward",
    "fetch_experts",
    "fetch_layer",
    "fetch_pages",
    "fetch_rows",
    "fixed_runs",
    "fixed_state_runs",
    "gated",
    "gated_delta_rule",
    "gated_pair",
    "greedy",
    "grouped_softmax_topk",
    "head_products",
    "index_topk",
    "largest",
    "linear",
    "linear_gated",
    "linear_into",
    "linear_many",
    "linear_many_float",
    "logit_stats",
    "logit_stats_of",
    "paged_attention",
    "paged_attention_output",
    "paged_index_topk",
    "quantize_activations",
    "rms_norm",
    "rms_norm_inplace",
    "rms_norm_quantize",
    "rope",
    "rope_inplace",
    "router_inputs",
    "rows_at",
    "scattered_experts",
    "selective_scan",
    "send_pages",
    "sigmoid_gated",
    "single_tokens",
    "softmax_topk",
    "state_space_scan",
    "take_from_host",
    "time_steps",
    "update_runs",
    "update_state_runs",
]

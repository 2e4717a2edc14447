"""Routed experts on the GPU; `moe_dispatch.py` chooses the kernel.

Pairs are of a token and an expert that it has chosen, for each expert that is chosen at all, if all
are as likely; limits by encoding stand in `moe_dispatch.py`.

pairs per expert  weights                              architecture  kernel
up to 1.1 or 1.4  as grouped_wgmma's                   Hopper        moe_gemv.py
up to 2.6 to 8    all others                           all           moe_gemv.py, a pair by itself
more              4 bits without offsets or biases,    Hopper        grouped_wgmma.py, by
                  bf16 x                                             grouped_wgmma_launch.py
up to 1.1 or 1.4  ggml's blocks                        all           block_experts.py
more              ggml's blocks                        all           unpacked_experts.py
more              all others                           all           grouped_gemm.py

Before and after the experts:

what                                     tokens    kernel
norm and router's logits in one launch   few       router_norm.py; more: norms, then a product
choice of experts                        all       router.py
tokens sorted by expert, results added   tiles     permute.py
which experts the link brings            all       expert_cache.py
questions to the CPU and its answers     all       host_mailbox.py

weight_table.py tells kernels where experts lie, matrix_format.py what they are compiled for.
moe_gemv_dots.py and biases.py are parts of these kernels.
"""

from hmt.kernels.triton.moe.expert_cache import divide_experts, fetch_experts
from hmt.kernels.triton.moe.host_mailbox import Mailbox, ask, take
from hmt.kernels.triton.moe.moe_dispatch import (
    block_table,
    experts,
    experts_by_table,
    scattered_experts,
)
from hmt.kernels.triton.moe.router import biased_sigmoid_topk, grouped_softmax_topk, softmax_topk
from hmt.kernels.triton.moe.router_norm import router_inputs

__all__ = [
    "Mailbox",
    "ask",
    "biased_sigmoid_topk",
    "block_table",
    "divide_experts",
    "experts",
    "experts_by_table",
    "fetch_experts",
    "grouped_softmax_topk",
    "router_inputs",
    "scattered_experts",
    "softmax_topk",
    "take",
]

"""Routed experts on the GPU; `moe_dispatch` chooses the kernel.

pairs per expert   weights              architecture   kernel
few                all                  all            moe_gemv, each pair by itself
some               4 bits in panels     Hopper         grouped_wgmma
many               all                  all            grouped_gemm, tokens sorted by `permute`
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

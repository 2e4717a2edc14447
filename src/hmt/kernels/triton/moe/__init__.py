"""Routed experts on the GPU; `moe_dispatch` chooses the kernel.

pairs per expert   weights              architecture   kernel
few                all                  all            moe_gemv, each pair by itself
some               4 bits in panels     Hopper         grouped_wgmma
many               all                  all            grouped_gemm, tokens sorted by `permute`
"""

"""Products with weights on the GPU; `dispatch` chooses the kernel.

tokens        weights                 architecture   kernel
1             4 bits in panels        Hopper         gemv_w4 (Gluon), launched by gemv_w4_launch
1             int8 in rows            all            gemv_w8
1             bf16, f16, f32, FP8     all            gemv_float
1 to 32       ggml's blocks           all            gemv_blocks, with block_codes and block_dots
2 to 32       4 bits in panels        all            skinny_w4, launched by skinny_launch
2 to 32       int8 in rows            all            skinny_w8, launched by skinny_launch
several       4 bits in panels        Hopper         wgmma_w4 (Gluon), launched by wgmma_launch
several       int8, e4m3, f16 rows    Hopper         wgmma_w8 (Gluon), launched by wgmma_launch
many          int8 activations        all            int8_gemm
many          others                  all            dequantize, then the product of torch
"""

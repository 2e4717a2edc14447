"""Products with weights on the GPU; `dispatch.py` chooses the kernel.

The first line that fits counts.  "4 bits" are int4, NVFP4 and MXFP4 in panels; "few" are up to 64
tokens, and up to 32 with groups of 16 (NVFP4 on Hopper: 64).  A8 stands for int8 activations.

tokens      weights (and activations)            architecture  kernel
1           4 bits, bf16 x or A8                 Hopper        gemv_w4.py, by gemv_w4_launch.py
1 to 4      bf16, f16; x alike; over 128 rows    Ampere on     gemv_mma.py; up to 16 as below
1           bf16, f16, f32, FP8; float x         all           gemv_float.py; up to 16 as below
1           int8 by channel; float x             all           gemv_w8.py, by skinny_launch.py
5 to few    4 bits without offsets; bf16 or A8   Hopper        wgmma_w4.py, by wgmma_launch.py
1 to 32     ggml's blocks                        all           gemv_blocks.py, of block_codes.py
                                                               and block_dots.py
1 to few    4 bits; bf16, f16 or A8              all           skinny_w4.py, by skinny_launch.py
5 to few    int8, FP8; bf16, or A8 for int8      Hopper        wgmma_w8.py, by wgmma_launch.py
1 to few    int8, FP8; bf16, f16 or A8           all           skinny_w8.py, by skinny_launch.py
more        4 bits whose products f16 or bf16    all           int8_gemm.py: `multiply_exact`, by
            holds exactly; A8                                  cuBLAS on floats
more        4 bits, int8; A8                     all           int8_gemm.py: `many_tokens_int8`
more        A8 in other groups                   all           `reference`
more        others                               all           dequantize.py, then cuBLAS

Where tokens are to have the bits of steps of one token (`single_tokens`), up to 16 are multiplied
by gemv_mma.py, gemv_float.py and gemv_blocks.py, and with other weights one after the other.

splitk_reduce.py adds the parts of products whose inputs several programs divide.  What kernels are
made of: unpack.py, unpack_words.py, tile_weights.py, mma_fragments.py, gemv_w4_mma.py,
gemv_w4_activations.py, wgmma_weights.py and wgmma_epilogue.py.  block_numbers.py makes numbers of
ggml's blocks, and code_rows.py looks up rows of tables of codes.  low_rank.py adds to products what
low-rank adapters add.
"""

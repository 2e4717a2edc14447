"""Kernels for GPUs, in Triton: the operations of `hmt.kernels.reference` on CUDA tensors.

They take the bytes that the kernels of the CPU take, so a block needs no second form in memory.
With TRITON_INTERPRET=1, set before the import, they run on CPU tensors, slowly.
"""

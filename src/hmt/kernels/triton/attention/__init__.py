"""Attention over KV pages on the GPU.

paged       which kernel attends to what: prefill, decode, latent (MLA)
flash_decode   the kernel: a part of the context per program; `combine` adds parts up
mla_decode  latent attention on Hopper; mla_fused what surrounds it, mla_layer both as one layer
append      writes keys and values to pages
metadata    block tables and lengths of a step on the device; tuning: launch sizes by shape
"""

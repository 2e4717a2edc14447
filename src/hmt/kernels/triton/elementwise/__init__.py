"""Norms, rotary positions, gates, sampling and embedding rows on the GPU.

All are one program for a row (or a head of one), for f32, bf16 and f16, on every architecture.

what                                                     kernel
RMS norm, after a sum or before int8 rounding            norms.py
rotary positions; activation(gate) * up                  rope_gate.py
the likeliest token, log-sum-exp, whether all is finite  sampling.py; draws are torch's
rows of an embedding, found by address                   embedding.py
"""

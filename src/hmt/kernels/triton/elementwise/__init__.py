"""Norms, rotary positions, gates, sampling and embedding rows on the GPU."""

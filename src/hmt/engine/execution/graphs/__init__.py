"""Decode steps captured as CUDA graphs: whole, in pieces, and with offloaded KV."""

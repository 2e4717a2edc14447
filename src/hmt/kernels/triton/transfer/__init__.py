"""Copies between device and pinned host memory, and KV pages repacked on the way."""

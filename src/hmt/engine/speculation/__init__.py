"""Speculative decoding: draft tokens, and whether they are worth a step's time."""

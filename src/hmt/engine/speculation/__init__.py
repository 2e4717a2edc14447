"""Speculative decoding: guesses of the next tokens, and whether they are worth a step's time."""

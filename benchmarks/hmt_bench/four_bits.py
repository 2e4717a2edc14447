"""Random weights that hold 4 bits without loss, and the models that engines are compared with."""

from pathlib import Path
from typing import Any

import torch

from hmt.profiling.random_model import BLOCK_NUMBERS, RandomShape, Shape, write_random_model

_GROUP = 32  # numbers that share a scale

SHAPES = {
    # TinyLlama: 1.1 billion parameters.
    "llama-1b": Shape(22, 2048, 5632, 32, 4, vocab_size=32000),
    # Qwen3-30B-A3B with 8 of its 48 layers, half of its experts and a smaller vocabulary: 2.7
    # billion parameters, 0.5 of them used for a token.
    "qwen3-moe": Shape(8, 2048, 768, 32, 4, 128, vocab_size=32000, experts=64, experts_per_token=8),
}


def write_four_bit_model(folder: Path, shape: RandomShape, **options: Any) -> int:
    """`write_random_model` with weights of 4 bits: any engine computes with the same ones.

    Every number is a code of 4 bits times 2^-7, and every 32 consecutive ones hold the code of
    largest magnitude, so that quantising groups of 32 loses nothing.  Sizes must be multiples of
    32.
    """
    return write_random_model(folder, shape, noise=four_bit_noise, **options)


def four_bit_noise(generator: torch.Generator) -> torch.Tensor:
    """Codes times 2^-7: in each group -7..7 and one -8, or all that with the other sign."""
    groups = BLOCK_NUMBERS // _GROUP
    codes = torch.randn(groups, _GROUP, generator=generator).mul_(2.5).round_().clamp_(-7, 7)
    largest = torch.randint(_GROUP, (groups, 1), generator=generator)
    codes.scatter_(1, largest, -8.0)
    signs = torch.randint(2, (groups, 1), generator=generator) * 2 - 1
    return (codes * signs * 2**-7).flatten()

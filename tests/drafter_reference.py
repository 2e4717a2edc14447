"""What the plain-torch references of drafters share."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from hmt.contracts.model import ModelSpec
from hmt.models import open_model


def verifier(width: int, vocab: int) -> ModelSpec:
    """A model to draft for: ten layers of a Llama."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=96, num_hidden_layers=10,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    ).to_dict() | {"architectures": ["LlamaForCausalLM"]}  # fmt: skip
    return open_model(config, Path("verifier"), torch.float32).spec


def rotated(heads: Tensor, inverse: Tensor, start: int = 0) -> Tensor:
    """Heads [heads, tokens, dim] by rotary positions from `start` on; inverse [dim / 2]."""
    angles = (start + torch.arange(heads.shape[1]))[:, None] * inverse
    low, high = heads.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

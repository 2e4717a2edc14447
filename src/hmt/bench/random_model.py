"""A Llama of any size with random weights: something large to measure with, made in seconds."""

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from importlib.resources import as_file, files
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from hmt.base.units import MIB

_NUMBER_BYTES = 2  # BF16
_BLOCK_BYTES = 16 * MIB
# Norms keep each layer's input at 1, so with this deviation, Llama's own, activations stay finite.
_DEVIATION = 0.02
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

Tensor = tuple[str, tuple[int, ...]]


def write_random_llama(
    folder: Path,
    *,
    layers: int = 16,
    hidden_size: int = 2048,
    intermediate_size: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    seed: int = 0,
    shard_bytes: int = 256 * MIB,
) -> int:
    """Write a Hugging Face checkpoint in BF16 into `folder`, made where missing; returns its bytes.

    The default holds 1.17 GB of weights.  Equal arguments give equal files.  All matrices are cut
    from one random block of 16 MiB, each from another place, so writing costs little more than
    the drive takes, and little memory.  The tokenizer is the embedded model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with as_file(files("hmt") / "embedded" / "mini-dense") as embedded:
        for name in _TOKENIZER_FILES:
            shutil.copyfile(embedded / name, folder / name)
        vocab_size = json.loads((embedded / "config.json").read_text())["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shards = list(_shards(_tensors(config), shard_bytes))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(_BLOCK_BYTES // _NUMBER_BYTES, generator=generator) * _DEVIATION
    block = noise.to(torch.bfloat16).view(torch.uint8).numpy().data
    for number, tensors in enumerate(shards, 1):
        _write_shard(folder / f"model-{number:05}-of-{len(shards):05}.safetensors", tensors, block)
    return sum(_nbytes(tensor) for tensors in shards for tensor in tensors)


def _tensors(config: dict[str, object]) -> Iterator[Tensor]:
    """Names and shapes in the order of use."""
    sizes = {name: size for name, size in config.items() if isinstance(size, int)}
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    query = sizes["num_attention_heads"] * sizes["head_dim"]
    kv = sizes["num_key_value_heads"] * sizes["head_dim"]
    yield "model.embed_tokens.weight", (sizes["vocab_size"], hidden)
    for layer in range(sizes["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (sizes["vocab_size"], hidden)


def _nbytes(tensor: Tensor) -> int:
    return prod(tensor[1]) * _NUMBER_BYTES


def _shards(tensors: Iterator[Tensor], shard_bytes: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors, as many to a shard as fit, at least one."""
    shard: list[Tensor] = []
    for tensor in tensors:
        if shard and sum(map(_nbytes, shard)) + _nbytes(tensor) > shard_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _write_shard(path: Path, tensors: list[Tensor], block: memoryview) -> None:
    ends = list(accumulate(map(_nbytes, tensors)))
    header = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [end - _nbytes((name, shape)), end]}
        for (name, shape), end in zip(tensors, ends, strict=True)
    }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors:
            _write_tensor(file, tensor, block)
        file.flush()
        os.fsync(file.fileno())  # or the first measurement pays for writing it


def _write_tensor(file: BinaryIO, tensor: Tensor, block: memoryview) -> None:
    name, shape = tensor
    left = _nbytes(tensor)
    if len(shape) == 1:
        file.write(torch.ones(shape, dtype=torch.bfloat16).view(torch.uint8).numpy().data)
        return
    # Another place for each name, the same on every run (Python's own hash of text is not).
    start = zlib.crc32(name.encode()) % (len(block) // _NUMBER_BYTES) * _NUMBER_BYTES
    while left:
        part = block[start : start + left]
        file.write(part)
        left -= len(part)
        start = 0

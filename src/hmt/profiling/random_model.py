"""Decoders of any size with random weights: something large to measure with, made in seconds."""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from hmt.base.units import MIB

_NUMBER_BYTES = 2  # BF16
BLOCK_NUMBERS = 8 * MIB
# Norms keep each layer's input at 1, so with this deviation, Llama's own, activations stay finite.
_DEVIATION = 0.02
_STEP_BYTES = 64  # matrices begin at its multiples: whole groups of 32 numbers
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

Tensor = tuple[str, tuple[int, ...]]
Edit = Callable[[str, torch.Tensor], None]
Noise = Callable[[torch.Generator], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder: a Llama, or with `experts` a Qwen3 mixture of experts.

    intermediate_size   width of the FFN, or of one expert
    head_dim            None: hidden_size / heads
    vocab_size          None: as many as the embedded model's tokenizer has
    tied                the head is the embedding
    """

    layers: int = 16
    hidden_size: int = 2048
    intermediate_size: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int | None = None
    vocab_size: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False

    def config(self, known_tokens: int) -> dict[str, Any]:
        """What config.json says; `known_tokens` are in the tokenizer."""
        return _config(self, known_tokens)

    def tensors(self, config: dict[str, Any]) -> Iterator[Tensor]:
        """Names and shapes in the order of use."""
        return _tensors(config)


class RandomShape(Protocol):
    """A decoder that random weights can be written for."""

    def config(self, known_tokens: int) -> dict[str, Any]:
        """What config.json says; `known_tokens` are in the tokenizer."""
        ...

    def tensors(self, config: dict[str, Any]) -> Iterator[Tensor]:
        """Names and shapes in the order of use."""
        ...


def normal_noise(generator: torch.Generator) -> torch.Tensor:
    """Numbers of Llama's own initial deviation: [BLOCK_NUMBERS] float32."""
    return torch.randn(BLOCK_NUMBERS, generator=generator) * _DEVIATION


def write_random_model(
    folder: Path,
    shape: RandomShape,
    *,
    noise: Noise = normal_noise,
    seed: int = 0,
    shard_bytes: int = 256 * MIB,
    edit: Edit | None = None,
) -> int:
    """Write a Hugging Face checkpoint in BF16 into `folder`, made where missing; returns its bytes.

    Equal arguments give equal files.  All matrices are cut from one random block of 16 MiB, each
    from another place, so writing costs little more than the disk takes, and little memory.  The
    tokenizer is the embedded model's, whatever the size of the vocabulary.

    noise   draws the numbers of that block, [8 Mi] float32
    edit    edit(name, matrix) may change each matrix, bf16, in place before it is written
    """
    folder.mkdir(parents=True, exist_ok=True)
    with as_file(files("hmt") / "embedded" / "mini-dense") as embedded:
        for name in _TOKENIZER_FILES:
            shutil.copyfile(embedded / name, folder / name)
        known_tokens = json.loads((embedded / "config.json").read_text())["vocab_size"]
    config = shape.config(known_tokens)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shards = list(_shards(shape.tensors(config), shard_bytes))
    generator = torch.Generator().manual_seed(seed)
    block = noise(generator).to(torch.bfloat16).view(torch.uint8).numpy().data
    holders: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(file, tensors, block, edit)
        holders |= {name: file.name for name, _ in tensors}
    nbytes = sum(_nbytes(tensor) for tensors in shards for tensor in tensors)
    index = {"metadata": {"total_size": nbytes}, "weight_map": holders}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return nbytes


def _config(shape: Shape, known_tokens: int) -> dict[str, Any]:
    """What config.json says."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size or known_tokens,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim or shape.hidden_size // shape.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if shape.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": shape.intermediate_size,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _tensors(config: dict[str, Any]) -> Iterator[Tensor]:
    """Names and shapes in the order of use."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, shape in (_attention(config) | _ffn(config)).items():
            yield f"{at}{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    norms = {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    return {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        **(norms if "num_experts" in config else {}),
    }


def _ffn(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"post_attention_layernorm": (hidden,)}
    experts = config.get("num_experts", 0)
    if experts:
        found["mlp.gate"] = (experts, hidden)
    for at in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
        found |= {
            f"{at}.gate_proj": (inner, hidden),
            f"{at}.up_proj": (inner, hidden),
            f"{at}.down_proj": (hidden, inner),
        }
    return found


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


def _write_shard(path: Path, tensors: list[Tensor], block: memoryview, edit: Edit | None) -> None:
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
            _write_tensor(file, tensor, block, edit)
        file.flush()
        os.fsync(file.fileno())  # or the first measurement pays for writing it


def _write_tensor(file: BinaryIO, tensor: Tensor, block: memoryview, edit: Edit | None) -> None:
    name, shape = tensor
    if len(shape) == 1:
        file.write(torch.ones(shape, dtype=torch.bfloat16).view(torch.uint8).numpy().data)
        return
    if edit is None:
        for part in _cut(tensor, block):
            file.write(part)
        return
    matrix = torch.frombuffer(bytearray(b"".join(_cut(tensor, block))), dtype=torch.bfloat16)
    edit(name, matrix.view(shape))
    file.write(matrix.view(torch.uint8).numpy().data)


def _cut(tensor: Tensor, block: memoryview) -> Iterator[memoryview]:
    """The bytes of a matrix, from the random block."""
    left = _nbytes(tensor)
    # Another place for each name, the same on every run (Python's own hash of text is not).
    start = zlib.crc32(tensor[0].encode()) % (len(block) // _STEP_BYTES) * _STEP_BYTES
    while left:
        part = block[start : start + left]
        yield part
        left -= len(part)
        start = 0

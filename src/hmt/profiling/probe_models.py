"""Models that probes run: layers of the trained embedded model, and others of random weights.

Random ones have the shapes of common families, so that kernels and Python do what they do there.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch

FEW, MANY = 2, 8  # layers
_DEVIATION = 0.02
_WEIGHTS = "model.safetensors"
_SOURCE = "mini-dense"


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a model's layers; `experts` 0: dense, with a network of `between` numbers."""

    hidden: int
    between: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    chosen: int = 0
    vocabulary: int = 0  # 0: as many tokens as the embedded model's tokenizer knows


# Layers of 30 and 28 MiB: what streams them passes more than most caches hold.
_WIDE = _Shape(1024, 4096, 8, 4, 128)
_WIDE_EXPERTS = _Shape(1024, 512, 4, 2, 64, experts=8, chosen=4)
# Small for a GPU, with heads, vocabulary and expert counts of large models.
_DENSE = _Shape(512, 1024, 4, 2, 128, vocabulary=1 << 15)
_EXPERTS = _Shape(512, 128, 4, 2, 128, experts=64, chosen=8, vocabulary=1 << 15)


@contextmanager
def small_model(layers: int) -> Iterator[Path]:
    """The embedded model with so many of its layers, in a folder that goes away."""
    from safetensors.torch import load_file, save_file

    with (
        as_file(files("hmt") / "embedded" / _SOURCE) as source,
        _folder_beside(source, {"num_hidden_layers": layers}) as folder,
    ):
        config = json.loads((source / "config.json").read_text())
        beyond = tuple(f"model.layers.{n}." for n in range(layers, config["num_hidden_layers"]))
        weights = load_file(source / _WEIGHTS)
        save_file({k: v for k, v in weights.items() if not k.startswith(beyond)}, folder / _WEIGHTS)
        yield folder


@contextmanager
def wide_model(layers: int) -> Iterator[Path]:
    """Dense layers of random weights, of Llama's family, 30 MiB each."""
    with _random_model(layers, _WIDE) as folder:
        yield folder


@contextmanager
def wide_experts(layers: int) -> Iterator[Path]:
    """A mixture of 8 experts with random weights, of Qwen3's family, 28 MiB a layer."""
    with _random_model(layers, _WIDE_EXPERTS) as folder:
        yield folder


@contextmanager
def dense_model(layers: int) -> Iterator[Path]:
    """For a GPU: as `wide_model`, smaller."""
    with _random_model(layers, _DENSE) as folder:
        yield folder


@contextmanager
def expert_model(layers: int) -> Iterator[Path]:
    """For a GPU: 64 experts, 8 of them chosen."""
    with _random_model(layers, _EXPERTS) as folder:
        yield folder


@contextmanager
def _random_model(layers: int, shape: _Shape) -> Iterator[Path]:
    """Alike layers of random weights, with a tied head, in a folder that goes away."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def drawn(of_shape: tuple[int, ...]) -> torch.Tensor:
        if len(of_shape) == 1:
            return torch.ones(of_shape, dtype=torch.bfloat16)
        return (torch.randn(of_shape, generator=generator) * _DEVIATION).bfloat16()

    with as_file(files("hmt") / "embedded" / _SOURCE) as source:
        known = json.loads((source / "config.json").read_text())
        vocabulary = shape.vocabulary or known["vocab_size"]
        config = _config(layers, shape, vocabulary)
        weights = {
            "model.embed_tokens.weight": drawn((vocabulary, shape.hidden)),
            "model.norm.weight": drawn((shape.hidden,)),
        }
        for name, of_shape in _layer_shapes(shape).items():
            weight = drawn(of_shape)
            for layer in range(layers):
                weights[f"model.layers.{layer}.{name}.weight"] = weight.clone()
        with _folder_beside(source, config, anew=True) as folder:
            save_file(weights, folder / _WEIGHTS)
            yield folder


def _config(layers: int, shape: _Shape, vocabulary: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.between,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    if not shape.experts:
        return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return config | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.between,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }


def _layer_shapes(shape: _Shape) -> dict[str, tuple[int, ...]]:
    """Of one layer's weights, by name."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (shape.hidden,),
        "post_attention_layernorm": (shape.hidden,),
        "self_attn.q_proj": (query, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, query),
    }
    networks = ["mlp."]
    if shape.experts:
        networks = [f"mlp.experts.{expert}." for expert in range(shape.experts)]
        shapes |= {
            "self_attn.q_norm": (shape.head_dim,),
            "self_attn.k_norm": (shape.head_dim,),
            "mlp.gate": (shape.experts, shape.hidden),
        }
    for network in networks:
        shapes |= {
            f"{network}gate_proj": (shape.between, shape.hidden),
            f"{network}up_proj": (shape.between, shape.hidden),
            f"{network}down_proj": (shape.hidden, shape.between),
        }
    return shapes


@contextmanager
def _folder_beside(source: Path, config: dict[str, Any], anew: bool = False) -> Iterator[Path]:
    """A copy of the source but its weights, `config` changed in it, or all of it `anew`."""
    with tempfile.TemporaryDirectory(prefix="hmt-probe-") as name:
        folder = Path(name)
        for file in source.iterdir():
            if file.name != _WEIGHTS:
                (folder / file.name).write_bytes(file.read_bytes())
        known = {} if anew else json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(known | config))
        yield folder

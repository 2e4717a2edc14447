"""Models of random weights with which a GPU's steps are probed: small, and shaped like large ones.

Heads are as wide as most models', there are as many tokens as small vocabularies have, and dozens
of experts: kernels, and what the CPU does, are those of large models.  Weights are next to nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hmt.engine.probe_models import random_model

VOCABULARY = 1 << 15
_WIDTH, _NETWORK, _EXPERT_WIDTH = 512, 1024, 128
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 128
_EXPERTS, _CHOSEN = 64, 8


@contextmanager
def dense_model(layers: int) -> Iterator[Path]:
    """Of Llama's family, in a folder that goes away."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    with _model(layers, config, _gated("mlp.", _NETWORK)) as folder:
        yield folder


@contextmanager
def expert_model(layers: int) -> Iterator[Path]:
    """The same with experts, of Qwen3's family."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": _EXPERT_WIDTH,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _CHOSEN,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_norm": (_HEAD_DIM,),
        "self_attn.k_norm": (_HEAD_DIM,),
        "mlp.gate": (_EXPERTS, _WIDTH),
    }
    for expert in range(_EXPERTS):
        shapes |= _gated(f"mlp.experts.{expert}.", _EXPERT_WIDTH)
    with _model(layers, config, shapes) as folder:
        yield folder


@contextmanager
def _model(
    layers: int, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> Iterator[Path]:
    known = {
        "intermediate_size": _NETWORK,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
    }
    attention = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _WIDTH),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _WIDTH),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _WIDTH),
        "self_attn.o_proj": (_WIDTH, _HEADS * _HEAD_DIM),
    }
    with random_model(layers, known | config, attention | shapes, _WIDTH, VOCABULARY) as folder:
        yield folder


def _gated(at: str, width: int) -> dict[str, tuple[int, ...]]:
    wide, narrow = (width, _WIDTH), (_WIDTH, width)
    return {f"{at}gate_proj": wide, f"{at}up_proj": wide, f"{at}down_proj": narrow}

"""Sizes of kinds of layers, and rotary positions, that several families share."""

import random
from typing import Any

from config_sizes import YARN, dense

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DEEPSEEK_YARN = {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9}
FULL_KIND, LINEAR_KIND = "full_attention", "linear_attention"
INDEXED_KIND = "indexed_attention"
LINEAR = {"rope_type": "linear", "factor": 3.0}


def delta(rng: random.Random, **given: Any) -> dict[str, Any]:
    """Two delta nets, attention, a delta net; several value heads for each key head."""
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    key_heads = rng.choice([1, 2, 3])
    sizes = {
        "num_hidden_layers": 4,
        "layer_types": kinds,
        "head_dim": rng.choice([8, 12]),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([6, 8, 10]),
        "linear_value_head_dim": rng.choice([5, 8, 12]),
        "linear_conv_kernel_dim": rng.choice([3, 4]),
        "partial_rotary_factor": 0.5,
    }
    return dense(rng, **(sizes | given))


def latent(rng: random.Random, **given: Any) -> dict[str, Any]:
    heads = rng.choice([2, 3, 5])
    sizes = {
        "hidden_size": heads * rng.choice([10, 12]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": rng.choice([12, 20]),
        "kv_lora_rank": rng.choice([16, 24]),
        "qk_nope_head_dim": rng.choice([6, 10]),
        "qk_rope_head_dim": rng.choice([4, 6]),
        "v_head_dim": rng.choice([6, 8]),
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    return dense(rng, **(sizes | given))

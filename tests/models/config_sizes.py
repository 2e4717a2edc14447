"""What random configurations of many families share."""

import random
from typing import Any

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def rope(parameters: dict[str, Any], theta: float = 5000.0) -> dict[str, Any]:
    """Rotary positions."""
    return {"rope_parameters": {"rope_theta": theta, **parameters}}


def dense(rng: random.Random, **given: Any) -> dict[str, Any]:
    """Sizes that most families share; an odd number of query heads per key-value head."""
    kv_heads = rng.choice([1, 2])
    heads = kv_heads * rng.choice([1, 3, 5])
    dim = rng.choice([6, 10, 12])
    sizes = {
        "vocab_size": rng.randrange(260, 700),
        "hidden_size": heads * dim,
        "intermediate_size": rng.randrange(30, 90),
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "pad_token_id": None,
    }
    return sizes | given

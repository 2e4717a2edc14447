"""Small random configurations of families with state spaces, three or more of each."""

import random
from collections.abc import Callable, Iterator
from typing import Any

from config_sizes import YARN, dense, rope


def _mamba2(rng: random.Random) -> Iterator[dict[str, Any]]:
    for given in (
        {"use_bias": True, "time_step_limit": (0.02, 0.9), "n_groups": 2, "conv_kernel": 3},
        {"use_conv_bias": False, "tie_word_embeddings": True, "n_groups": 1},
        {"n_groups": 6, "conv_kernel": 2, "layer_norm_epsilon": 1e-6, "expand": 1},
    ):
        expand = given.get("expand", 2)
        sizes = {
            "vocab_size": rng.randrange(260, 700), "hidden_size": 36, "num_hidden_layers": 3,
            "num_heads": 6, "head_dim": 6 * expand, "state_size": rng.choice([6, 9, 16]),
            "chunk_size": 8, "pad_token_id": None,
        }  # fmt: skip
        yield sizes | given


def _mamba_hybrid(rng: random.Random, **given: Any) -> dict[str, Any]:
    """Fields of hybrids that begin with "mamba_"."""
    sizes = {
        "num_attention_heads": 4, "num_key_value_heads": rng.choice([1, 2, 4]), "hidden_size": 48,
        "num_hidden_layers": 4, "mamba_n_heads": 6, "mamba_d_head": 16,
        "mamba_n_groups": rng.choice([1, 2, 3]), "mamba_d_state": rng.choice([5, 8, 16]),
        "mamba_d_conv": rng.choice([2, 3, 4]), "mamba_chunk_size": 8,
    }  # fmt: skip
    return dense(rng, **(sizes | given))


def _bamba(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _mamba_hybrid(rng, attn_layer_indices=[1], mamba_n_groups=3)
    yield _mamba_hybrid(
        rng, attn_layer_indices=[0, 3], attention_bias=True, mlp_bias=True, mamba_proj_bias=True,
        tie_word_embeddings=True,
    )  # fmt: skip
    yield _mamba_hybrid(
        rng, attn_layer_indices=[2], mamba_conv_bias=False, mamba_n_groups=1,
        time_step_limit=(0.05, 0.7), **rope(YARN),
    )  # fmt: skip


def _granite(rng: random.Random) -> Iterator[dict[str, Any]]:
    """With and without experts, rotary positions, and Mamba-2."""
    multipliers = {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
        "logits_scaling": 0.4, "shared_intermediate_size": 28,
    }  # fmt: skip
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    sparse = {"num_local_experts": 7, "num_experts_per_tok": 3, "layer_types": kinds}
    yield _mamba_hybrid(rng, **multipliers, **sparse, mamba_n_groups=2)
    yield _mamba_hybrid(
        rng, **multipliers, **sparse | {"num_local_experts": 0}, position_embedding_type="rope",
        mamba_proj_bias=True, attention_bias=True, tie_word_embeddings=True,
    )  # fmt: skip
    yield _mamba_hybrid(
        rng, **multipliers, **sparse | {"layer_types": ["full_attention"] * 4},
        position_embedding_type="rope", **rope(YARN),
    )  # fmt: skip
    yield _mamba_hybrid(rng, **sparse | {"num_local_experts": 0}, attention_multiplier=0.3)


def _falcon_h1(rng: random.Random) -> Iterator[dict[str, Any]]:
    factors = {
        "embedding_multiplier": 3.0, "lm_head_multiplier": 2.0, "key_multiplier": 0.6,
        "attention_out_multiplier": 0.7, "attention_in_multiplier": 1.2, "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.7, 0.9, 1.3, 1.2, 1.4],
        "mlp_multipliers": [1.3, 0.6],
    }  # fmt: skip
    yield _mamba_hybrid(rng, **factors, mamba_d_ssm=96, mamba_rms_norm=True, mamba_n_groups=3)
    yield _mamba_hybrid(
        rng, mamba_d_ssm=24, mamba_d_head=4, attention_bias=True, mlp_bias=True,
        mamba_proj_bias=True, projectors_bias=True, tie_word_embeddings=True, mamba_n_groups=2,
    )  # fmt: skip
    yield _mamba_hybrid(
        rng, **factors, mamba_d_ssm=None, mamba_rms_norm=True, mamba_norm_before_gate=False,
        time_step_limit=(0.05, 0.7), head_dim=10, **rope(YARN),
    )  # fmt: skip


def _nemotron_h(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Layers of one part each, in any order, a part of which may be missing."""
    kinds = ["linear_attention", "full_attention", "mlp", "moe", "linear_attention", "moe"]
    sizes = {
        "layers_block_type": kinds, "head_dim": 10, "mamba_num_heads": 6, "mamba_head_dim": 7,
        "ssm_state_size": 9, "n_groups": 3, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28, "chunk_size": 8,
        "conv_kernel": 4, "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    usual = dense(rng)
    del usual["rms_norm_eps"], usual["num_hidden_layers"]
    yield usual | sizes | {"routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2}
    yield usual | sizes | {
        "layers_block_type": ["mlp", "linear_attention", "full_attention", "mlp"], "n_groups": 1,
        "use_bias": True, "mlp_bias": True, "use_conv_bias": False, "conv_kernel": 2,
        "tie_word_embeddings": True, "time_step_min": 0.3,
    }  # fmt: skip
    yield usual | sizes | {
        "layers_block_type": ["moe", "full_attention", "linear_attention", "moe"], "n_groups": 2,
        "norm_topk_prob": False, "num_experts_per_tok": 1,
    }  # fmt: skip
    yield usual | sizes | {"moe_latent_size": 18, "mlp_bias": True}


def _mamba(rng: random.Random) -> Iterator[dict[str, Any]]:
    for given in (
        {"use_bias": True, "conv_kernel": 3, "tie_word_embeddings": False},
        {"use_conv_bias": False, "time_step_rank": 5, "expand": 3},
        {"conv_kernel": 2, "layer_norm_epsilon": 1e-6, "expand": 1},
    ):
        sizes = {
            "vocab_size": rng.randrange(260, 700), "hidden_size": 38, "num_hidden_layers": 3,
            "state_size": rng.choice([5, 9, 16]), "pad_token_id": None,
        }  # fmt: skip
        yield sizes | given


def _jamba(rng: random.Random) -> Iterator[dict[str, Any]]:
    sizes = {
        "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5, "mamba_d_state": 7,
        "num_hidden_layers": 4,
    }  # fmt: skip
    yield dense(rng, **sizes, num_experts_per_tok=2, mamba_d_conv=3)
    yield dense(
        rng, **sizes | {"num_experts": 1}, mamba_proj_bias=True, tie_word_embeddings=True,
        mamba_dt_rank=4,
    )  # fmt: skip
    yield dense(
        rng, **sizes, num_experts_per_tok=3, expert_layer_period=1, expert_layer_offset=0,
        mamba_conv_bias=False, mamba_expand=3,
    )  # fmt: skip


STATE_SPACES: dict[str, Callable[[random.Random], Iterator[dict[str, Any]]]] = {
    "mamba2": _mamba2,
    "bamba": _bamba,
    "granitemoehybrid": _granite,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "jamba": _jamba,
}

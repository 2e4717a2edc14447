"""Small random configurations of families with linear attention."""

import random
from collections.abc import Callable, Iterator
from typing import Any

from config_parts import DEEPSEEK_YARN, FULL_KIND, INDEXED_KIND, LINEAR_KIND, delta, latent
from config_sizes import YARN, dense, rope


def _kimi(seed: int, **given: Any) -> dict[str, Any]:
    """A delta net, latent attention, two delta nets; a dense network in the first layer.

    With a seed of its own: where a head finds next to nothing, the norm of that makes errors so
    large that transformers' own logits are wrong by more than what tests allow.
    """
    rng = random.Random(seed)
    sizes = {
        "seed": seed,
        "num_hidden_layers": 4,
        "layer_types": [LINEAR_KIND, FULL_KIND, LINEAR_KIND, LINEAR_KIND],
        "linear_head_dim": rng.choice([8, 10, 12]),
        "linear_num_heads": rng.choice([2, 3]),
        "linear_conv_kernel_dim": rng.choice([3, 4]),
        "num_local_experts": 12,
        "n_group": 1,
        "topk_group": 1,
        "eos_token_id": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }
    found = latent(rng, **(sizes | given))
    del found["n_routed_experts"], found["first_k_dense_replace"]
    return found


def _kimi_linear(rng: random.Random) -> Iterator[dict[str, Any]]:
    # Latents so small that prompts are absorbed, too: what is expanded depends on chunks.
    small = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 10, "v_head_dim": 8}
    yield _kimi(1, **small, linear_conv_kernel_dim=4)
    yield _kimi(2, n_group=4, topk_group=2, norm_topk_prob=False, attention_bias=True)
    kinds = [FULL_KIND, LINEAR_KIND, LINEAR_KIND, FULL_KIND]
    sparse = ["sparse", "dense", "sparse", "dense"]
    yield _kimi(
        3, layer_types=kinds, mlp_layer_types=sparse, n_shared_experts=2, num_experts_per_tok=1,
        linear_conv_kernel_dim=2,
    )  # fmt: skip


def _glm5_next(rng: random.Random) -> Iterator[dict[str, Any]]:
    # Tokens of the tests see more pools than they select; with so many heads each has a score.
    def glm(seed: int, **given: Any) -> dict[str, Any]:
        sizes = {
            "layer_types": [LINEAR_KIND, INDEXED_KIND, LINEAR_KIND, INDEXED_KIND],
            "qk_rope_head_dim": 0,
            "q_lora_rank": 12,
            "kv_lora_rank": 40,
            "qk_nope_head_dim": 6,
            "v_head_dim": 6,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 8,
            "index_kpool": 4,
            "hc_mult": 3,
        }
        return _kimi(seed, **(sizes | given))

    yield glm(1, linear_conv_kernel_dim=4)
    yield glm(
        2, linear_lower_bound=None, index_topk=5, index_kpool=1, hc_mult=2, hc_sinkhorn_iters=3,
        n_group=4, topk_group=2, norm_topk_prob=False, attention_bias=True,
    )  # fmt: skip
    kinds = [INDEXED_KIND, INDEXED_KIND, LINEAR_KIND, INDEXED_KIND]
    sparse = ["sparse", "dense", "sparse", "dense"]
    yield glm(
        3, layer_types=kinds, mlp_layer_types=sparse,
        indexer_types=["full", "shared", "full", "full"], n_shared_experts=2,
        index_topk=6, index_kpool=2, linear_lower_bound=-2.5, linear_conv_kernel_dim=2,
    )  # fmt: skip


def _bailing_hybrid(rng: random.Random) -> Iterator[dict[str, Any]]:
    def ling(seed: int, **given: Any) -> dict[str, Any]:
        found = _kimi(seed, **given)
        found["head_dim"] = found.pop("linear_head_dim")
        found["short_conv_kernel_size"] = found.pop("linear_conv_kernel_dim")
        del found["linear_num_heads"]
        return found

    yield ling(1, q_lora_rank=None, n_group=4, topk_group=2)
    yield ling(2, kda_safe_gate=False, attention_bias=True, n_shared_experts=2)
    kinds = [FULL_KIND, LINEAR_KIND, LINEAR_KIND, FULL_KIND]
    yield ling(3, layer_types=kinds, kda_lower_bound=-2.5, **rope(DEEPSEEK_YARN))


def _olmo_hybrid(rng: random.Random) -> Iterator[dict[str, Any]]:
    def olmo(seed: int, **given: Any) -> dict[str, Any]:
        found = delta(random.Random(seed), seed=seed, eos_token_id=1, **given)
        del found["head_dim"], found["partial_rotary_factor"]
        return found

    yield olmo(4, linear_num_key_heads=2, linear_num_value_heads=4)
    yield olmo(2, linear_allow_neg_eigval=False, attention_bias=True, tie_word_embeddings=True)
    kinds = [FULL_KIND, LINEAR_KIND, LINEAR_KIND, FULL_KIND]
    still = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    yield olmo(3, layer_types=kinds, linear_conv_kernel_dim=2, **still)


def _minimax(rng: random.Random) -> Iterator[dict[str, Any]]:
    def mini(**given: Any) -> dict[str, Any]:
        kinds = [LINEAR_KIND, LINEAR_KIND, FULL_KIND, LINEAR_KIND]
        sizes = {"num_hidden_layers": 4, "layer_types": kinds, "num_local_experts": 5}
        return dense(rng, **(sizes | {"eos_token_id": 1, "block_size": 8} | given))

    yield mini(num_experts_per_tok=2, head_dim=8)
    factors = {"linear_attn_alpha_factor": 1.7, "full_attn_beta_factor": 0.6}
    factors |= {"mlp_alpha_factor": 0.8, "mlp_beta_factor": 1.4}
    yield mini(num_experts_per_tok=3, **factors)
    kinds = [FULL_KIND, LINEAR_KIND, LINEAR_KIND, FULL_KIND]
    yield mini(
        layer_types=kinds, num_experts_per_tok=1, tie_word_embeddings=True,
        full_attn_alpha_factor=3.6, linear_attn_beta_factor=0.5, head_dim=10, **rope(YARN),
    )  # fmt: skip


FAMILIES: dict[str, Callable[[random.Random], Iterator[dict[str, Any]]]] = {
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
    "olmo_hybrid": _olmo_hybrid,
    "minimax": _minimax,
}
NEWER: dict[str, Callable[[random.Random], Iterator[dict[str, Any]]]] = {
    "glm5_next_text": _glm5_next,
}

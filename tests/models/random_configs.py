"""Small random configurations of every family, three or more of each.

Sizes are drawn from a seed; what a variant is for (tied or not, biases, rotary scaling, windows
shorter than the prompt, expert groups) is written down, so that nothing depends on luck.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import linear_attention_configs
import text_models as text_models  # registers classes
from config_parts import DEEPSEEK_YARN, FULL_KIND, LINEAR, LINEAR_KIND, LLAMA3
from config_parts import delta as _delta
from config_parts import latent as _latent
from config_sizes import YARN
from config_sizes import dense as _dense
from config_sizes import rope as _rope
from state_space_configs import STATE_SPACES
from transformers import CONFIG_MAPPING

PROMPT_TOKENS = 23
LONGEST_SHORT = 8  # of LongRoPE: longer sequences use the long factors


@dataclass(frozen=True)
class Case:
    """A configuration, and how transformers and HMT must be run to be comparable.

    first_chunk   tokens that the first step of a sequence must have at least
    options       of transformers' forward
    """

    name: str
    config: Any
    seed: int
    first_chunk: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def _llama(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _dense(rng, tie_word_embeddings=True, attention_bias=True, head_dim=14)
    yield _dense(rng, mlp_bias=True, **_rope(LLAMA3))
    yield _dense(rng, hidden_act="gelu", **_rope(YARN))
    yield _dense(rng, **_rope(LINEAR))
    yield _dense(rng, **_rope({"rope_type": "dynamic", "factor": 2.0}))


def _mistral(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _dense(rng, sliding_window=5)
    yield _dense(rng, sliding_window=None, head_dim=8, tie_word_embeddings=True)
    yield _dense(rng, sliding_window=16, **_rope(YARN))


def _qwen2(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _dense(rng, tie_word_embeddings=True)
    yield _dense(rng, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    yield _dense(rng, **_rope(YARN))


def _qwen3(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _dense(rng, head_dim=10, tie_word_embeddings=True)
    yield _dense(rng, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=2)
    yield _dense(rng, head_dim=12, attention_bias=True, **_rope(YARN))


def _phi3(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _dense(rng, sliding_window=7, original_max_position_embeddings=128)
    sizes = _dense(rng)
    dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    for original, partial in ((LONGEST_SHORT, 1.0), (64, 1.0), (LONGEST_SHORT, 2 / 3)):
        turned = int(dim * partial) // 2
        long = [rng.uniform(1, 8) for _ in range(turned)]
        short = [rng.uniform(1, 2) for _ in range(turned)]
        yield sizes | {
            "original_max_position_embeddings": original,
            "partial_rotary_factor": partial,
            "rope_theta": 5000.0,
            "rope_scaling": {"type": "longrope", "long_factor": long, "short_factor": short},
            "tie_word_embeddings": partial == 1,
        }


def _gemma3(rng: random.Random) -> Iterator[dict[str, Any]]:
    dense = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6}
    yield _dense(rng, **dense, sliding_window_pattern=2)
    yield _dense(
        rng,
        **dense,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=5000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        final_logit_softcapping=3.0,
    )
    yield _dense(
        rng, **dense, attention_bias=True, tie_word_embeddings=False, attn_logit_softcapping=2.0
    )


def _gemma4(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Embeddings of each layer and shared keys; then without either; then keys that are values."""
    kinds = ["sliding_attention", "full_attention"] * 3
    sizes = {"head_dim": 8, "global_head_dim": 12, "sliding_window": 6, "num_hidden_layers": 6}
    small = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 700}
    yield _dense(
        rng, **sizes, **small, layer_types=kinds, num_kv_shared_layers=3, use_double_wide_mlp=True,
        final_logit_softcapping=3.0, tie_word_embeddings=True,
    )  # fmt: skip
    yield _dense(
        rng, **sizes, hidden_size_per_layer_input=0, vocab_size_per_layer_input=700,
        attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    yield _dense(
        rng, **sizes, **small, layer_types=kinds, num_kv_shared_layers=0, attention_k_eq_v=True,
        num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, hidden_size=40,
    )  # fmt: skip
    yield _dense(
        rng, **sizes, hidden_size_per_layer_input=0, vocab_size_per_layer_input=700,
        enable_moe_block=True, num_experts=7, top_k_experts=3, moe_intermediate_size=14,
    )  # fmt: skip
    wide = sizes | {"num_hidden_layers": 5, "sliding_window": 16}
    yield _dense(
        rng, **wide, **small, layer_types=["full_attention", *kinds[:3], "full_attention"],
        num_kv_shared_layers=2, tie_word_embeddings=False, seed=77,
    )  # fmt: skip


def _mixtral(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _dense(rng, num_local_experts=5, num_experts_per_tok=2)
    yield _dense(rng, num_local_experts=4, num_experts_per_tok=3, sliding_window=6)
    yield _dense(rng, num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=True)


def _qwen3_moe(rng: random.Random) -> Iterator[dict[str, Any]]:
    sparse = {"num_experts": 7, "moe_intermediate_size": 20, "head_dim": 10}
    yield _dense(rng, **sparse, num_experts_per_tok=3, norm_topk_prob=True)
    yield _dense(
        rng,
        **sparse,
        num_experts_per_tok=4,
        decoder_sparse_step=2,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
    )
    yield _dense(
        rng,
        **sparse,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        **_rope(YARN),
    )


def _delta_experts(rng: random.Random, **given: Any) -> dict[str, Any]:
    experts = {
        "num_experts": 7,
        "num_experts_per_tok": rng.choice([2, 3]),
        "moe_intermediate_size": rng.choice([12, 20]),
        "shared_expert_intermediate_size": rng.choice([10, 24]),
    }
    return _delta(rng, **(experts | given))


def _qwen3_next(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _delta_experts(rng, linear_num_key_heads=2, linear_num_value_heads=6)
    yield _delta_experts(rng, decoder_sparse_step=2, norm_topk_prob=False, attention_bias=True)
    whole = {"partial_rotary_factor": 1.0, "linear_conv_kernel_dim": 2}
    yield _delta_experts(rng, mlp_only_layers=[0], tie_word_embeddings=True, **whole, **_rope(YARN))


def _qwen3_5(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _delta(rng, linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4)
    yield _delta(rng, attention_bias=True, tie_word_embeddings=True)
    first = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    yield _delta(rng, layer_types=first, **_rope({**YARN, "partial_rotary_factor": 0.5}))


def _qwen3_5_moe(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _delta_experts(rng, linear_num_key_heads=2, linear_num_value_heads=4)
    yield _delta_experts(rng, attention_bias=True, linear_conv_kernel_dim=2)
    yield _delta_experts(rng, tie_word_embeddings=True, num_experts_per_tok=1)


def _qwen4_exp(rng: random.Random) -> Iterator[dict[str, Any]]:
    # Tokens of the tests see more blocks than they select; with so many heads each has a score.
    def flash(**given: Any) -> dict[str, Any]:
        sizes = {
            "layer_types": [LINEAR_KIND, LINEAR_KIND, FULL_KIND, LINEAR_KIND],
            "eos_token_id": 7,
            "hc_count": 3,
            "hc_lowrank": 9,
            "ple_layer_ids": [2],
            "ple_embed_dim": 24,
            "ple_conv_kernel_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 90,
            "make_ngram_vocab_size_divisible_by": 12,
            "split_ngram_parts": 3,
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 6,
            "indexer_compress_ratio": 3,
        }
        return _delta_experts(rng, **(sizes | given))

    yield flash(linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4)
    yield flash(
        hc_count=2, attention_bias=True, output_gate_type="sigmoid", ple_layer_ids=[1, 4],
        ngram_size=4, heads_per_ngram=1, ple_embed_dim=9, ple_conv_kernel_size=4,
        indexer_budget=5, indexer_compress_ratio=1, split_ngram_parts=1, norm_topk_prob=False,
    )  # fmt: skip
    first = [FULL_KIND, LINEAR_KIND, LINEAR_KIND, FULL_KIND]
    yield flash(
        layer_types=first, tie_word_embeddings=True, hc_count=5, ngram_size=2, heads_per_ngram=3,
        eos_token_id=[5, 9], indexer_budget=8, indexer_compress_ratio=4, ple_layer_ids=[2, 3],
        split_ngram_parts=4, linear_conv_kernel_dim=2,
        **_rope({**YARN, "partial_rotary_factor": 0.5}),
    )  # fmt: skip


def _conv(rng: random.Random, **given: Any) -> dict[str, Any]:
    kinds = ["conv", "full_attention", "conv", "conv"]
    sizes = {"num_hidden_layers": 4, "layer_types": kinds, "conv_L_cache": rng.choice([2, 3, 4])}
    sizes["norm_eps"] = 1e-5
    found = _dense(rng, **(sizes | given))
    del found["rms_norm_eps"]
    return found


def _lfm2(rng: random.Random) -> Iterator[dict[str, Any]]:
    yield _conv(rng, block_auto_adjust_ff_dim=False, conv_L_cache=3)
    yield _conv(rng, block_multiple_of=16, block_ffn_dim_multiplier=1.3)
    yield _conv(rng, block_multiple_of=8, tie_word_embeddings=False, **_rope(YARN))


def _lfm2_moe(rng: random.Random) -> Iterator[dict[str, Any]]:
    sparse = {"num_experts": 7, "moe_intermediate_size": 20, "num_dense_layers": 1}
    yield _conv(rng, **sparse, num_experts_per_tok=3)
    yield _conv(
        rng, **sparse | {"num_dense_layers": 2}, num_experts_per_tok=2, norm_topk_prob=False
    )
    yield _conv(
        rng, **sparse | {"num_dense_layers": 0}, num_experts_per_tok=2, use_expert_bias=False,
        routed_scaling_factor=1.5,
    )  # fmt: skip


def _deepseek_v2(rng: random.Random) -> Iterator[dict[str, Any]]:
    grouped = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    yield _latent(rng, q_lora_rank=None, n_shared_experts=2, norm_topk_prob=False)
    yield _latent(rng, **grouped, routed_scaling_factor=4.0, **_rope(DEEPSEEK_YARN))
    yield _latent(rng, **grouped, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)


def _deepseek_v3(rng: random.Random) -> Iterator[dict[str, Any]]:
    # 40 * 12 / (2 * 40 - 12) is 7: runs of up to 7 tokens are absorbed, longer ones expanded.
    both_ways = {"kv_lora_rank": 40, "qk_nope_head_dim": 6, "v_head_dim": 6}
    yield _latent(rng, **both_ways, n_group=4, topk_group=2)
    yield _latent(
        rng, n_group=3, topk_group=2, q_lora_rank=None, rope_interleave=False, norm_topk_prob=False
    )
    yield _latent(
        rng,
        **both_ways,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        attention_bias=True,
        **_rope(DEEPSEEK_YARN),
    )


def _deepseek_v32(rng: random.Random) -> Iterator[dict[str, Any]]:
    # Contexts of the tests go past what is selected, and begin below it.  So many heads leave no
    # position without a score: of equal ones transformers selects others in other steps.
    both_ways = {"kv_lora_rank": 40, "qk_nope_head_dim": 6, "v_head_dim": 6}
    both_ways["qk_rope_head_dim"] = 4
    yield _latent(
        rng, **both_ways, n_group=4, topk_group=2, index_topk=9, index_head_dim=16, index_n_heads=16
    )
    yield _latent(
        rng, n_group=1, topk_group=1, index_topk=1, index_head_dim=8, index_n_heads=15,
        attention_bias=True, tie_word_embeddings=True,
    )  # fmt: skip
    yield _latent(
        rng, **both_ways, n_group=3, topk_group=2, index_topk=16, index_head_dim=12,
        index_n_heads=17, mlp_layer_types=["sparse", "dense", "sparse"], **_rope(DEEPSEEK_YARN),
    )  # fmt: skip


def _axk2(rng: random.Random) -> Iterator[dict[str, Any]]:
    index = {"index_head_dim": 16, "index_n_heads": 16}
    yield _latent(rng, **index, index_topk=9, gated_norm_rank=6)
    yield _latent(rng, **index, index_topk=14, gated_norm_rank=3, attention_bias=True)
    yield _latent(rng, **index, index_topk=6, norm_topk_prob=False, **_rope(DEEPSEEK_YARN))


def _glm4_moe(rng: random.Random) -> Iterator[dict[str, Any]]:
    sparse = {
        "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 12,
    }  # fmt: skip
    yield _dense(rng, **sparse, use_qk_norm=True, attention_bias=True)
    yield _dense(rng, **sparse, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    yield _dense(
        rng, **sparse | {"first_k_dense_replace": 0, "n_shared_experts": 2}, norm_topk_prob=False,
        tie_word_embeddings=True, **_rope({**YARN, "partial_rotary_factor": 1.0}),
    )  # fmt: skip


def _minimax_m2(rng: random.Random) -> Iterator[dict[str, Any]]:
    half = _rope({"rope_type": "default", "partial_rotary_factor": 0.5})
    yield _dense(rng, num_local_experts=6, num_experts_per_tok=3, head_dim=8, **half)
    yield _dense(rng, num_local_experts=4, num_experts_per_tok=1, head_dim=10)
    yield _dense(
        rng, num_local_experts=5, num_experts_per_tok=2, head_dim=12, tie_word_embeddings=True,
        **_rope(YARN),
    )  # fmt: skip


def _glm_moe_dsa(rng: random.Random) -> Iterator[dict[str, Any]]:
    sizes = {"index_head_dim": 16, "index_n_heads": 16, "num_hidden_layers": 4}
    yield _latent(rng, **sizes, n_group=1, topk_group=1, index_topk=10, index_topk_pattern="FSFS")
    yield _latent(rng, **sizes, n_group=1, topk_group=1, index_topk=5, norm_topk_prob=False)
    yield _latent(
        rng, **sizes, n_group=4, topk_group=2, index_topk=12, index_topk_freq=3,
        index_skip_topk_offset=1, attention_bias=True,
    )  # fmt: skip


def _gpt_oss(rng: random.Random) -> Iterator[dict[str, Any]]:
    sparse = {"num_local_experts": 5, "head_dim": 10, "sliding_window": 6}
    yield _dense(rng, **sparse, num_experts_per_tok=2)  # rotary positions as published: YaRN
    yield _dense(rng, **sparse, num_experts_per_tok=4, attention_bias=False, **_rope(LINEAR))
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    yield _dense(rng, **sparse, num_experts_per_tok=1, layer_types=kinds, tie_word_embeddings=True)


def _deepseek_v4(rng: random.Random) -> Iterator[dict[str, Any]]:
    # Tokens of the tests see past their window, and more entries than they select.
    few, many = "compressed_sparse_attention", "heavily_compressed_attention"

    def flash(few_positions: int, many_positions: int, **given: Any) -> dict[str, Any]:
        sizes = {
            "num_hidden_layers": 4,
            "layer_types": [many, few, "sliding_attention", few],
            "compress_rates": {few: few_positions, many: many_positions},
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "partial_rotary_factor": 0.25,
            "q_lora_rank": rng.choice([12, 18]),
            "n_routed_experts": 7,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": rng.choice([12, 20]),
            "hc_mult": 3,
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 6,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 3,
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
            "hc_sinkhorn_iters": 4,
        }
        found = _dense(rng, **(sizes | given))
        del found["intermediate_size"]
        return found

    yield flash(4, 16)
    yarn = {**YARN, "attention_factor": 1.0, "partial_rotary_factor": 0.25}
    plain = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    turned = {"main": plain, "compress": {**yarn, "rope_theta": 4e4}}
    yield flash(
        2, 32, layer_types=["sliding_attention", few, many, few], hc_mult=2, index_topk=5,
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"], rope_parameters=turned, o_groups=1,
    )  # fmt: skip
    yield flash(
        8, 16, layer_types=[few, many, many, few], hc_mult=4, index_topk=1, sliding_window=5,
        mlp_layer_types=["moe"] * 4, tie_word_embeddings=True, hc_sinkhorn_iters=20, o_groups=4,
        num_experts_per_tok=3, routed_scaling_factor=2.5,
    )  # fmt: skip


_FAMILIES: dict[str, Callable[[random.Random], Iterator[dict[str, Any]]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma3_text": _gemma3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    **STATE_SPACES,
    **linear_attention_configs.FAMILIES,
    # Sizes are drawn by a family's number: new ones come last.
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
    "axk2": _axk2,
    "gemma4_text": _gemma4,
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "qwen4_exp_text": _qwen4_exp,
    "deepseek_v4": _deepseek_v4,
    **linear_attention_configs.NEWER,
}
_NUMBERS = {family: number for number, family in enumerate(_FAMILIES)}


def cases(*families: str) -> list[Case]:
    """All variants of the given families, or of all."""
    return [
        _case(family, variant, fields)
        for family in families or _FAMILIES
        for variant, fields in enumerate(_variants(family))
    ]


def case_of(name: str) -> Case:
    """The case of this name, without the others, which take 0.3 s to make."""
    family, _, variant = name.rpartition("-")
    return _case(family, int(variant), list(_variants(family))[int(variant)])


def _variants(family: str) -> Iterator[dict[str, Any]]:
    return _FAMILIES[family](random.Random(_NUMBERS[family]))


def _case(family: str, variant: int, fields: dict[str, Any]) -> Case:
    seed = fields.pop("seed", 100 * _NUMBERS[family] + variant)
    config = CONFIG_MAPPING[family](**fields)
    rotary = getattr(config, "rope_parameters", None) or {}
    long = rotary.get("rope_type") == "longrope"
    original = rotary.get("original_max_position_embeddings")
    first_chunk = LONGEST_SHORT + 1 if long and original == LONGEST_SHORT else 1
    softcap = fields.get("attn_logit_softcapping")
    # transformers reads the field but does not hand it to the attention it computes.
    options = {"softcap": softcap} if softcap else {}
    return Case(f"{family}-{variant}", config, seed, first_chunk, options)


def families() -> tuple[str, ...]:
    """model_type of all families."""
    return tuple(_FAMILIES)


def first_fields(family: str) -> dict[str, Any]:
    """Fields of a family's first variant, without rotary ones."""
    fields = next(_FAMILIES[family](random.Random(1)))
    left = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "seed")
    return {name: value for name, value in fields.items() if name not in left}

"""Architectures of which one file is another model than the next, or whose fields hang together."""

from typing import Any, Final

from hmt.formats.gguf.architecture import (
    BLOOM,
    BLOOM_TRUNK,
    EXPERTS,
    FOUR_NORMS,
    GEMMA4_NAMES,
    GEMMA4_TRUNK,
    GRANITE,
    GRANITE_MOE,
    INDEXER,
    LATE_NORMS,
    LAYER_NORM,
    MIXTRAL,
    Architecture,
)
from hmt.formats.gguf.fields import (
    SIGMOID,
    Config,
    count,
    flag,
    layer_types,
    number,
    query_bias,
    same,
    sigmoid_only,
    sparse_after,
    tensor,
    window,
)
from hmt.formats.gguf.keys import Keys
from hmt.formats.gguf.rope import rope_parameters

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_NO_GROUPS, _V3_EXPERTS, _V3_GROUPS = (1, 1), 256, (8, 4)
_GLM_5_2_POSITIONS = 1 << 20  # from which on layers share what is selected
_GELU: Final = "gelu_pytorch_tanh"
_ORIGINAL: Final = "rope.scaling.original_context_length"


def llama(keys: Keys) -> Architecture:
    """Llama; with experts Mixtral, with a window Mistral."""
    fields: dict[str, Any] = {"sliding_window": window()}
    if keys.number("expert_count", 0):
        fields |= {
            "num_local_experts": count("expert_count"),
            "num_experts_per_tok": count("expert_used_count"),
        }
        return Architecture("MixtralForCausalLM", "mixtral", fields, MIXTRAL, turned=True)
    if keys.number("attention.sliding_window", 0):
        return Architecture("MistralForCausalLM", "mistral", fields, turned=True)
    return Architecture("LlamaForCausalLM", "llama", {"mlp_bias": False}, turned=True)


def mistral3(keys: Keys) -> Architecture:
    """Ministral 3, whose queries grow with their position; without that Mistral Small 3."""
    if not keys.number("attention.temperature_scale", 0):
        return Architecture(
            "MistralForCausalLM", "mistral", {"sliding_window": window()}, turned=True
        )
    return Architecture(
        "Ministral3ForCausalLM",
        "ministral3",
        {
            "sliding_window": window(),
            "rope_parameters": lambda keys, config: (
                rope_parameters(keys, config["head_dim"], config["max_position_embeddings"], {})
                | {
                    "llama_4_scaling_beta": keys.number("attention.temperature_scale"),
                    "original_max_position_embeddings": keys.count(_ORIGINAL),
                }
            ),
        },
        rotary=False,
        turned=True,
    )


def _gemma_scale(layers: int) -> Any:
    """query_pre_attn_scalar: the head's width, in the model of so many layers another."""
    return lambda keys, config: (
        config["hidden_size"] // config["num_attention_heads"]
        if config["num_hidden_layers"] == layers
        else config["head_dim"]
    )


GEMMA2: Final = Architecture(
    "Gemma2ForCausalLM",
    "gemma2",
    {
        "hidden_activation": _GELU,
        "query_pre_attn_scalar": _gemma_scale(_GEMMA2_27B_LAYERS),
        "sliding_window": count("attention.sliding_window", 4096),
        "layer_types": layer_types(2),
        # llama.cpp's defaults.
        "attn_logit_softcapping": number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": number("final_logit_softcapping", 30.0),
    },
    FOUR_NORMS,
    shifted=True,
)


def _gemma3_rope(keys: Keys, config: Config) -> dict[str, Any]:
    dim, most = config["head_dim"], config["max_position_embeddings"]
    full = rope_parameters(keys, dim, most, {}, theta=1e6)
    if "attention_factor" in full:
        # llama.cpp scales by it in all layers, also in those that see a window.
        raise keys.unread("rope.scaling.attn_factor")
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1e4)}
    return {"full_attention": full, "sliding_attention": local}


GEMMA3: Final = Architecture(
    "Gemma3ForCausalLM",
    "gemma3_text",
    {
        "head_dim": count("attention.key_length", 256),
        "hidden_activation": _GELU,
        "query_pre_attn_scalar": _gemma_scale(_GEMMA3_27B_LAYERS),
        "sliding_window": count("attention.sliding_window"),
        "layer_types": layer_types(6),
        "attn_logit_softcapping": number("attn_logit_softcapping", None),
        "final_logit_softcapping": number("final_logit_softcapping", None),
        "rope_parameters": _gemma3_rope,
    },
    FOUR_NORMS,
    rotary=False,
    shifted=True,
)


def _gemma4_rope(keys: Keys, config: Config) -> dict[str, Any]:
    """In layers without a window a part of each head is rotated: where rope_freqs are 1."""
    dim, most = config["global_head_dim"], config["max_position_embeddings"]
    full = rope_parameters(keys, dim, most, {}, theta=1e6)
    if full["rope_type"] != "default":
        raise keys.unread("rope.scaling.type")
    if keys.count("rope.dimension_count_swa", config["head_dim"]) != config["head_dim"]:
        raise keys.unread("rope.dimension_count_swa", f"and heads have {config['head_dim']}")
    divisors = keys.factors.get("rope_freqs", [1.0] * (dim // 2))
    rotated = divisors.count(1.0)
    stands = divisors[:rotated] == [1.0] * rotated and min(divisors[rotated:], default=1e30) > 1e29
    if not stands or len(divisors) != dim // 2:
        raise keys.unread("rope.dimension_count", "beside rope_freqs that are not 1 and then 1e30")
    full |= {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / dim}
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1e4)}
    return {"full_attention": full, "sliding_attention": local}


def _gemma4_widths(keys: Keys, layers: int, sharing: int) -> tuple[int, bool]:
    """How wide networks are, and whether those of layers that share keys are twice as wide."""
    widths = keys.by_layer("feed_forward_length", layers)
    own, others = set(widths[: layers - sharing]), set(widths[layers - sharing :])
    width = min(own, default=0)
    if own != {width} or others not in ({width}, {2 * width}, set()):
        raise keys.unread("feed_forward_length", "which HMT computes alike in alike layers")
    return width, others == {2 * width}


def gemma4(keys: Keys) -> Architecture:
    """Gemma 4, dense, with embeddings of each layer, or with experts."""
    layers = keys.count("block_count")
    sharing = keys.number("attention.shared_kv_layers", 0)
    width, wide = _gemma4_widths(keys, layers, sharing)
    slides = keys.windows(6, layers)
    heads = keys.by_layer("attention.head_count_kv", layers)
    of: dict[bool, set[int]] = {True: set(), False: set()}
    for number_of_heads, slid in zip(heads, slides, strict=True):
        of[slid].add(number_of_heads)
    if any(len(numbers) != 1 for numbers in of.values()):
        raise keys.unread("attention.head_count_kv", "which HMT computes alike in alike layers")
    full = slides.index(False)
    fields: dict[str, Any] = {
        "hidden_activation": _GELU,
        "num_key_value_heads": min(of[True]),
        "num_global_key_value_heads": min(of[False]),
        "global_head_dim": count("attention.key_length"),
        "head_dim": count("attention.key_length_swa"),
        "attention_k_eq_v": not keys.has_tensor(f"blk.{full}.attn_v.weight"),
        "sliding_window": count("attention.sliding_window"),
        "layer_types": layer_types(6),
        "final_logit_softcapping": number("final_logit_softcapping", None),
        "hidden_size_per_layer_input": number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": same("vocab_size"),
        "num_kv_shared_layers": sharing,
        "intermediate_size": width,
        "use_double_wide_mlp": wide,
        "enable_moe_block": bool(keys.number("expert_count", 0)),
        "rope_parameters": _gemma4_rope,
    }
    value = keys.number("attention.value_length_swa", None)
    if value != keys.number("attention.key_length_swa", None):
        raise keys.unread("attention.value_length_swa")
    if keys.number("expert_count", 0):
        fields |= {
            "num_experts": count("expert_count"),
            "top_k_experts": count("expert_used_count"),
            "moe_intermediate_size": count("expert_feed_forward_length"),
        }
    return Architecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        fields,
        GEMMA4_NAMES,
        GEMMA4_TRUNK,
        rotary=False,
        proportional=True,
        widths=True,
    )


def _gpt_oss_rope(keys: Keys, config: Config) -> dict[str, Any]:
    dim, most = config["head_dim"], config["max_position_embeddings"]
    rope = rope_parameters(keys, dim, most, {}, theta=150000.0)
    return rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope


GPT_OSS: Final = Architecture(
    "GptOssForCausalLM",
    "gpt_oss",
    {
        "intermediate_size": count("expert_feed_forward_length"),
        "num_local_experts": count("expert_count"),
        "num_experts_per_tok": count("expert_used_count"),
        "sliding_window": count("attention.sliding_window"),
        "layer_types": layer_types(2),
        "rope_parameters": _gpt_oss_rope,
    },
    {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    rotary=False,
)


COHERE2MOE: Final = Architecture(
    "Cohere2MoeForCausalLM",
    "cohere2_moe",
    {
        "logit_scale": number("logit_scale"),
        "sliding_window": count("attention.sliding_window"),
        "layer_types": layer_types(4),
        "num_experts": count("expert_count"),
        "num_experts_per_tok": count("expert_used_count"),
        "intermediate_size": count("expert_feed_forward_length"),
        "prefix_dense_intermediate_size": count("feed_forward_length", None),
        "num_shared_experts": number("expert_shared_count", 0),
        "norm_topk_prob": flag("expert_weights_norm", False),
        "expert_selection_fn": lambda keys, config: (
            "sigmoid" if keys.number("expert_gating_func", 1) == SIGMOID else "softmax"
        ),
        "mlp_layer_types": sparse_after("leading_dense_block_count"),
    },
    epsilon=(LAYER_NORM, "layer_norm_eps"),
)


PHI3: Final = Architecture(
    "Phi3ForCausalLM",
    "phi3",
    {
        "sliding_window": window(),
        "original_max_position_embeddings": lambda keys, config: keys.count(
            _ORIGINAL, config["max_position_embeddings"]
        ),
    },
    {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    partial=True,
)
PHIMOE: Final = Architecture(
    "PhimoeForCausalLM",
    "phimoe",
    {
        "sliding_window": window(),
        "num_local_experts": count("expert_count"),
        "num_experts_per_tok": count("expert_used_count"),
        "lm_head_bias": tensor("output.bias"),
        "original_max_position_embeddings": PHI3.fields["original_max_position_embeddings"],
    },
    MIXTRAL,
)


def granitemoe(keys: Keys) -> Architecture:
    """Granite with experts, of which one may be for all tokens."""
    shared = keys.number("expert_shared_feed_forward_length", 0)
    joined = {"block_sparse_moe.input_linear.weight": ("ffn_gate_exps", "ffn_up_exps")}
    fields = {
        **GRANITE,
        "num_local_experts": count("expert_count"),
        "num_experts_per_tok": count("expert_used_count"),
    }
    if not shared:
        return Architecture(
            "GraniteMoeForCausalLM", "granitemoe", fields, GRANITE_MOE, turned=True, joined=joined
        )
    return Architecture(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        fields | {"shared_intermediate_size": count("expert_shared_feed_forward_length")},
        GRANITE_MOE,
        turned=True,
        joined=joined | {"shared_mlp.input_linear.weight": ("ffn_gate_shexp", "ffn_up_shexp")},
    )


def _olmo3_rope(keys: Keys, config: Config) -> dict[str, Any]:
    """Layers that see a window have frequencies that no scaling divides."""
    dim, most = config["head_dim"], config["max_position_embeddings"]
    full = rope_parameters(keys, dim, most, {})
    theta = keys.number("rope.freq_base_swa", full["rope_theta"])
    return {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }


def olmo2(keys: Keys) -> Architecture:
    """OLMo 2; with a window OLMo 3."""
    if not keys.number("attention.sliding_window", 0):
        return Architecture("Olmo2ForCausalLM", "olmo2", names=LATE_NORMS)
    fields = {
        "sliding_window": window(),
        "layer_types": layer_types(4),
        "rope_parameters": _olmo3_rope,
    }
    return Architecture("Olmo3ForCausalLM", "olmo3", fields, LATE_NORMS, rotary=False)


def mellum(keys: Keys) -> Architecture:
    """Mellum 2, with windows or without."""
    fields = {
        **EXPERTS,
        "norm_topk_prob": True,  # as llama.cpp computes it
        "sliding_window": window(),
        "layer_types": layer_types(4 if keys.number("attention.sliding_window", 0) else 1),
        "rope_parameters": _olmo3_rope,
    }
    return Architecture("MellumForCausalLM", "mellum", fields, rotary=False)


def falcon(keys: Keys) -> Architecture:
    """Falcon 7B; with groups of keys the later ones, with one or two norms before each layer."""
    two = keys.has_tensor("blk.0.attn_norm_2.weight")
    new = two or keys.count("attention.head_count_kv", 1) > 1
    norms = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"} if two else {}
    return Architecture(
        "FalconForCausalLM",
        "falcon",
        {
            "new_decoder_architecture": new,
            "num_ln_in_parallel_attn": 2 if two else 1,
            "multi_query": True,
            "parallel_attn": True,
            "alibi": False,
            "bias": query_bias,
            "num_kv_heads": count("attention.head_count_kv", 1),
            "ffn_hidden_size": same("intermediate_size"),
        },
        BLOOM | norms,
        BLOOM_TRUNK,
        "transformer.h.{}.",
        (LAYER_NORM, "layer_norm_epsilon"),
        grouped=True,
        dropped=("head_dim",),
    )


MINIMAX_M2: Final = Architecture(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    {
        "intermediate_size": count("expert_feed_forward_length"),
        "num_local_experts": count("expert_count"),
        "num_experts_per_tok": count("expert_used_count"),
        "scoring_func": sigmoid_only("sigmoid"),
        "use_qk_norm": tensor("blk.0.attn_q_norm.weight"),
    },
    MIXTRAL,
    partial=True,
)


def deepseek2(keys: Keys) -> Architecture:
    """DeepSeek V2; with sigmoids for routers V3 and R1."""
    fields, groups = _latent(keys), _groups(keys, _V3_GROUPS)
    if keys.number("expert_gating_func", 1) == SIGMOID:
        fields |= groups | {"rope_interleave": True}
        fields["norm_topk_prob"] = flag("expert_weights_norm", True)
        return Architecture("DeepseekV3ForCausalLM", "deepseek_v3", fields)
    fields |= groups | {
        "norm_topk_prob": flag("expert_weights_norm", False),
        "topk_method": "group_limited_greedy" if groups["n_group"] > 1 else "greedy",
        "mlp_bias": False,
    }
    return Architecture("DeepseekV2ForCausalLM", "deepseek_v2", fields)


_INDEXER_FIELDS: Final = {
    "index_n_heads": count("attention.indexer.head_count"),
    "index_head_dim": count("attention.indexer.key_length"),
    "index_topk": count("attention.indexer.top_k"),
    "norm_topk_prob": flag("expert_weights_norm", False),
    "scoring_func": sigmoid_only("sigmoid"),
}


def deepseek32(keys: Keys) -> Architecture:
    """DeepSeek V3.2, whose layers have an indexer each."""
    fields = _latent(keys) | _groups(keys, _V3_GROUPS) | _INDEXER_FIELDS
    return Architecture("DeepseekV32ForCausalLM", "deepseek_v32", fields, INDEXER)


def _indexer_types(keys: Keys, config: Config) -> list[str]:
    """Which layers have an indexer; files of before there was a key for it: by their context."""
    layers = config["num_hidden_layers"]
    key = "attention.indexer.types"
    if key in keys:
        return ["full" if full else "shared" for full in keys.pattern(key, 0, layers)]
    every = 4 if config["max_position_embeddings"] >= _GLM_5_2_POSITIONS else 1
    return ["shared" if layer > 2 and (layer - 2) % every else "full" for layer in range(layers)]


def glm_dsa(keys: Keys) -> Architecture:
    """GLM-5, where layers may use what an earlier one's indexer selected."""
    fields = _latent(keys) | _groups(keys, _NO_GROUPS) | _INDEXER_FIELDS
    fields["indexer_types"] = _indexer_types
    return Architecture("GlmMoeDsaForCausalLM", "glm_moe_dsa", fields, INDEXER)


def _groups(keys: Keys, large: tuple[int, int]) -> dict[str, int]:
    """Groups of experts; `large` are those of 256 experts in files that do not say."""
    groups = (
        keys.count("expert_group_count", None) or 0,
        keys.count("expert_group_used_count", None) or 0,
    )
    if not all(groups):
        # Files from before there was a key for it: DeepSeek-V3 and R1 are the ones with groups.
        sigmoid = keys.number("expert_gating_func", 1) == SIGMOID
        groups = large if sigmoid and keys.count("expert_count") == _V3_EXPERTS else _NO_GROUPS
    return {"n_group": groups[0], "topk_group": groups[1]}


def _latent(keys: Keys) -> dict[str, Any]:
    """Fields of latent attention, and of experts behind it."""
    turned = keys.count("rope.dimension_count")
    query = keys.count("attention.key_length_mla", keys.count("attention.key_length"))
    value = keys.count("attention.value_length", query - turned)
    return {
        "q_lora_rank": count("attention.q_lora_rank", None),
        "kv_lora_rank": count("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": query - turned,
        "v_head_dim": count("attention.value_length_mla", value),
        "head_dim": turned,
        "num_key_value_heads": same("num_attention_heads"),
        "attention_bias": False,
        "n_routed_experts": count("expert_count"),
        "num_experts_per_tok": count("expert_used_count"),
        "n_shared_experts": count("expert_shared_count"),
        "moe_intermediate_size": count("expert_feed_forward_length"),
        "first_k_dense_replace": number("leading_dense_block_count", 0),
        "routed_scaling_factor": number("expert_weights_scale", 1.0),
    }

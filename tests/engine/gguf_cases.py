"""Small models of each architecture that llama.cpp's converter is asked about."""

from typing import Any

SMALL = {"num_hidden_layers": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
RECURS, ATTENDS = "linear_attention", "full_attention"
GRANITE_HYBRID: dict[str, Any] = {
    "layer_types": [RECURS, ATTENDS, RECURS, RECURS],
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "mamba_n_groups": 2,
    "hidden_size": 64,
}
FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 128, "head_dim": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
    "mamba_n_groups": 2,
}  # fmt: skip
FACTORS: dict[str, Any] = {
    "mamba_rms_norm": False, "embedding_multiplier": 4.0, "lm_head_multiplier": 2.0,
    "key_multiplier": 0.5, "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5,
    "ssm_in_multiplier": 0.5, "ssm_out_multiplier": 2.0, "ssm_multipliers": [2.0] * 5,
    "mlp_multipliers": [2.0, 0.5],
}  # fmt: skip
MAMBA: dict[str, Any] = {"state_size": 4, "intermediate_size": 128}
JAMBA: dict[str, Any] = {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 4}
KDA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_key_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "q_lora_rank": None,
    "n_shared_experts": 1,
}
INDEX: dict[str, Any] = SMALL | {
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "num_key_value_heads": 4,
    "mlp_layer_types": ["dense", "sparse"],
    "first_k_dense_replace": 1,
}
CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
# (type of transformers, fields beside every_type's) by architecture and what is special.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", SMALL | {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        SMALL | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    ),
    "qwen2moe": ("qwen2_moe", SMALL),
    "glm4": ("glm4", SMALL | {"attention_bias": True}),
    "glm4moe": ("glm4_moe", SMALL | {"use_qk_norm": True, "attention_bias": True}),
    "minimax-m2": (
        "minimax_m2",
        SMALL
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "seed_oss": ("seed_oss", SMALL),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4}),
    "command-r": ("cohere", SMALL),
    "command-r, norms": ("cohere", SMALL | {"use_qk_norm": True}),
    "mistral3": (
        "ministral3",
        SMALL
        | {
            "rope_parameters": YARN
            | {
                "llama_4_scaling_beta": 0.1,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
    "granite": (
        "granite",
        SMALL
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "granitemoe": (
        "granitemoe",
        SMALL
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "granitemoe, shared": ("granitemoeshared", SMALL | {"shared_intermediate_size": 64}),
    "olmo2": ("olmo2", SMALL),
    "olmo2, windows": ("olmo3", SMALL | {"num_hidden_layers": 4, "sliding_window": 8}),
    "olmoe": ("olmoe", SMALL | {"num_key_value_heads": 4}),
    "olmo": ("olmo", SMALL | {"clip_qkv": 1.5}),
    "hunyuan-dense": ("hunyuan_v1_dense", SMALL),
    "hunyuan-moe": ("hunyuan_v1_moe", SMALL | {"num_experts": 8, "moe_topk": [2] * 2}),
    "exaone4": ("exaone4", SMALL | {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4, windows": ("exaone4", {"sliding_window": 8}),
    "ernie4_5": ("ernie4_5", SMALL),
    "ernie4_5-moe": ("ernie4_5_moe", SMALL | {"intermediate_size": 128}),
    "dots1": ("dots1", SMALL | {"num_key_value_heads": 4}),
    "phi2": ("phi", SMALL | {"num_key_value_heads": 4, "intermediate_size": 256}),
    "phimoe": ("phimoe", SMALL | {"lm_head_bias": True, "attention_bias": True}),
    "starcoder2": ("starcoder2", SMALL),
    "stablelm": ("stablelm", SMALL | {"use_qkv_bias": True}),
    "falcon": ("falcon", SMALL | {"num_kv_heads": 1, "ffn_hidden_size": 256}),
    "falcon, new": (
        "falcon",
        SMALL | {"ffn_hidden_size": 256, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gptneox": ("gpt_neox", SMALL),
    "bloom": ("bloom", SMALL | {"n_layer": 2}),
    "mpt": ("mpt", SMALL | {"n_layers": 2}),
    "gpt2": ("gpt2", SMALL | {"n_layer": 2}),
    "nemotron": ("nemotron", SMALL),
    "minicpm3": ("minicpm3", SMALL | {"v_head_dim": 16}),
    "arcee": ("arcee", SMALL),
    "gemma4": ("gemma4_text, large", {"final_logit_softcapping": 30.0}),
    "gemma4, rows of layers": (
        "gemma4_text",
        {
            "use_double_wide_mlp": True,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}},
        },
    ),
    "gemma4, experts": ("gemma4_text, experts", {}),
    "afmoe": ("afmoe", {"mup_enabled": True}),
    "starcoder": ("gpt_bigcode", SMALL | {"n_layer": 2}),
    "chatglm": ("glm", SMALL | {"rms_norm_eps": 1e-5}),
    "jais2": ("jais2", SMALL),
    "exaone-moe": ("exaone_moe", {}),
    "cohere2moe": ("cohere2_moe", {}),
    "mellum": (
        "mellum",
        {
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            # llama.cpp has one base for all layers.
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 5000.0}
                for kind in ("full_attention", "sliding_attention")
            },
        },
    ),
    "hy-v3": ("hy_v3", {}),
    "qwen3next": ("qwen3_next", DELTA | {"num_hidden_layers": 4}),
    "qwen35": ("qwen3_5_text", DELTA | {"num_hidden_layers": 4}),
    "qwen35, as many keys": ("qwen3_5_text", DELTA | {"linear_num_value_heads": 2}),
    # Rows of whole blocks of 256, of which each has inputs of two heads.
    "qwen35, wide": (
        "qwen3_5_text",
        DELTA
        | SMALL
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "hidden_size": 256,
            "intermediate_size": 256,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_value_heads": 4,
        },
    ),
    "qwen35moe": ("qwen3_5_moe_text", DELTA | {"num_hidden_layers": 4}),
    "lfm2": ("lfm2", CONV),
    "lfm2, as wide as given": ("lfm2", CONV | {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2_moe", CONV | {"num_dense_layers": 1}),
    "deepseek2, lite": ("glm4_moe_lite", SMALL),
    "deepseek32": ("deepseek_v32", INDEX),
    "glm-dsa": ("glm_moe_dsa", INDEX | {"indexer_types": ["full", "shared"]}),
    "kimi-linear": ("kimi_linear", KDA),
    "bailingmoe3": ("bailing_hybrid", KDA | {"head_dim": 16, "kda_safe_gate": True}),
    "mamba": ("mamba", SMALL | MAMBA),
    "mamba, norms": ("falcon_mamba", SMALL | MAMBA | {"tie_word_embeddings": False}),
    "mamba2": ("mamba2", SMALL | {"n_groups": 2}),
    "jamba": ("jamba", JAMBA | {"num_experts": 8, "mamba_dt_rank": 4}),
    "jamba, dense": (
        "jamba",
        SMALL | JAMBA | {"attn_layer_offset": 0, "num_experts": 1, "num_experts_per_tok": 1},
    ),
    "granitehybrid": (
        "granitemoehybrid",
        GRANITE_HYBRID | {"num_local_experts": 0, "intermediate_size": 48},
    ),
    "granitehybrid, experts": ("granitemoehybrid", GRANITE_HYBRID),
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": [RECURS, "mlp", ATTENDS, "mlp"], "n_groups": 2},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {"layers_block_type": [RECURS, "moe", ATTENDS, "moe"], "n_groups": 2},
    ),
    "nemotron_h_moe, latent": (
        "nemotron_h",
        {"layers_block_type": [RECURS, "moe", ATTENDS, "moe"], "moe_latent_size": 32},
    ),
    "falcon-h1": ("falcon_h1", SMALL | FALCON_H1),
    "falcon-h1, factors": ("falcon_h1", SMALL | FALCON_H1 | FACTORS),
}

# What else published configurations say, that the converter needs and transformers does not; None:
# they have no such field.
PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "gptneox": {"rotary_pct": 0.25},
    "gpt2": {"n_ctx": 128},
    "phimoe": {"original_max_position_embeddings": 128},
    "afmoe": {"route_norm": True},
    "dots1": {"scoring_func": "sigmoid"},
    "deepseek2, lite": {"scoring_func": "sigmoid", "first_k_dense_replace": 1},
    "deepseek32": {"scoring_func": "sigmoid", "first_k_dense_replace": 1},
    "glm-dsa": {"scoring_func": "sigmoid", "first_k_dense_replace": 1},
    "exaone-moe": {"scoring_func": "sigmoid"},
    "granitehybrid": {
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_experts_per_tok": 0,
    },
    "granitehybrid, experts": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "nemotron_h": {
        "hybrid_override_pattern": "M-*-",
        "num_hidden_layers": 4,
        "layers_block_type": None,
        "layer_types": None,
        "num_experts_per_tok": None,
        "num_local_experts": None,
        "n_routed_experts": None,
        "n_group": None,
        "topk_group": None,
    },
    "minimax-m2": {"rotary_dim": 8, "scoring_func": "sigmoid"},
    "kimi-linear": {
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
        "moe_router_activation_func": "sigmoid",
    },
    "bailingmoe3": {
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
        "head_dim": 16,
        "layer_group_size": 4,
        "moe_shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "first_k_dense_replace": 1,
    },
    "hunyuan-moe": {
        "moe_intermediate_size": [96] * 2,
        "moe_topk": [2] * 2,
        "num_shared_expert": [1] * 2,
    },
}
# How published configurations spell what transformers spells otherwise.
SPELLED = {"PhimoeForCausalLM": "PhiMoEForCausalLM", "MptForCausalLM": "MPTForCausalLM"}
SPELLED |= {"BailingHybridForCausalLM": "BailingMoeV3ForCausalLM"}

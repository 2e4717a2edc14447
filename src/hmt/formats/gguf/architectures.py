"""llama.cpp's architectures as transformers' causal language models: one table.

A row says which class computes an architecture, which of its fields are found under which key
(beside those that all have, see config.py), what its tensors are called (beside the usual names,
LAYER and TRUNK), and what llama.cpp's convert_hf_to_gguf.py does to its numbers, which names.py
undoes.  A function stands where the file decides: see special.py.  Architectures with recurrent
state stand in hybrid.py and state_space.py.

Keys and names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, the `gguf` package, and
llama.cpp's `load_arch_hparams` and `load_arch_tensors` of each architecture.
"""

from collections.abc import Callable, Mapping
from typing import Final

from hmt.formats.gguf.architecture import (
    BLOOM,
    BLOOM_TRUNK,
    EARLY_NORM,
    EXPERTS,
    FOUR_NORMS,
    GPT2,
    GPT2_TRUNK,
    GRANITE,
    LATE_NORMS,
    LAYER_NORM,
    QUERY_NORMS,
    SIGMOID_EXPERTS,
    Architecture,
)
from hmt.formats.gguf.fields import (
    count,
    flag,
    layer_types,
    must,
    number,
    only,
    query_bias,
    same,
    sigmoid_only,
    sparse_after,
    tensor,
    window,
)
from hmt.formats.gguf.hybrid import HYBRIDS
from hmt.formats.gguf.keys import Keys
from hmt.formats.gguf.qwen import QWENS
from hmt.formats.gguf.special import (
    COHERE2MOE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    MINIMAX_M2,
    PHI3,
    PHIMOE,
    deepseek2,
    deepseek32,
    falcon,
    gemma4,
    glm_dsa,
    granitemoe,
    llama,
    mellum,
    mistral3,
    olmo2,
)
from hmt.formats.gguf.state_space import (
    FALCON_H1,
    JAMBA,
    MAMBA2,
    granitehybrid,
    mamba,
    nemotron_h,
)

_GELU: Final = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_BIASES: Final = {"attention_bias": query_bias, "mlp_bias": False}
_QWEN3_EXPERTS: Final = {**EXPERTS, "norm_topk_prob": True}  # as llama.cpp computes it

ARCHITECTURES: Final[Mapping[str, Architecture | Callable[[Keys], Architecture]]] = {
    **HYBRIDS,
    **QWENS,
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        "afmoe",
        {
            **EXPERTS,
            "num_dense_layers": number("leading_dense_block_count", 0),
            "num_shared_experts": count("expert_shared_count"),
            "route_scale": number("expert_weights_scale", 1.0),
            "mup_enabled": sigmoid_only(),
            "route_norm": must("expert_weights_norm", True, False),
            "sliding_window": window(),
            "layer_types": layer_types(4),
        },
        FOUR_NORMS
        | {
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "attn_gate": "self_attn.gate_proj",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
    ),
    "arcee": Architecture(
        "ArceeForCausalLM", "arcee", {"hidden_act": "relu2", "mlp_bias": False}, turned=True
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "bloom",
        names=BLOOM,
        trunk=BLOOM_TRUNK,
        at="transformer.h.{}.",
        epsilon=(LAYER_NORM, "layer_norm_epsilon"),
        rotary=False,
        grouped=True,
    ),
    "chatglm": Architecture(
        "GlmForCausalLM", "glm", _BIASES, {"ffn_up": "mlp.gate_up_proj"}, partial=True
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        "cohere2",
        {
            "logit_scale": number("logit_scale"),
            "sliding_window": count("attention.sliding_window"),
            "layer_types": layer_types(4),
        },
        epsilon=(LAYER_NORM, "layer_norm_eps"),
    ),
    "cohere2moe": COHERE2MOE,
    "command-r": Architecture(
        "CohereForCausalLM",
        "cohere",
        {
            "logit_scale": lambda keys, config: keys.number("logit_scale", 0) or 1.0,
            "use_qk_norm": tensor("blk.0.attn_q_norm.weight"),
        },
        epsilon=(LAYER_NORM, "layer_norm_eps"),
    ),
    "deepseek2": deepseek2,
    "deepseek32": deepseek32,
    "dots1": Architecture(
        "Dots1ForCausalLM",
        "dots1",
        {
            **SIGMOID_EXPERTS,
            "norm_topk_prob": flag("expert_weights_norm", False),
            "sliding_window": None,
            "attention_bias": query_bias,
        },
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", {"use_bias": query_bias}),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {
            "use_bias": query_bias,
            "moe_num_experts": count("expert_count"),
            "moe_k": count("expert_used_count"),
            "moe_intermediate_size": count("expert_feed_forward_length"),
            "moe_num_shared_experts": number("expert_shared_count", 0),
            "moe_layer_start_index": number("leading_dense_block_count", 0),
            "moe_layer_end_index": -1,
            "moe_layer_interval": count("interleave_moe_layer_step", 1),
        },
        {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        {
            **SIGMOID_EXPERTS,
            "num_experts": count("expert_count"),
            "num_shared_experts": count("expert_shared_count", 1),
            "norm_topk_prob": flag("expert_weights_norm", False),
            "sliding_window": count("attention.sliding_window", 128),
            "layer_types": layer_types(4),
            "mlp_layer_types": sparse_after("leading_dense_block_count"),
        },
        {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    ),
    "exaone4": Architecture(
        "Exaone4ForCausalLM",
        "exaone4",
        {
            "sliding_window": window(),
            "layer_types": lambda keys, config: layer_types(
                4 if keys.number("attention.sliding_window", 0) else 1
            )(keys, config),
        },
        LATE_NORMS,
    ),
    "falcon": falcon,
    "falcon-h1": FALCON_H1,
    "gemma": Architecture("GemmaForCausalLM", "gemma", _GELU, shifted=True),
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma4": gemma4,
    "glm-dsa": glm_dsa,
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        _BIASES,
        {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        partial=True,
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **SIGMOID_EXPERTS,
            "norm_topk_prob": flag("expert_weights_norm", False),
            "use_qk_norm": tensor("blk.0.attn_q_norm.weight"),
        },
        EARLY_NORM,
        partial=True,
    ),
    "gpt-oss": GPT_OSS,
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        {"n_inner": same("intermediate_size")},
        GPT2,
        GPT2_TRUNK,
        "transformer.h.{}.",
        (LAYER_NORM, "layer_norm_epsilon"),
        rotary=False,
        transposed=True,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {
            "hidden_act": "gelu",
            "use_parallel_residual": flag("use_parallel_residual", True),
            "attention_bias": query_bias,
        },
        {
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        "gpt_neox.layers.{}.",
        (LAYER_NORM, "layer_norm_eps"),
        partial=True,
        grouped=True,
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", GRANITE, turned=True),
    "granitehybrid": granitehybrid,
    "granitemoe": granitemoe,
    "hy_v3": Architecture(
        "HYV3ForCausalLM",
        "hy_v3",
        {
            **EXPERTS,
            "num_shared_experts": lambda keys, config: (
                keys.count("expert_shared_feed_forward_length")
                // keys.count("expert_feed_forward_length")
            ),
            "router_scaling_factor": number("expert_weights_scale", 1.0),
            "norm_topk_prob": must("expert_weights_norm", True, False),
            "scoring_func": sigmoid_only("sigmoid"),
        },
        {
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
    ),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", names=QUERY_NORMS
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        {
            "num_experts": count("expert_count"),
            "moe_topk": count("expert_used_count"),
            "intermediate_size": count("expert_feed_forward_length"),
            "num_shared_expert": only("expert_shared_count", 1),
        },
        QUERY_NORMS
        | {
            "ffn_gate_inp": "mlp.gate.wg",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
    ),
    # Its converter divides queries, keys and values, and orders their rows as it does llama's.
    "internlm2": Architecture("LlamaForCausalLM", "llama", {"mlp_bias": False}, turned=True),
    "jais2": Architecture(
        "Jais2ForCausalLM",
        "jais2",
        {"hidden_act": "relu2", **_BIASES, "mlp_bias": tensor("blk.0.ffn_up.bias")},
        epsilon=(LAYER_NORM, "layer_norm_eps"),
    ),
    "jamba": JAMBA,
    "llama": llama,
    "mamba": mamba,
    "mamba2": MAMBA2,
    "mellum": mellum,
    # Computes what Granite does, with its own scales.
    "minicpm": Architecture(
        "GraniteForCausalLM",
        "granite",
        {
            **GRANITE,
            "embedding_multiplier": number("embedding_scale"),
            "residual_multiplier": number("residual_scale"),
        },
        turned=True,
    ),
    "minicpm3": Architecture(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        {
            "q_lora_rank": count("attention.q_lora_rank"),
            "kv_lora_rank": count("attention.kv_lora_rank"),
            "qk_rope_head_dim": count("rope.dimension_count"),
            "qk_nope_head_dim": lambda keys, config: (
                keys.count("attention.key_length") - keys.count("rope.dimension_count")
            ),
            "v_head_dim": lambda keys, config: (
                config["hidden_size"] // config["num_attention_heads"]
            ),
            "num_key_value_heads": same("num_attention_heads"),
            "head_dim": count("rope.dimension_count"),
            "scale_emb": 12.0,  # these three stand in llama.cpp's code
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
    ),
    "minimax-m2": MINIMAX_M2,
    "mistral3": mistral3,
    "mpt": Architecture(
        "MptForCausalLM",
        "mpt",
        {
            "expansion_ratio": lambda keys, config: (
                config["intermediate_size"] // config["hidden_size"]
            ),
            "attn_config": lambda keys, config: {
                "alibi": True,
                "alibi_bias_max": keys.count("attention.max_alibi_bias"),
                "clip_qkv": keys.number("attention.clamp_kqv", 0) or None,
            },
        },
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        "transformer.blocks.{}.",
        (LAYER_NORM, "layer_norm_epsilon"),
        rotary=False,
    ),
    "nemotron": Architecture(
        "NemotronForCausalLM",
        "nemotron",
        {"hidden_act": "relu2", **_BIASES},
        epsilon=(LAYER_NORM, "norm_eps"),
        partial=True,
        shifted=True,
    ),
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "olmo": Architecture(
        "OlmoForCausalLM",
        "olmo",
        {
            "clip_qkv": lambda keys, config: keys.number("attention.clamp_kqv", 0) or None,
            "layer_norm_eps": only(LAYER_NORM, 1e-5),
        },
        epsilon=(LAYER_NORM, "layer_norm_eps"),
        turned=True,
    ),
    "olmo2": olmo2,
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        "olmoe",
        {
            "num_experts": count("expert_count"),
            "num_experts_per_tok": count("expert_used_count"),
            "intermediate_size": lambda keys, config: keys.count(
                "expert_feed_forward_length", config["intermediate_size"]
            ),
            "norm_topk_prob": False,
        },
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        "phi",
        {"hidden_act": "gelu_new", "qk_layernorm": False},
        {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.final_layernorm",
            "output": "lm_head",
        },
        epsilon=(LAYER_NORM, "layer_norm_eps"),
        partial=True,
    ),
    "phi3": PHI3,
    "phimoe": PHIMOE,
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        "seed_oss",
        {**_BIASES, "attention_out_bias": tensor("blk.0.attn_output.bias")},
        EARLY_NORM,
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        "smollm3",
        # Every fourth layer has no positions, which stands in llama.cpp's code.
        {**_BIASES, "no_rope_layer_interval": 4, "use_sliding_window": False},
        turned=True,
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        "stablelm",
        {
            "use_qkv_bias": query_bias,
            "qk_layernorm": tensor("blk.0.attn_q_norm.weight"),
            # llama.cpp goes by the second norm, whatever use_parallel_residual says.
            "use_parallel_residual": lambda keys, config: (
                keys.flag("use_parallel_residual", True)
                and not keys.has_tensor("blk.0.ffn_norm.weight")
            ),
        },
        {
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
        epsilon=(LAYER_NORM, "layer_norm_eps"),
        partial=True,
    ),
    "starcoder": Architecture(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        {
            "n_inner": same("intermediate_size"),
            "multi_query": lambda keys, config: config["num_key_value_heads"] == 1,
        },
        GPT2,
        GPT2_TRUNK,
        "transformer.h.{}.",
        (LAYER_NORM, "layer_norm_epsilon"),
        rotary=False,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": query_bias,
            "sliding_window": None,
        },
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=(LAYER_NORM, "norm_epsilon"),
    ),
}

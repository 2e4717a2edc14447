"""Architectures in which some layers attend and the others have recurrent state.

What llama.cpp's converter does to delta nets, beside what it does to others (conversion/qwen.py):

- `A_log` is stored as -exp(A_log), and convolutions without their dimension of one.
- Norms have 1 added, except for the norm of a delta net's results.
- Qwen3-Next's projection of queries, keys, values and gates, which has these by key heads, becomes
  two: of Q, K and V (attn_qkv), and of gates (attn_gate), each ordered by head.
  Files of 2025 have it as it was (ssm_in).
- Qwen3.5 publishes the heads of values by key heads: all of the first one, then all of the second.
  The file has the first of each key head, then the second of each, and so on: they are "tiled".

Of Kimi Linear and Ling 3 (conversion/kimi_linear.py, bailingmoe3.py): convolutions of queries, keys
and values are apart; `A_log` is stored as -exp(A_log), or as exp(A_log); kv_b is two tensors, as
DeepSeek's; Ling's projections to decays and gates are called as the first of Kimi's two.
"""

from typing import Any, Final

from hmt.formats.gguf.architecture import EARLY_NORM, EXPERTS, TRUNK, Architecture
from hmt.formats.gguf.fields import (
    Config,
    count,
    flag,
    must,
    number,
    same,
    sigmoid_only,
    sparse_after,
)
from hmt.formats.gguf.keys import Keys

_DELTA: Final = EARLY_NORM | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a.bias": "linear_attn.A_log",  # its name ends with neither .weight nor .bias
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_NEXT: Final = _DELTA | {
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
_CONV: Final = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
_CONV_TRUNK: Final = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",  # of the last layer's result, whatever its name says
    "output": "lm_head",
}


def _layer_types(keys: Keys, config: Config) -> list[str]:
    """By attention.recurrent_layers; in older files all layers but the last of each period."""
    every, layers = keys.count("full_attention_interval", 4), config["num_hidden_layers"]
    recurrent = keys.pattern("attention.recurrent_layers", every, layers)
    return ["linear_attention" if recurs else "full_attention" for recurs in recurrent]


def _value_dim(keys: Keys, config: Config) -> int:
    inner, heads = keys.count("ssm.inner_size"), config["linear_num_value_heads"]
    if inner % heads:
        raise keys.unread("ssm.inner_size", f"which {heads} heads cannot share evenly")
    return int(inner) // int(heads)


_DELTA_FIELDS: Final = {
    "layer_types": _layer_types,
    "linear_conv_kernel_dim": count("ssm.conv_kernel"),
    "linear_key_head_dim": count("ssm.state_size"),
    "linear_num_key_heads": count("ssm.group_count"),
    "linear_num_value_heads": count("ssm.time_step_rank"),
    "linear_value_head_dim": _value_dim,
}
_DELTA_EXPERTS: Final = {
    **EXPERTS,
    "norm_topk_prob": True,  # as llama.cpp computes it
    "shared_expert_intermediate_size": count("expert_shared_feed_forward_length"),
}
_TILED: Final = {
    "linear_value_heads_tiled": lambda keys, config: (
        config["linear_num_value_heads"] != config["linear_num_key_heads"]
    ),
}

QWEN3NEXT: Final = Architecture(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    {
        **_DELTA_FIELDS,
        **_DELTA_EXPERTS,
        "linear_gates_apart": lambda keys, config: (
            not any(
                keys.has_tensor(f"blk.{layer}.ssm_in.weight")
                for layer in range(config["num_hidden_layers"])
            )
        ),
    },
    _NEXT,
    partial=True,
    shifted=True,
)
QWEN35: Final = Architecture(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    {**_DELTA_FIELDS, **_TILED},
    _DELTA,
    partial=True,
    shifted=True,
)
QWEN35MOE: Final = Architecture(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    {**_DELTA_FIELDS, **_DELTA_EXPERTS, **_TILED},
    _DELTA,
    partial=True,
    shifted=True,
)


def heads_by_layer(keys: Keys, config: Config) -> list[int]:
    """Heads of keys: 0 where a layer has a convolution."""
    return keys.by_layer("attention.head_count_kv", config["num_hidden_layers"])


def heads_of_keys(keys: Keys, config: Config) -> int:
    """Of layers that attend, which must all have as many."""
    heads = {heads for heads in heads_by_layer(keys, config) if heads}
    if len(heads) != 1:
        raise keys.unread("attention.head_count_kv", "and layers that attend must all have as many")
    return heads.pop()


_CONV_FIELDS: Final[dict[str, Any]] = {
    "num_key_value_heads": heads_of_keys,
    "layer_types": lambda keys, config: [
        "full_attention" if heads else "conv" for heads in heads_by_layer(keys, config)
    ],
    "conv_L_cache": count("shortconv.l_cache"),
    "conv_bias": False,
    "block_auto_adjust_ff_dim": False,  # the file has the width that came of it
}
LFM2: Final = Architecture(
    "Lfm2ForCausalLM",
    "lfm2",
    _CONV_FIELDS,
    _CONV,
    _CONV_TRUNK,
    epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
)
LFM2MOE: Final = Architecture(
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    {
        **_CONV_FIELDS,
        **EXPERTS,
        "num_dense_layers": number("leading_dense_block_count", 0),
        "norm_topk_prob": True,  # as llama.cpp computes it
        "routed_scaling_factor": lambda keys, config: keys.number("expert_weights_scale", 0) or 1.0,
        "use_expert_bias": sigmoid_only(),
    },
    _CONV,
    _CONV_TRUNK,
    epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
)

_KDA: Final = {
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a.bias": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
_KIMI: Final = _KDA | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj",
    "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj",
}
_LING: Final = _KDA | {
    "ssm_f_a": "self_attn.f_proj",
    "ssm_g_a": "self_attn.g_proj",
    "attn_gate": "self_attn.g_proj",  # of layers with latent attention
}


def _nope_dim(keys: Keys, config: Config) -> int:
    whole, turned = keys.count("attention.key_length_mla"), int(config["qk_rope_head_dim"])
    if whole <= turned:
        raise keys.unread("attention.key_length_mla", f"of which {turned} turn")
    return int(whole) - turned


_KDA_FIELDS: Final[dict[str, Any]] = {
    "num_key_value_heads": same("num_attention_heads"),
    "layer_types": lambda keys, config: [
        "full_attention" if heads else "linear_attention" for heads in heads_by_layer(keys, config)
    ],
    "mlp_layer_types": sparse_after("leading_dense_block_count"),
    "linear_head_dim": count("kda.head_dim"),
    "linear_num_heads": same("num_attention_heads"),
    "linear_conv_kernel_dim": count("ssm.conv_kernel"),
    "q_lora_rank": count("attention.q_lora_rank", None),
    "kv_lora_rank": count("attention.kv_lora_rank"),
    "qk_rope_head_dim": count("rope.dimension_count"),
    "qk_nope_head_dim": _nope_dim,
    "v_head_dim": count("attention.value_length_mla"),
    "head_dim": same("qk_rope_head_dim"),
    "attention_bias": False,
    "num_local_experts": count("expert_count"),
    "num_experts_per_tok": count("expert_used_count"),
    "moe_intermediate_size": count("expert_feed_forward_length"),
    "n_shared_experts": count("expert_shared_count"),
    "routed_scaling_factor": number("expert_weights_scale", 1.0),
    "n_group": count("expert_group_count", 1),
    "topk_group": count("expert_group_used_count", 1),
    "scoring_func": sigmoid_only("sigmoid"),
}
KIMI_LINEAR: Final = Architecture(
    "KimiLinearForCausalLM",
    "kimi_linear",
    {**_KDA_FIELDS, "norm_topk_prob": True},  # as llama.cpp computes it
    _KIMI,
    rotary=False,
)
BAILINGMOE3: Final = Architecture(
    "BailingHybridForCausalLM",
    "bailing_hybrid",
    {
        **_KDA_FIELDS,
        "norm_topk_prob": flag("expert_weights_norm", False),
        "kda_safe_gate": must("kda.safe_gate", True, True),
        "kda_lower_bound": number("kda.gate_lower_bound"),
        "num_nextn_predict_layers": 0,
    },
    _LING,
    {**TRUNK, "token_embd": "model.word_embeddings"},
)
HYBRIDS: Final = {
    "bailingmoe3": BAILINGMOE3,
    "kimi-linear": KIMI_LINEAR,
    "lfm2": LFM2,
    "lfm2moe": LFM2MOE,
    "qwen3next": QWEN3NEXT,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35MOE,
}

"""What is said of one of llama.cpp's architectures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hmt.formats.gguf.fields import count, number, sigmoid_only

TRUNK: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER: Final = {
    # Of layers that predict further tokens, in the names of DeepSeek-V3's checkpoints.
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

EARLY_NORM: Final = {
    "post_attention_norm": "post_attention_layernorm"
}  # llama.cpp's name of ffn_norm
FOUR_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LATE_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
GRANITE_MOE: Final = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
GEMMA4_NAMES: Final = FOUR_NORMS | {
    "layer_output_scale.weight": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA4_TRUNK: Final = TRUNK | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
INDEXER: Final = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
QUERY_NORMS: Final = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
GPT2: Final = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT2_TRUNK: Final = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
BLOOM: Final = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
BLOOM_TRUNK: Final = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures.

    causal       entry of `architectures` in config.json
    model_type   of transformers
    fields       values of config.json, or how they are read; they override those that all have
    names        of tensors in a layer where they are not LAYER's; "{}" stands for the number of an
                 expert or a head, whose tensors llama.cpp stacks
    trunk        of those outside of layers
    at           what their names begin with, with the layer to fill in
    epsilon      key and field of the norms' epsilon
    partial      a part of each head may be rotated
    theta        base of rotary frequencies where the file has none
    rotary       its rotary positions are read by one of `fields`, or it has none
    turned       rows of queries and keys lie in llama's order
    shifted      1 has been added to norms
    grouped      queries, keys and values of a fused tensor lie one after the other, and not by
                 groups of heads
    transposed   matrices inside layers are [in, out] in transformers
    joined       tensors of transformers that llama.cpp has in two, one after the other
    widths       files say by layer how wide networks are
    attends      some layers attend; otherwise files have no heads and no networks
    proportional rope_freqs tells which part of a head is rotated
    dropped      fields that all have and this one must not
    """

    causal: str
    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    trunk: Mapping[str, str] = field(default_factory=lambda: TRUNK)
    at: str = "model.layers.{}."
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    partial: bool = False
    theta: float = 10000.0
    rotary: bool = True
    turned: bool = False
    shifted: bool = False
    grouped: bool = False
    transposed: bool = False
    joined: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    widths: bool = False
    attends: bool = True
    proportional: bool = False
    dropped: tuple[str, ...] = ()


LAYER_NORM: Final = "attention.layer_norm_epsilon"
EXPERTS: Final[Mapping[str, Any]] = {
    "num_experts": count("expert_count"),
    "num_experts_per_tok": count("expert_used_count"),
    "moe_intermediate_size": count("expert_feed_forward_length"),
}
SIGMOID_EXPERTS: Final[Mapping[str, Any]] = {
    "n_routed_experts": count("expert_count"),
    "num_experts_per_tok": count("expert_used_count"),
    "moe_intermediate_size": count("expert_feed_forward_length"),
    "n_shared_experts": count("expert_shared_count"),
    "first_k_dense_replace": number("leading_dense_block_count", 0),
    "routed_scaling_factor": number("expert_weights_scale", 1.0),
    "n_group": count("expert_group_count", 1),
    "topk_group": count("expert_group_used_count", 1),
    "scoring_func": sigmoid_only("sigmoid"),
}
GRANITE: Final[Mapping[str, Any]] = {
    "attention_multiplier": lambda keys, config: (
        keys.number("attention.scale", 0) or config["head_dim"] ** -0.5
    ),
    "embedding_multiplier": number("embedding_scale", 1.0),
    "residual_multiplier": number("residual_scale", 1.0),
    "logits_scaling": number("logit_scale"),
    "mlp_bias": False,
}

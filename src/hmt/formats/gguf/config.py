"""A GGUF file's metadata as the config.json that Hugging Face publishes for the same model."""

from collections.abc import Mapping
from typing import Any, Final

from hmt.base.errors import HeaderError, UnknownArchitectureError
from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.gguf.keys import Keys
from hmt.formats.gguf.rope import rope_parameters

ARCHITECTURES: Final = (
    "deepseek2",
    "gemma3",
    "gpt-oss",
    "llama",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3moe",
)

_GEMMA3_PATTERN: Final = 6  # every sixth layer sees everything, which llama.cpp takes for granted
_GEMMA3_27B_LAYERS: Final = 62
_NO_GROUPS, _V3_EXPERTS, _V3_GROUPS = (1, 1), 256, (8, 4)
_SIGMOID: Final = 2  # expert_gating_func


def read_config(
    metadata: Mapping[str, Any],
    records: Mapping[str, TensorRecord],
    factors: Mapping[str, list[float]],
    what: str,
) -> dict[str, Any]:
    """The config.json of the model in a GGUF file.

    factors   numbers of the tensors rope_freqs, rope_factors_long and rope_factors_short
    what      the file, for messages
    Raises UnknownArchitectureError for one that HMT does not have, HeaderError where something is
    missing or absurd.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"{what} is of architecture {architecture!r}; of GGUF files HMT runs "
            f"{', '.join(ARCHITECTURES)}"
        )
    keys = Keys(metadata, architecture, what)
    table = records.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise HeaderError(f"{what} has no matrix token_embd.weight: download it again")
    config = _common(keys, records, table.shape[0])
    config |= _FAMILIES[architecture](keys, config)
    if "rope_parameters" not in config:
        dim, most = config["head_dim"], config["max_position_embeddings"]
        partial = architecture == "phi3"
        config["rope_parameters"] = rope_parameters(keys, dim, most, factors, partial=partial)
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    for name, token_id in zip(("bos_token_id", "eos_token_id"), ids, strict=True):
        config[name] = token_id if type(token_id) is int and token_id >= 0 else None
    config["pad_token_id"] = None
    return config


def _common(keys: Keys, records: Mapping[str, TensorRecord], vocab_size: int) -> dict[str, Any]:
    heads = keys.count("attention.head_count")
    hidden = keys.count("embedding_length")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": keys.count("attention.key_length", hidden // heads),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in records,
        "tie_word_embeddings": "output.weight" not in records,
        "hidden_act": "silu",
    }


def _llama(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    window = {"sliding_window": keys.count("attention.sliding_window", None)}
    experts = keys.number("expert_count", 0)
    if not experts:
        named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
        if window["sliding_window"]:
            return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **window}
        return named
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        **window,
    }


def _qwen2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _qwen3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def _qwen3moe(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp computes it
    }


def _gemma3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    dim = keys.count("attention.key_length", 256)
    pattern = keys.count("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    full = rope_parameters(keys, dim, config["max_position_embeddings"], {}, theta=1e6)
    if "attention_factor" in full:
        # llama.cpp scales by it in all layers, also in those that see a window.
        raise keys.unread("rope.scaling.attn_factor")
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1e4)}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // heads
        if layers == _GEMMA3_27B_LAYERS
        else dim,
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (index + 1) % pattern else "full_attention"
            for index in range(layers)
        ],
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", None),
        "final_logit_softcapping": keys.number("final_logit_softcapping", None),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _gpt_oss(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    most = config["max_position_embeddings"]
    rope = rope_parameters(keys, config["head_dim"], most, {}, theta=150000.0)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": [
            "full_attention" if index % 2 else "sliding_attention"
            for index in range(config["num_hidden_layers"])
        ],
        "rope_parameters": rope,
    }


def _phi3(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": keys.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": keys.count(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _deepseek2(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    turned = keys.count("rope.dimension_count")
    query = keys.count("attention.key_length_mla", keys.count("attention.key_length"))
    experts = keys.count("expert_count")
    sigmoid = keys.number("expert_gating_func", 1) == _SIGMOID
    groups = (
        keys.count("expert_group_count", None) or 0,
        keys.count("expert_group_used_count", None) or 0,
    )
    if not all(groups):
        # Files from before there was a key for it: DeepSeek-V3 and R1 are the ones with groups.
        groups = _V3_GROUPS if sigmoid and experts == _V3_EXPERTS else _NO_GROUPS
    sizes = {
        "q_lora_rank": keys.count("attention.q_lora_rank", None),
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": query - turned,
        "v_head_dim": keys.count(
            "attention.value_length_mla", keys.count("attention.value_length", query - turned)
        ),
        "head_dim": turned,
        "num_key_value_heads": config["num_attention_heads"],
        "attention_bias": False,
        "n_routed_experts": experts,
        "num_experts_per_tok": keys.count("expert_used_count"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": groups[0],
        "topk_group": groups[1],
    }
    if sigmoid:
        renormalised = keys.flag("expert_weights_norm", True)
        return sizes | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "norm_topk_prob": renormalised,
            "rope_interleave": True,
        }
    return sizes | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "topk_method": "group_limited_greedy" if groups[0] > 1 else "greedy",
        "mlp_bias": False,
    }


_FAMILIES: Final = {
    "deepseek2": _deepseek2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "llama": _llama,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
}

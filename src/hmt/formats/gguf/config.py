"""A GGUF file's metadata as the config.json that Hugging Face publishes for the same model."""

from collections.abc import Mapping
from typing import Any, Final

from hmt.base.errors import CheckpointError, HeaderError, UnknownArchitectureError
from hmt.contracts.checkpoint import TensorRecord

ARCHITECTURES: Final = ("deepseek2", "gemma3", "llama", "phi3", "qwen2", "qwen3", "qwen3moe")

_GEMMA3_PATTERN: Final = 6  # every sixth layer sees everything, which llama.cpp takes for granted
_GEMMA3_27B_LAYERS: Final = 62
_NO_GROUPS, _V3_EXPERTS, _V3_GROUPS = (1, 1), 256, (8, 4)
_SIGMOID: Final = 2  # expert_gating_func

_REQUIRED: Final = object()


class Keys:
    """Metadata of one architecture, by keys without its name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, what: str) -> None:
        self._metadata, self._at, self._what = metadata, f"{architecture}.", what

    def __contains__(self, key: str) -> bool:
        return self._at + key in self._metadata

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A number; of an array whose items are equal, the item."""
        value = self._metadata.get(self._at + key, default)
        if value is _REQUIRED:
            raise HeaderError(
                f"{self._what} has no {self._at}{key}: convert it again with a current llama.cpp"
            )
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise CheckpointError(
                    f"{self._what} has {self._at}{key} that differs by layer, which HMT does not "
                    "compute"
                )
            value = value[0]
        if value is not default and type(value) not in (int, float):
            raise HeaderError(f"{self._what} has {self._at}{key} {value!r}, which is no number")
        return value

    def count(self, key: str, default: Any = _REQUIRED) -> Any:
        """A whole number above 0."""
        value = self.number(key, default)
        if value is not default and (type(value) is not int or not 0 < value < 1 << 31):
            raise HeaderError(f"{self._what} has {self._at}{key} {value!r}; wanted is a count")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Whether something is so."""
        value = self._metadata.get(self._at + key, default)
        if not isinstance(value, bool):
            raise HeaderError(f"{self._what} has {self._at}{key} {value!r}, which is no truth")
        return value

    def text(self, key: str) -> str:
        """Text, or nothing."""
        value = self._metadata.get(self._at + key, "")
        if not isinstance(value, str):
            raise HeaderError(f"{self._what} has {self._at}{key} {value!r}, which is no text")
        return value


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
        config["rope_parameters"] = _rope(keys, config, factors)
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
    full = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 1e6)}
    if keys.text("rope.scaling.type") == "linear":
        full |= {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
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
    "llama": _llama,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
}


def _rope(
    keys: Keys, config: Mapping[str, Any], factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Rotary positions as transformers describes them."""
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base", 10000.0),
    }
    turned, dim = keys.count("rope.dimension_count", config["head_dim"]), config["head_dim"]
    if turned != dim:
        found["partial_rotary_factor"] = turned / dim
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    if "rope_factors_long" in factors:
        return found | {
            "rope_type": "longrope",
            "long_factor": factors["rope_factors_long"],
            "short_factor": factors.get("rope_factors_short", factors["rope_factors_long"]),
            "original_max_position_embeddings": original,
            "factor": config["max_position_embeddings"] / original,
            "attention_factor": keys.number("rope.scaling.attn_factor", None),
        }
    if "rope_freqs" in factors:
        # llama3's scaling comes as what each frequency is divided by, whatever it was made from.
        return found | {
            "rope_type": "longrope",
            "long_factor": factors["rope_freqs"],
            "short_factor": factors["rope_freqs"],
            "original_max_position_embeddings": original,
            "factor": 1.0,
            "attention_factor": 1.0,
        }
    match keys.text("rope.scaling.type"):
        case "linear":
            return found | {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
        case "yarn":
            return found | _yarn(keys, original)
    return found


def _yarn(keys: Keys, original: int) -> dict[str, Any]:
    found = {
        "rope_type": "yarn",
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": original,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", None)
    if multiplier:
        # A tenth of DeepSeek's mscale_all_dim, with which its mscale agrees.
        found |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    return found

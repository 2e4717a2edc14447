"""Qwen's architectures, and those of them that see."""

from typing import Any, Final

from hmt.formats.gguf.architecture import EXPERTS, Architecture
from hmt.formats.gguf.fields import count, number, query_bias

_MOE: Final[dict[str, Any]] = {**EXPERTS, "norm_topk_prob": True}  # as llama.cpp computes it
# How many of the first layers are given features of images besides.
_DEEPSTACK: Final[dict[str, Any]] = {"deepstack_layers": number("n_deepstack_layers", 0)}

QWENS: Final[dict[str, Architecture]] = {
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": count("expert_shared_feed_forward_length"),
            "norm_topk_prob": False,  # as llama.cpp computes it
            "qkv_bias": query_bias,
        },
        {
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
    ),
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _MOE),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3", _DEEPSTACK),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _MOE | _DEEPSTACK),
}

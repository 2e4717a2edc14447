"""DeepSeek-V3 of any size with random weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from hmt.profiling.random_model import RandomShape, Tensor


@dataclass(frozen=True, slots=True)
class DeepSeekShape(RandomShape):
    """Sizes of a DeepSeek-V3 (arXiv 2412.19437); the defaults are its own.

    dense_layers     at the beginning, without experts
    shared_experts   as wide together as so many routed ones
    """

    layers: int = 61
    dense_layers: int = 3
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    heads: int = 128
    shared_experts: int = 1
    experts: int = 256
    experts_per_token: int = 8
    groups: int = 8
    kept_groups: int = 4
    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    vocab_size: int | None = 129280

    @override
    def config(self, known_tokens: int) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size or known_tokens,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "n_shared_experts": self.shared_experts,
            "n_group": self.groups,
            "topk_group": self.kept_groups,
            "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 163840,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }

    @override
    def tensors(self, config: dict[str, Any]) -> Iterator[Tensor]:
        hidden, vocab_size = self.hidden_size, config["vocab_size"]
        yield "model.embed_tokens.weight", (vocab_size, hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            yield from _named(at, self._attention())
            if layer < self.dense_layers:
                yield from _named(f"{at}mlp.", _ffn(hidden, self.intermediate_size))
                continue
            yield f"{at}mlp.gate.weight", (self.experts, hidden)
            yield f"{at}mlp.gate.e_score_correction_bias", (self.experts,)
            width = self.moe_intermediate_size
            yield from _named(f"{at}mlp.shared_experts.", _ffn(hidden, self.shared_experts * width))
            for expert in range(self.experts):
                yield from _named(f"{at}mlp.experts.{expert}.", _ffn(hidden, width))
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (vocab_size, hidden)

    def _attention(self) -> dict[str, tuple[int, ...]]:
        query = self.heads * (self.nope_dim + self.rope_dim)
        return {
            "input_layernorm": (self.hidden_size,),
            "post_attention_layernorm": (self.hidden_size,),
            "self_attn.q_a_proj": (self.q_rank, self.hidden_size),
            "self_attn.q_a_layernorm": (self.q_rank,),
            "self_attn.q_b_proj": (query, self.q_rank),
            "self_attn.kv_a_proj_with_mqa": (self.kv_rank + self.rope_dim, self.hidden_size),
            "self_attn.kv_a_layernorm": (self.kv_rank,),
            "self_attn.kv_b_proj": (self.heads * (self.nope_dim + self.value_dim), self.kv_rank),
            "self_attn.o_proj": (self.hidden_size, self.heads * self.value_dim),
        }


def _ffn(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


def _named(at: str, shapes: dict[str, tuple[int, ...]]) -> Iterator[Tensor]:
    for name, shape in shapes.items():
        yield f"{at}{name}.weight", shape

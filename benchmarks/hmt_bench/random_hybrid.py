"""Qwen3.5's and Qwen3.6's shapes as llama.cpp's converter writes them: delta nets and attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hmt.contracts.checkpoint import TensorRecord
from hmt_bench.gguf_model import GgufTensor

_TAPS = 4  # of the convolution
_EPS, _THETA = 1e-6, 1e7
_ROTARY_SHARE = 4  # of a head's dimensions one in so many pairs turns
_CONTEXT = 262144


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of a decoder in which one of `interval` layers attends, and the others are delta nets.

    intermediate_size   width of the FFN, or of one expert and of the shared one
    state_dim           of a head's keys, and of its values
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    head_dim: int = 256
    state_dim: int = 128
    vocab_size: int = 248320
    experts: int = 0
    experts_per_token: int = 0
    interval: int = 4

    @property
    def architecture(self) -> str:
        """llama.cpp's name of it."""
        return "qwen35moe" if self.experts else "qwen35"

    def tokens(self) -> dict[str, Any]:
        """What the tokenizer has to know."""
        return {"vocab_size": self.vocab_size, "eos_token_id": 1}

    def add_sizes(self, writer: Any) -> None:
        """The keys from which llama.cpp builds the model."""
        turned = self.head_dim // _ROTARY_SHARE
        writer.add_context_length(_CONTEXT)
        writer.add_embedding_length(self.hidden_size)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.intermediate_size)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_dimension_count(turned)
        writer.add_rope_dimension_sections([11, 11, turned // 2 - 22, 0])
        writer.add_rope_freq_base(_THETA)
        writer.add_layer_norm_rms_eps(_EPS)
        writer.add_vocab_size(self.vocab_size)
        writer.add_ssm_conv_kernel(_TAPS)
        writer.add_ssm_state_size(self.state_dim)
        writer.add_ssm_group_count(self.key_heads)
        writer.add_ssm_time_step_rank(self.value_heads)
        writer.add_ssm_inner_size(self.value_heads * self.state_dim)
        writer.add_full_attention_interval(self.interval)
        if self.experts:
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(self.experts_per_token)
            writer.add_expert_feed_forward_length(self.intermediate_size)
            writer.add_expert_shared_feed_forward_length(self.intermediate_size)

    def tensors(self) -> Iterator[GgufTensor]:
        """In the order of use; matrices have no type of their own yet."""
        hidden = self.hidden_size
        yield _tensor("token_embd.weight", self.vocab_size, hidden)
        for layer in range(self.layers):
            at = f"blk.{layer}."
            attends = (layer + 1) % self.interval == 0
            mixer = self._attention() if attends else self._delta_net()
            for name, shape in {**mixer, **self._ffn()}.items():
                experts = self.experts if name.endswith("_exps.weight") else 1
                yield _tensor(at + name, *shape, times=experts)
        yield _tensor("output_norm.weight", hidden)
        yield _tensor("output.weight", self.vocab_size, hidden)

    def _attention(self) -> dict[str, tuple[int, ...]]:
        hidden, dim = self.hidden_size, self.head_dim
        return {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (2 * self.heads * dim, hidden),  # and the gates of results
            "attn_k.weight": (self.kv_heads * dim, hidden),
            "attn_v.weight": (self.kv_heads * dim, hidden),
            "attn_output.weight": (hidden, self.heads * dim),
            "attn_q_norm.weight": (dim,),
            "attn_k_norm.weight": (dim,),
        }

    def _delta_net(self) -> dict[str, tuple[int, ...]]:
        hidden, heads = self.hidden_size, self.value_heads
        values = heads * self.state_dim
        width = 2 * self.key_heads * self.state_dim + values
        return {
            "attn_norm.weight": (hidden,),
            "attn_qkv.weight": (width, hidden),
            "attn_gate.weight": (values, hidden),
            "ssm_conv1d.weight": (width, _TAPS),
            "ssm_dt.bias": (heads,),
            "ssm_a": (heads,),
            "ssm_beta.weight": (heads, hidden),
            "ssm_alpha.weight": (heads, hidden),
            "ssm_norm.weight": (self.state_dim,),
            "ssm_out.weight": (hidden, values),
        }

    def _ffn(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        matrices = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        norm = {"post_attention_norm.weight": (hidden,)}
        if not self.experts:
            return {**norm, **{f"ffn_{name}.weight": shape for name, shape in matrices.items()}}
        return {
            **norm,
            "ffn_gate_inp.weight": (self.experts, hidden),
            **{f"ffn_{name}_exps.weight": shape for name, shape in matrices.items()},
            "ffn_gate_inp_shexp.weight": (hidden,),
            **{f"ffn_{name}_shexp.weight": shape for name, shape in matrices.items()},
        }


def _tensor(name: str, *shape: int, times: int = 1) -> GgufTensor:
    """F32 where llama.cpp's quantiser leaves it so: vectors, routers and convolutions."""
    record = TensorRecord(name, "BF16", shape, Path("random"), 0, 2 * prod(shape))
    plain = len(shape) == 1 or name.endswith(("ffn_gate_inp.weight", "ssm_conv1d.weight"))
    return GgufTensor(name, (record,) * times, "F32" if plain else "Q8_0")

"""DeepSeek-V3's shape as llama.cpp's converter writes it, in the types of a file type."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.gguf import FILE_TYPES
from hmt_bench.gguf_model import GgufTensor, load_gguf
from hmt_bench.random_deepseek import DeepSeekShape

_CONTEXT, _EPS, _THETA, _FACTOR = 163840, 1e-6, 1e4, 2.5
_EMBEDDED_TOKENS = 4096  # of the tokenizer that files are written with
# Latent attention's matrices have no names in file types; that of keys and values counts as values.
_TREATED_AS = {"attn_kv_b": "attn_v"}


def kinds_of_layers(shape: DeepSeekShape, file_type: str) -> tuple[tuple[object, ...], ...]:
    """What distinguishes each layer of `shape` in a file of this type: layers alike are equal."""
    return tuple(
        (layer < shape.dense_layers, *(kind for _, kind in _kinds(shape, file_type, layer)))
        for layer in range(shape.layers)
    )


def _kinds(shape: DeepSeekShape, file_type: str, layer: int) -> Iterator[tuple[str, str]]:
    """Matrices of a layer of `shape`, with their types."""
    for name, sizes in _layer(shape, dense=layer < shape.dense_layers).items():
        yield name, _kind(name, sizes, file_type, layer, shape.layers)


def _kind(name: str, sizes: Sequence[int], file_type: str, layer: int, layers: int) -> str:
    """Vectors and routers stay F32."""
    if len(sizes) == 1 or name == "ffn_gate_inp.weight":
        return "F32"
    plain = name.removesuffix(".weight")
    asked = _TREATED_AS.get(plain, plain)
    return FILE_TYPES[file_type].type_of(asked, layer, layers, sizes[-1])


@dataclass(frozen=True, slots=True)
class GgufDeepSeek:
    """Some layers of a DeepSeek-V3 as a file.

    shape       of the file: its layers are `stands_for`
    file_type   one of FILE_TYPES
    stands_for  for each layer the one of the whole model whose types it has
    whole       layers of the whole model
    """

    shape: DeepSeekShape
    file_type: str
    stands_for: tuple[int, ...]
    whole: int

    @property
    def architecture(self) -> str:
        """llama.cpp's name of it."""
        return "deepseek2"

    def tokens(self) -> dict[str, Any]:
        """What the tokenizer has to know."""
        return {"vocab_size": self._vocabulary, "eos_token_id": 1}

    @property
    def _vocabulary(self) -> int:
        return self.shape.vocab_size or _EMBEDDED_TOKENS

    def add_sizes(self, writer: Any) -> None:
        """The keys from which llama.cpp builds the model."""
        shape = self.shape
        writer.add_context_length(_CONTEXT)
        writer.add_embedding_length(shape.hidden_size)
        writer.add_block_count(shape.layers)
        writer.add_feed_forward_length(shape.intermediate_size)
        writer.add_head_count(shape.heads)
        writer.add_head_count_kv(shape.heads)
        writer.add_key_length(shape.nope_dim + shape.rope_dim)
        writer.add_value_length(shape.value_dim)
        writer.add_rope_dimension_count(shape.rope_dim)
        writer.add_rope_freq_base(_THETA)
        writer.add_layer_norm_rms_eps(_EPS)
        writer.add_vocab_size(self._vocabulary)
        writer.add_q_lora_rank(shape.q_rank)
        writer.add_kv_lora_rank(shape.kv_rank)
        writer.add_leading_dense_block_count(shape.dense_layers)
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_per_token)
        writer.add_expert_shared_count(shape.shared_experts)
        writer.add_expert_feed_forward_length(shape.moe_intermediate_size)
        writer.add_expert_weights_scale(_FACTOR)
        writer.add_expert_weights_norm(True)
        writer.add_expert_group_count(shape.groups)
        writer.add_expert_group_used_count(shape.kept_groups)
        writer.add_expert_gating_func(load_gguf().ExpertGatingFuncType.SIGMOID)

    def tensors(self) -> Iterator[GgufTensor]:
        """In the order of use, with their types."""
        shape, vocabulary = self.shape, self._vocabulary
        yield self._tensor("token_embd.weight", (vocabulary, shape.hidden_size), 0)
        for layer, place in enumerate(self.stands_for):
            for name, sizes in _layer(shape, dense=layer < shape.dense_layers).items():
                yield self._tensor(name, sizes, place, f"blk.{layer}.")
        yield self._tensor("output_norm.weight", (shape.hidden_size,), 0)
        yield self._tensor("output.weight", (vocabulary, shape.hidden_size), 0)

    def _tensor(self, name: str, sizes: tuple[int, ...], place: int, at: str = "") -> GgufTensor:
        times = self.shape.experts if name.endswith("_exps.weight") else 1
        record = TensorRecord(at + name, "BF16", sizes, Path("random"), 0, 2 * prod(sizes))
        kind = _kind(name, sizes, self.file_type, place, self.whole)
        return GgufTensor(at + name, (record,) * times, kind)


def _layer(shape: DeepSeekShape, *, dense: bool) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer behind "blk.N."; stacks of experts by the shape of one."""
    hidden = shape.hidden_size
    found = {
        "attn_norm.weight": (hidden,),
        "attn_q_a.weight": (shape.q_rank, hidden),
        "attn_q_a_norm.weight": (shape.q_rank,),
        "attn_q_b.weight": (shape.heads * (shape.nope_dim + shape.rope_dim), shape.q_rank),
        "attn_kv_a_mqa.weight": (shape.kv_rank + shape.rope_dim, hidden),
        "attn_kv_a_norm.weight": (shape.kv_rank,),
        "attn_kv_b.weight": (shape.heads * (shape.nope_dim + shape.value_dim), shape.kv_rank),
        "attn_output.weight": (hidden, shape.heads * shape.value_dim),
        "ffn_norm.weight": (hidden,),
    }
    if dense:
        return found | _ffn(hidden, shape.intermediate_size, "")
    width = shape.moe_intermediate_size
    return found | {
        "ffn_gate_inp.weight": (shape.experts, hidden),
        "exp_probs_b.bias": (shape.experts,),
        **_ffn(hidden, width, "_exps"),
        **_ffn(hidden, shape.shared_experts * width, "_shexp"),
    }


def _ffn(hidden: int, inner: int, suffix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"ffn_gate{suffix}.weight": (inner, hidden),
        f"ffn_up{suffix}.weight": (inner, hidden),
        f"ffn_down{suffix}.weight": (hidden, inner),
    }

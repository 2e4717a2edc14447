"""GGUF files of random models, as llama.cpp's convert_hf_to_gguf.py writes them.

Names come from the gguf package's own map; numbers are rounded by its quantisers.  What the file
then holds is given back in f32, for a checkpoint of the same numbers.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

KINDS = ("Q4_0", "Q8_0", "Q5_1", "Q4_1", "Q5_0")  # that the package can write
_SEEING = (gguf.MODEL_ARCH.QWEN2VL, gguf.MODEL_ARCH.QWEN3VL, gguf.MODEL_ARCH.QWEN3VLMOE)
_EXPERTS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


def _gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    if name.endswith("e_score_correction_bias"):
        name = name.replace("_bias", ".bias").replace(
            "e_score_correction.bias", "e_score_correction.bias"
        )
    if name.endswith("sinks"):
        name += ".weight"
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def unturned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as transformers orders them."""
    return (
        rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def _kind(name: str) -> str:
    return "bias" if name.endswith("bias") else "weight"


def _turned_inputs(name: str, numbers: np.ndarray) -> np.ndarray:
    """Of weights [experts, in, out] the transpose; biases as they are."""
    turned = numbers if name.endswith("bias") else numbers.swapaxes(1, 2)
    return np.ascontiguousarray(turned)


def _rotary_factors(config: Any) -> dict[str, Any]:
    """What frequencies are divided by, where the converter writes that as tensors."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{which}.weight": rope[f"{which}_factor"] for which in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dim = 2 * len(scaled)
    plain = rope["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
    return {"rope_freqs.weight": (plain / scaled.double()).numpy()}


class ModelFile:
    """Collects the tensors of one model, in the order they are written."""

    def __init__(self, arch: gguf.MODEL_ARCH, config: Any, kinds: Callable[[str], str]) -> None:
        self.arch, self.config, self.kinds = arch, config, kinds
        self.tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType]] = {}
        self.held: dict[str, torch.Tensor] = {}
        for name, factors in _rotary_factors(config).items():
            self.tensors[name] = np.array(factors, np.float32), GGMLQuantizationType.F32

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names = gguf.get_tensor_name_map(self.arch, self.config.num_hidden_layers)
        stacks: dict[str, list[tuple[str, np.ndarray]]] = {}
        for name, tensor in tensors.items():
            numbers = tensor.float().numpy()
            if name.endswith((".experts.gate_up_proj", ".experts.gate_up_proj_bias")):
                self._add_by_turns(name, numbers)
                continue
            if name.endswith((".experts.down_proj", ".experts.down_proj_bias")):
                target = f"blk.{name.split('.')[2]}.ffn_down_exps"
                held = self._keep(f"{target}.{_kind(name)}", _turned_inputs(name, numbers))
                self.held[name] = torch.from_numpy(_turned_inputs(name, held))
                continue
            if ".experts." in name:
                layer, what = name.split(".")[2], _EXPERTS[name.split(".")[-2]]
                stacks.setdefault(f"blk.{layer}.ffn_{what}_exps.weight", []).append((name, numbers))
                continue
            self._add_one(_gguf_name(names, name), name, numbers)
        for name, parts in stacks.items():
            parts.sort(key=lambda part: int(part[0].split(".experts.")[1].split(".")[0]))
            held = self._keep(name, np.stack([numbers for _, numbers in parts]))
            self.held |= {
                part: torch.from_numpy(h) for (part, _), h in zip(parts, held, strict=True)
            }

    def _add_by_turns(self, name: str, numbers: np.ndarray) -> None:
        """gpt-oss: inputs before outputs, and gate and up by turns."""
        layer, both = name.split(".")[2], numbers.copy()
        for turn, what in enumerate(("gate", "up")):
            part = _turned_inputs(name, numbers[..., turn::2])
            held = self._keep(f"blk.{layer}.ffn_{what}_exps.{_kind(name)}", part)
            both[..., turn::2] = _turned_inputs(name, held)
        self.held[name] = torch.from_numpy(both)

    def _add_one(self, name: str, source: str, numbers: np.ndarray) -> None:
        llama = self.arch in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.MISTRAL3)
        heads = {
            "attn_q": self.config.num_attention_heads,
            "attn_k": self.config.num_key_value_heads,
        }.get(name.split(".")[-2] if llama else "")
        shifted = self.arch is gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight")
        if heads:
            numbers = _turned(numbers, heads)
        held = self._keep(name, numbers + np.float32(1) if shifted else numbers)
        held = held - np.float32(1) if shifted else held
        self.held[source] = torch.from_numpy(unturned(held, heads) if heads else held).contiguous()

    def _keep(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """Round as the file will hold it; the numbers that it holds."""
        kind = GGMLQuantizationType[self.kinds(name)]
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        vector = numbers.ndim < 2 or name.endswith("bias") or "ffn_gate_inp" in name
        if vector or numbers.shape[-1] % block:
            kind = GGMLQuantizationType.F32
        content = gguf.quants.quantize(numbers, kind)
        self.tensors[name] = content, kind
        return gguf.quants.dequantize(content, kind).reshape(numbers.shape).astype(np.float32)

    def split_latent(self) -> None:
        """kv_b of latent attention as two tensors, keys transposed; what they hold is told anew."""
        config = self.config
        heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        for layer in range(config.num_hidden_layers):
            source = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
            del self.tensors[f"blk.{layer}.attn_kv_b.weight"]
            both = self.held[source].view(heads, -1, rank).numpy()
            keys = np.ascontiguousarray(both[:, :nope].swapaxes(1, 2))
            keys = self._keep(f"blk.{layer}.attn_k_b.weight", keys).swapaxes(1, 2)
            values = self._keep(f"blk.{layer}.attn_v_b.weight", both[:, nope:])
            joined = np.concatenate((keys, values), axis=1).reshape(-1, rank)
            self.held[source] = torch.from_numpy(np.ascontiguousarray(joined))

    def write(self, path: Path, vocabulary: Callable[[GGUFWriter], None], **split: int) -> Path:
        """`path`, or the first of its parts with split_max_tensors."""
        writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[self.arch], **split)
        add_sizes(writer, self.arch, self.config)
        vocabulary(writer)
        for name, (content, kind) in self.tensors.items():
            writer.add_tensor(name, content, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts = sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
        return parts[0] if parts else path

    def write_checkpoint(self, folder: Path, tokenizer: Path) -> Path:
        """The numbers that the file holds, in f32, as transformers publishes them."""
        folder.mkdir()
        self.config.save_pretrained(folder)
        save_file(self.held, folder / "model.safetensors")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((tokenizer / name).read_bytes())
        return folder


def add_sizes(writer: GGUFWriter, arch: gguf.MODEL_ARCH, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    latent = arch is gguf.MODEL_ARCH.DEEPSEEK2
    writer.add_head_count_kv(1 if latent else config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch is gguf.MODEL_ARCH.DEEPSEEK2:
        add_latent_sizes(writer, config)
    else:
        writer.add_key_length(dim)
        writer.add_value_length(dim)
        writer.add_rope_dimension_count(int(dim * (rope.get("partial_rotary_factor") or 1.0)))
    if arch in _SEEING:
        writer.add_rope_dimension_sections([dim // 2 - 2 * (dim // 6), dim // 6, dim // 6, 0])
        if arch is not gguf.MODEL_ARCH.QWEN2VL:
            writer.add_num_deepstack_layers(3)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        longer = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longer) / math.log(original)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if "mscale_all_dim" in rope:
                writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts and arch is not gguf.MODEL_ARCH.DEEPSEEK2:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", config.intermediate_size)
        )


def add_latent_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    sigmoid = config.model_type == "deepseek_v3"
    kind = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kind.SIGMOID if sigmoid else kind.SOFTMAX)


def bytes_vocabulary(folder: Path) -> Callable[[GGUFWriter], None]:
    """The tokenizer of pairs of bytes in `folder`, as convert_hf_to_gguf.py writes it."""
    known = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {one["content"]: one["id"] for one in known["added_tokens"]}
    ids = known["model"]["vocab"] | added
    tokens = sorted(ids, key=lambda token: ids[token])

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in added else 1 for token in tokens])
        merges = known["model"]["merges"]
        writer.add_token_merges([" ".join(one) if isinstance(one, list) else one for one in merges])
        writer.add_eos_token_id(ids[config["eos_token"]])
        template = folder / "chat_template.jinja"
        if template.is_file():
            writer.add_chat_template(template.read_text())

    return write

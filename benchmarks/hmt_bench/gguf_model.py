"""A checkpoint written a second time, as the GGUF file that llama.cpp reads, in 4 bits.

The numbers are rounded by the `gguf` package, llama.cpp's own: matrices to Q4_0 (32 numbers share
an f16 scale), the embedding and the output layer to Q8_0, norms and routers to F32.  Names and
keys are those of llama.cpp's convert_hf_to_gguf.py.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hmt.base.errors import CheckpointError, MachineError
from hmt.contracts.checkpoint import Checkpoint, TensorRecord
from hmt.formats import open_checkpoint

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERT_NAMES = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # llama.cpp's kinds of tokens


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file, before it is written.

    sources  the checkpoint's tensors, stacked where there are several (experts)
    kind     its GGML type: Q4_0, Q8_0 or F32 unless another one is put in its place
    turned   heads whose rows llama.cpp wants with the halves of a rotary pair side by side; 0 where
             rows stay where they are
    used     share of it that one token's computation reads
    """

    name: str
    sources: tuple[TensorRecord, ...]
    kind: str
    turned: int = 0
    used: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """As PyTorch writes shapes."""
        stacked = (len(self.sources),) if self.name.endswith("_exps.weight") else ()
        return (*stacked, *self.sources[0].shape)

    @property
    def nbytes(self) -> int:
        """In the file."""
        numbers, nbytes = block_of(self.kind)
        return prod(self.shape) // numbers * nbytes


def load_gguf() -> ModuleType:
    """The `gguf` package.  Raises MachineError, with what to install, where it is missing."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise MachineError(
            f"GGUF files are written by the gguf package, which does not load ({error}): "
            "pip install 'gguf>=0.10'"
        ) from error


def block_of(kind: str) -> tuple[int, int]:
    """Numbers and bytes of a block of a GGML type.  Raises as `load_gguf`."""
    gguf = load_gguf()
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return numbers, nbytes


def gguf_tensors(checkpoint: Checkpoint) -> list[GgufTensor]:
    """What `write_gguf` writes, in order.  Raises CheckpointError for other architectures."""
    config, records = checkpoint.config, checkpoint.records
    if config.get("model_type") not in _ARCHITECTURES:
        known = " and ".join(_ARCHITECTURES)
        raise CheckpointError(
            f"{checkpoint.path} is a {config.get('model_type')!r}; only {known} checkpoints are "
            "written as GGUF"
        )
    embedding, head = records["model.embed_tokens.weight"], records["lm_head.weight"]
    tensors = [GgufTensor("token_embd.weight", (embedding,), "Q8_0", used=1 / embedding.shape[0])]
    for layer in range(config["num_hidden_layers"]):
        tensors += _layer(config, records, layer)
    tensors.append(GgufTensor("output_norm.weight", (records["model.norm.weight"],), "F32"))
    tensors.append(GgufTensor("output.weight", (head,), "Q8_0"))
    return tensors


def architecture(config: Mapping[str, Any]) -> str:
    """llama.cpp's name of the architecture that `config` describes, one of those written here."""
    return _ARCHITECTURES[config["model_type"]]


def write_gguf(folder: Path, path: Path) -> int:
    """Write the checkpoint in `folder` as GGUF to `path`; returns the bytes of all tensors.

    Only BF16 checkpoints of Llama and Qwen3-MoE, and tokenizers that merge pairs of bytes.
    """
    gguf = load_gguf()
    checkpoint = open_checkpoint(folder)
    tensors = gguf_tensors(checkpoint)
    writer = gguf.GGUFWriter(path, architecture(checkpoint.config))
    add_sizes(writer, checkpoint.config)
    add_tokenizer(writer, folder, checkpoint.config)
    begin_file(writer, tensors)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        parts = [
            gguf.quants.quantize(_read(record, tensor.turned), kind) for record in tensor.sources
        ]
        writer.write_tensor_data(np.concatenate(parts))
    writer.close()
    return sum(tensor.nbytes for tensor in tensors)


def _layer(
    config: Mapping[str, Any], records: Mapping[str, TensorRecord], layer: int
) -> Iterator[GgufTensor]:
    # Llama's kernels of llama.cpp turn neighbouring numbers, the checkpoint's halves of a head.
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    turned = heads if config["model_type"] == "llama" else {}
    at = f"model.layers.{layer}."
    for name, source in _LAYER_NAMES.items():
        record = records.get(f"{at}{source}.weight")
        if record is not None:
            kind = "Q4_0" if len(record.shape) == 2 and name != "ffn_gate_inp" else "F32"
            yield GgufTensor(f"blk.{layer}.{name}.weight", (record,), kind, turned.get(name, 0))
    experts = config.get("num_experts", 0)
    for name, source in _EXPERT_NAMES.items() if experts else ():
        stack = tuple(records[f"{at}mlp.experts.{e}.{source}.weight"] for e in range(experts))
        used = config["num_experts_per_tok"] / experts
        yield GgufTensor(f"blk.{layer}.{name}.weight", stack, "Q4_0", used=used)


def begin_file(writer: Any, tensors: Sequence[GgufTensor]) -> None:
    """Write all that stands before the tensors' numbers, which follow in this order."""
    kinds = load_gguf().GGMLQuantizationType
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.float32, tensor.nbytes, kinds[tensor.kind]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def add_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    """The keys from which llama.cpp builds the model."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """The tokenizer in `folder`, filled up to the vocabulary; none where none fits it."""
    file = folder / "tokenizer.json"
    known = json.loads(file.read_text()) if file.is_file() else {"model": {}}
    ids: dict[str, int] = known["model"].get("vocab", {})
    added = {one["content"]: one["id"] for one in known.get("added_tokens", ())}
    tokens = [f"[unused {n}]" for n in range(config["vocab_size"])]
    if known["model"].get("type") != "BPE" or max((ids | added).values()) >= len(tokens):
        writer.add_tokenizer_model("no_vocab")
        return
    kinds = [_UNUSED] * len(tokens)
    for token, number in (ids | added).items():
        tokens[number] = token
        kinds[number] = _CONTROL if token in added else _NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [" ".join(one) if isinstance(one, list) else one for one in known["model"]["merges"]]
    )
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _read(record: TensorRecord, turned: int) -> np.ndarray:
    """The tensor as f32."""
    if record.dtype != "BF16":
        raise CheckpointError(f"{record.name} is {record.dtype}; GGUF is written from BF16 only")
    with record.file.open("rb") as file:
        file.seek(record.offset)
        data = bytearray(file.read(record.nbytes))
    values = torch.frombuffer(data, dtype=torch.bfloat16).float().view(record.shape)
    if turned:
        rows, columns = values.shape
        values = values.view(turned, 2, rows // turned // 2, columns).transpose(1, 2)
        values = values.reshape(rows, columns)
    return values.numpy()

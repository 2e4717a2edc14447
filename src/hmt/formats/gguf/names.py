"""llama.cpp's names of tensors, and what Hugging Face's checkpoints call the same.

As llama.cpp's convert_hf_to_gguf.py writes them.  It changes some numbers, which is undone: rows of
queries and keys in another order (llama), 1 added to norms (gemma).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hmt.base.errors import CheckpointError, HeaderError
from hmt.contracts.checkpoint import (
    FileRange,
    FormName,
    Published,
    PublishedPart,
    TensorRecord,
)

FLOATS: Final = ("F32", "F16", "BF16")
CODES: Final = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0",
    "MXFP4",
)  # fmt: skip

_TRUNK: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Tensors that say what the configuration says, or what is computed from it.
IGNORED: Final = re.compile(r"rope_freqs|rope_factors_(long|short)|blk\.\d+\.attn_rot_embd")
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_WHOLE: Final = {  # names that are no weight's or bias's
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "attn_sinks": "self_attn.sinks",
}
_EXPERTS: Final = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_MIXTRAL: Final = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}
_SPLIT_KEYS: Final = re.compile(r"blk\.(\d+)\.attn_k_b\.weight")
_IN_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?(_exps)?\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Names:
    """How one architecture's tensors are called.

    layer     of those in a layer, by llama.cpp's name
    experts   of a layer's stacked experts
    at        of one expert, with layer and number to fill in
    turned    numbers of a head, where rows of queries and keys lie in llama.cpp's order; else 0
    shifted   1 has been added to norms
    """

    layer: Mapping[str, str]
    experts: Mapping[str, str]
    at: str = "model.layers.{}.mlp.experts.{}."
    turned: int = 0
    shifted: bool = False


def names_of(architecture: str, metadata: Mapping[str, Any], turned: int) -> Names:
    """The names of an architecture; `turned` is its head's width."""
    match architecture:
        case "llama" if metadata.get("llama.expert_count"):
            layer = {**_LAYER, "ffn_gate_inp": "block_sparse_moe.gate"}
            at = "model.layers.{}.block_sparse_moe.experts.{}."
            return Names(layer, _MIXTRAL, at, turned)
        case "llama":
            return Names(_LAYER, {}, turned=turned)
        case "gemma3":
            layer = {
                **_LAYER,
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_feedforward_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            }
            return Names(layer, {}, shifted=True)
        case "gpt-oss":
            layer = {
                **_LAYER,
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.router",
            }
            return Names(layer, _EXPERTS)
        case "phi3":
            return Names({**_LAYER, "ffn_up": "mlp.gate_up_proj"}, {})
        case _:
            return Names(_LAYER, _EXPERTS)


def forms_of(
    records: Mapping[str, TensorRecord], names: Names, heads: int = 0
) -> dict[str, TensorRecord | Published]:
    """Every parameter by Hugging Face's name, and how it is published.

    Tensors that are called otherwise keep their names.  `heads`: of latent attention, whose kv_b
    may be two tensors.  Raises CheckpointError for a type that is not read.
    """
    forms: dict[str, TensorRecord | Published] = {}
    for record in records.values():
        for name, part, turned in _parameters(record, names):
            minus = 1.0 if names.shifted and record.name.endswith("norm.weight") else 0.0
            forms[name] = _form(record, part, turned, minus)
        match = _SPLIT_KEYS.fullmatch(record.name)
        if match is not None and heads:
            name = f"model.layers.{match[1]}.self_attn.kv_b_proj.weight"
            forms[name] = _joined(record, records.get(f"blk.{match[1]}.attn_v_b.weight"), heads)
    return forms


def _joined(keys: TensorRecord, values: TensorRecord | None, heads: int) -> Published:
    """kv_b_proj of keys [heads, kv_rank, nope_dim] and values [heads, value_dim, kv_rank]."""
    if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
        raise HeaderError(f"{keys.file}: {keys.name!r} has no attn_v_b beside it, each of 3 sizes")
    _, rank, nope = keys.shape
    if (keys.shape[0], *values.shape[::2]) != (heads, heads, rank):
        raise HeaderError(
            f"{keys.file}: {keys.name!r} is {list(keys.shape)} and {values.name!r} "
            f"{list(values.shape)}, which do not belong to one another, or not to {heads} heads"
        )
    for record in (keys, values):
        _check_kind(record)
    parts = {
        name: PublishedPart(r.name, FileRange(r.file, r.offset, r.nbytes), 0)
        for name, r in (("keys", keys), ("values", values))
    }
    sizes = (("heads", heads), ("nope_dim", nope), ("value_dim", values.shape[1]), ("rank", rank))
    form = FormName("gguf latent", (("keys", keys.dtype), ("values", values.dtype), *sizes))
    return Published(form, (heads * (nope + values.shape[1]), rank), parts)


def _parameters(record: TensorRecord, names: Names) -> Iterator[tuple[str, TensorRecord, int]]:
    """(name, bytes and shape, width of turned heads) of all parameters that a tensor holds."""
    stem, _, kind = record.name.rpartition(".")
    if stem in _TRUNK:
        yield f"{_TRUNK[stem]}.{kind}", record, 0
        return
    match = _IN_LAYER.fullmatch(record.name)
    if match is None:
        return
    layer, what, expert, stacked, kind = match.groups()
    if what.endswith("_exps"):
        what, stacked = what.removesuffix("_exps"), "_exps"
    if (stacked or expert) and what in names.experts:
        at, rest = names.at, f"{names.experts[what]}.{kind}"
        if expert is not None:
            yield at.format(layer, expert) + rest, record, 0
            return
        for index, part in enumerate(_stacked(record)):
            yield at.format(layer, index) + rest, part, 0
        return
    if what in _WHOLE:
        yield f"model.layers.{layer}.{_WHOLE[what]}", record, 0
    elif what in names.layer and not stacked and expert is None:
        turned = names.turned if what in ("attn_q", "attn_k") else 0
        yield f"model.layers.{layer}.{names.layer[what]}.{kind}", record, turned


def _stacked(record: TensorRecord) -> Iterator[TensorRecord]:
    count, *shape = record.shape
    each = record.nbytes // count
    for index in range(count):
        at = record.offset + index * each
        yield replace(record, shape=tuple(shape), offset=at, nbytes=each)


def _form(
    record: TensorRecord, part: TensorRecord, turned: int, minus: float
) -> TensorRecord | Published:
    if part.dtype in FLOATS and not turned and not minus:
        return part
    row_bytes = part.nbytes // part.shape[0]
    place = FileRange(part.file, part.offset, part.nbytes)
    parts = {"blocks": PublishedPart(record.name, place, row_bytes)}
    if part.dtype in FLOATS:
        options = (("dtype", part.dtype), ("turned", turned), ("minus", minus))
        return Published(FormName("floats", options), part.shape, {"data": parts["blocks"]})
    _check_kind(record)
    return Published(
        FormName("gguf", (("kind", part.dtype), ("turned", turned))), part.shape, parts
    )


def _check_kind(record: TensorRecord) -> None:
    if record.dtype not in FLOATS + CODES:
        raise CheckpointError(
            f"{record.file}: tensor {record.name!r} is {record.dtype}; HMT reads "
            f"{', '.join(FLOATS + CODES)}: download another quantisation of this model"
        )

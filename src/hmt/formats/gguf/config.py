"""A GGUF file's metadata as the config.json that Hugging Face publishes for the same model."""

from collections.abc import Mapping
from typing import Any

from hmt.base.errors import HeaderError, UnknownArchitectureError
from hmt.contracts.checkpoint import TensorRecord
from hmt.formats.gguf.architecture import Architecture
from hmt.formats.gguf.architectures import ARCHITECTURES
from hmt.formats.gguf.fields import query_bias
from hmt.formats.gguf.keys import Keys
from hmt.formats.gguf.rope import rope_parameters


def read_config(
    metadata: Mapping[str, Any],
    records: Mapping[str, TensorRecord],
    factors: Mapping[str, list[float]],
    what: str,
) -> tuple[Architecture, dict[str, Any]]:
    """The row of the model in a GGUF file, and its config.json.

    factors   numbers of the tensors rope_freqs, rope_factors_long and rope_factors_short
    what      the file, for messages
    Raises UnknownArchitectureError for one that HMT does not have, HeaderError where something is
    missing or absurd, CheckpointError where the file asks for what is not computed.
    """
    name = metadata.get("general.architecture")
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        raise UnknownArchitectureError(
            f"{what} is of architecture {name!r:.100}; of GGUF files HMT runs "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    keys = Keys(metadata, str(name), what, records, factors)
    table = records.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise HeaderError(f"{what} has no matrix token_embd.weight: download it again")
    architecture = row if isinstance(row, Architecture) else row(keys)
    config = _common(keys, architecture, table.shape[0])
    for field, value in architecture.fields.items():
        config[field] = value(keys, config) if callable(value) else value
    if architecture.rotary:
        dim, most = config["head_dim"], config["max_position_embeddings"]
        config["rope_parameters"] = rope_parameters(
            keys, dim, most, factors, theta=architecture.theta, partial=architecture.partial
        )
    for field in architecture.dropped:
        del config[field]
    for field in ("bos_token_id", "eos_token_id"):
        token = metadata.get(f"tokenizer.ggml.{field}")
        config[field] = token if type(token) is int and token >= 0 else None
    config["pad_token_id"] = None
    keys.check_all_read()
    return architecture, config


def _common(keys: Keys, architecture: Architecture, vocab_size: int) -> dict[str, Any]:
    hidden = keys.count("embedding_length")
    layers = keys.count("block_count")
    # Layers that predict further tokens come last: see hmt.models.next_token.
    guessing = keys.number("nextn_predict_layers", 0)
    if not 0 <= guessing < layers:
        raise keys.unread("nextn_predict_layers", f"of {layers} blocks")
    if not keys.flag("attention.causal", True):
        raise keys.unread("attention.causal", "as encoders have; HMT runs causal language models")
    key, field = architecture.epsilon
    common = {
        "architectures": [architecture.causal],
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers - guessing,
        "num_nextn_predict_layers": guessing,
        field: keys.number(key),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
        "hidden_act": "silu",
    }
    return common | _of_attention(keys, architecture, hidden) if architecture.attends else common


def _of_attention(keys: Keys, architecture: Architecture, hidden: int) -> dict[str, Any]:
    """Fields of attention, and of the networks behind it."""
    heads = keys.count("attention.head_count")
    dim = keys.count("attention.key_length", hidden // heads)
    if keys.count("attention.value_length", dim) != dim and "attention.kv_lora_rank" not in keys:
        raise keys.unread("attention.value_length", f"and keys have {dim} numbers a head")
    own = architecture.fields
    heads_of_keys = (
        heads if "num_key_value_heads" in own else keys.count("attention.head_count_kv", heads)
    )
    width = None  # which one of `fields` reads
    if not architecture.widths:
        width = keys.count(
            "feed_forward_length", keys.count("expert_feed_forward_length", 4 * hidden)
        )
    return {
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_of_keys,
        "head_dim": dim,
        "max_position_embeddings": keys.count("context_length"),
        "attention_bias": query_bias(keys, {}),
    }

"""What models of transformers have that HMT does not compute, by the fields that say so.

A model is refused for it before its modules are made.  What no field says is found by looking at
the modules (`trace`); where that fails, the class that could not be followed is named.
"""

import traceback
from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hmt.models.config import Config

_RECURRENT = ("mamba", "ssm", "linear_attention", "recurrent", "conv", "rwkv", "xlstm")
_KINDS = ("full_attention", "sliding_attention", "attention", "sliding_window")
_INPUTS = ("vision_config", "audio_config", "speech_config", "image_config")

# A field that is set, and what that is; {} stands for its value.
_FIELDS = {
    "hidden_size_per_layer_input": "a separate embedding for each layer ({} numbers per token)",
    "num_kv_shared_layers": "{} layers that share the KV cache of earlier ones",
    "altup_num_inputs": "{} hidden states per token, which its layers predict and correct (AltUp)",
    "index_topk": "attention to {} keys that an indexer selects",
    "compress_ratios": "attention to keys that are compressed, by {}",
    "compress_rates": "attention to keys that are compressed, by {}",
    "compress_ratio": "attention to keys that are compressed, by {}",
    "hc_mult": "{} residual streams that its layers mix (hyper-connections)",
    "ngram_size": "embeddings of up to {} tokens in a row",
    "attn_type": "attention of type {}",
    "num_mel_bins": "a decoder that attends to sound, of {} mel bins",
    "cross_attention_hidden_size": "attention to an encoder's states of {} numbers",
}


def uncomputed(config: Config) -> str | None:
    """What a configuration has that HMT does not compute, as a clause; None: nothing is known."""
    inputs = [name for name in _INPUTS if getattr(config, name, None) is not None]
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder beside its decoder"
    if inputs:
        return f"it also takes images or sound ({inputs[0]})"
    text = config.get_text_config()
    for name, what in _FIELDS.items():
        value = getattr(text, name, None)
        if value and value != 1:
            return f"it has {what.format(_short(value))}: {name}, which HMT does not compute"
    return _odd_layers(config) or _odd_layers(text)


def encoder(config: Config) -> str | None:
    """Whether tokens see those behind them, as a clause."""
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if masked and getattr(config, "is_decoder", True) is False:
        return "it is an encoder (is_decoder is false), whose tokens see those behind them"
    return None


def _odd_layers(config: Config) -> str | None:
    kinds: Any = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    names = {str(kind) for kind in kinds or ()}
    recurrent = sorted(n for n in names if any(word in n.lower() for word in _RECURRENT))
    if recurrent:
        return f"it has layers of {', '.join(recurrent)}, which HMT does not keep"
    other = sorted(name for name in names if name not in _KINDS and "attention" in name)
    if other:
        return f"it has layers of {', '.join(other)}, which HMT does not compute"
    return None


def not_followed(error: Exception) -> str:
    """Which of a model's modules failed when it was tried, as a clause."""
    failed = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        value = frame.f_locals.get("self")
        if isinstance(value, nn.Module) and type(value).__module__.startswith("transformers."):
            failed = type(value).__name__
    return f"HMT cannot follow {'its code' if failed is None else f'what its {failed} computes'}"


def _short(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        return " and ".join(sorted({str(item) for item in items if item}, key=str))
    return str(value)

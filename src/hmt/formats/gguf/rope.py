"""Rotary positions that a GGUF file's keys ask for, as transformers describes them.

What the keys mean is what llama.cpp makes of them (`llama_model::load_hparams`, `ggml_rope_yarn`):

- `rope.scaling.factor`, or in files before 2024 `rope.scale_linear`, divides all frequencies where
  `rope.scaling.type` is "linear" or is not there; with "yarn" it divides slow ones.
- The tensors rope_freqs, rope_factors_long and rope_factors_short divide each frequency besides.
- `rope.scaling.attn_factor` multiplies cosines and sines, whatever the type; with "yarn" besides
  what YaRN multiplies them with.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from hmt.formats.gguf.keys import Keys

_FACTOR: Final = "rope.scaling.factor"
_OLD_FACTOR: Final = "rope.scale_linear"
_TYPE: Final = "rope.scaling.type"
_ATTENTION: Final = "rope.scaling.attn_factor"
_OWN_FACTORS: Final = ("rope_factors_long", "rope_freqs")
# Keys below "rope." that are read here or by an architecture, or say nothing of numbers: sections
# are of axes that agree for text.
_KNOWN: Final = frozenset({
    "dimension_count", "dimension_count_swa", "dimension_sections", "freq_base", "freq_base_swa",
    "scale_linear",
    "scaling.type", "scaling.factor", "scaling.attn_factor", "scaling.finetuned",
    "scaling.original_context_length", "scaling.yarn_log_multiplier",
    "scaling.yarn_beta_fast", "scaling.yarn_beta_slow",
})  # fmt: skip
# Values with which other keys change nothing.
_NEUTRAL: Final = {"scaling.yarn_ext_factor": (-1, 1), "scaling.yarn_attn_factor": (-1, 1)}


def rope_parameters(
    keys: Keys,
    dim: int,
    max_positions: int,
    factors: Mapping[str, list[float]],
    *,
    theta: float = 10000.0,
    partial: bool = False,
) -> dict[str, Any]:
    """`rope_parameters` of the config.json.

    dim       numbers of a head
    factors   numbers of the tensors with factors, by their names without ".weight"
    theta     where the file has no base
    partial   the architecture may turn a part of each head
    Raises CheckpointError for keys that ask for something that is not computed.
    """
    found = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", theta)}
    for key, value in keys.below("rope."):
        if key not in _KNOWN and value not in _NEUTRAL.get(key, ()):
            raise keys.unread(f"rope.{key}")
    turned = keys.count("rope.dimension_count", dim)
    if turned != dim:
        if not partial:
            raise keys.unread("rope.dimension_count", f"and heads have {dim} numbers")
        found["partial_rotary_factor"] = turned / dim
    original = keys.count("rope.scaling.original_context_length", max_positions)
    kind = _kind(keys)
    scale = 1.0 if kind == "none" else _scale(keys)
    attention = _attention(keys)
    own = next((name for name in _OWN_FACTORS if name in factors), None)
    if kind == "yarn":
        if own is not None:
            raise keys.unread(_TYPE, f"beside factors in a tensor {own}: HMT computes one of both")
        return found | _yarn(keys, scale, attention, original)
    if own is None:
        if kind == "longrope":
            raise keys.unread(_TYPE, "and no tensors rope_factors_long and rope_factors_short")
        if attention != 1:
            # Of what transformers names, LongRoPE scales cosines and sines by any number.
            return found | _divided([scale] * (turned // 2), None, attention, original)
        return found if scale == 1 else found | {"rope_type": "linear", "factor": scale}
    long = [scale * factor for factor in factors[own]]
    short = None
    if own == "rope_factors_long" and "rope_factors_short" in factors:
        short = [scale * factor for factor in factors["rope_factors_short"]]
    return found | _divided(long, short, attention, original)


def _kind(keys: Keys) -> str:
    """The type of scaling; where there is none llama.cpp takes it for linear."""
    kind = keys.text(_TYPE) or "linear"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.unread(_TYPE, "which is none of none, linear, yarn and longrope")
    return kind


def _scale(keys: Keys) -> float:
    """What frequencies are divided by; 1 where nothing is said of it."""
    # In llama.cpp a factor of 0 stands for none.
    return float(keys.number(_FACTOR, 0) or keys.number(_OLD_FACTOR, 0) or 1.0)


def _attention(keys: Keys) -> float:
    """What cosines and sines are multiplied with; 1 where the file does not say."""
    value = float(keys.number(_ATTENTION, 1.0))
    if not 0 < value < math.inf:
        raise keys.unread(_ATTENTION, "wanted is a number above 0")
    return value


def _divided(
    long: list[float], short: list[float] | None, attention: float, original: int
) -> dict[str, Any]:
    """Each frequency divided by its own number, which is what LongRoPE does."""
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": long if short is None else short,
        "original_max_position_embeddings": original,
        "factor": 1.0,
        "attention_factor": attention,
    }


def _yarn(keys: Keys, scale: float, attention: float, original: int) -> dict[str, Any]:
    found = {
        "rope_type": "yarn",
        "factor": scale,
        "original_max_position_embeddings": original,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", None)
    if multiplier:
        if attention != 1:
            raise keys.unread(_ATTENTION, "beside rope.scaling.yarn_log_multiplier")
        # A tenth of DeepSeek's mscale_all_dim, with which its mscale agrees.
        found |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    elif attention != 1:
        usual = 0.1 * math.log(scale) + 1 if scale > 1 else 1.0
        found["attention_factor"] = attention * usual
    return found

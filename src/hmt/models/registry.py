"""Which architectures run, and opening one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hmt.base.errors import CheckpointError, UnknownArchitectureError
from hmt.contracts.model import Model
from hmt.models.config import Config, read_config
from hmt.models.deepseek import (
    AXK2,
    DeepSeekV2,
    DeepSeekV3,
    DeepSeekV4,
    DeepSeekV32,
    Glm4Moe,
    GlmMoeDsa,
)
from hmt.models.gemma3 import Gemma3
from hmt.models.gemma4 import Gemma4
from hmt.models.gpt_oss import GptOss
from hmt.models.lfm2 import Lfm2, Lfm2Moe
from hmt.models.linear_attention import (
    BailingHybrid,
    Glm5Next,
    KimiLinear,
    MiniMax,
    OlmoHybrid,
    Qwen3Next,
    Qwen4Exp,
    Qwen35,
    Qwen35Moe,
)
from hmt.models.llama import Llama
from hmt.models.mistral import Mistral
from hmt.models.mixtral import MiniMaxM2, Mixtral
from hmt.models.mixture_of_recursions import MixtureOfRecursions
from hmt.models.phi3 import Phi3
from hmt.models.qwen2 import Qwen2
from hmt.models.qwen3 import Qwen3, Qwen3Moe
from hmt.models.state_space import (
    Bamba,
    FalconH1,
    GraniteHybrid,
    Jamba,
    Mamba2LM,
    MambaLM,
    NemotronH,
)

# `architectures` entry of config.json -> (model_type of transformers, family)
_FAMILIES: dict[str, tuple[str, Callable[[Config, torch.dtype], Model]]] = {
    "AXK2ForCausalLM": ("axk2", AXK2),
    "BailingHybridForCausalLM": ("bailing_hybrid", BailingHybrid),
    "BambaForCausalLM": ("bamba", Bamba),
    "DeepseekV2ForCausalLM": ("deepseek_v2", DeepSeekV2),
    "DeepseekV3ForCausalLM": ("deepseek_v3", DeepSeekV3),
    "DeepseekV32ForCausalLM": ("deepseek_v32", DeepSeekV32),
    "DeepseekV4ForCausalLM": ("deepseek_v4", DeepSeekV4),
    "FalconH1ForCausalLM": ("falcon_h1", FalconH1),
    "FalconMambaForCausalLM": ("falcon_mamba", MambaLM),
    "Gemma3ForCausalLM": ("gemma3_text", Gemma3),
    "Gemma4ForCausalLM": ("gemma4_text", Gemma4),
    "Glm4MoeForCausalLM": ("glm4_moe", Glm4Moe),
    "Glm5NextForCausalLM": ("glm5_next_text", Glm5Next),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", GlmMoeDsa),
    "GptOssForCausalLM": ("gpt_oss", GptOss),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", GraniteHybrid),
    "JambaForCausalLM": ("jamba", Jamba),
    "KimiLinearForCausalLM": ("kimi_linear", KimiLinear),
    "Lfm2ForCausalLM": ("lfm2", Lfm2),
    "Lfm2MoeForCausalLM": ("lfm2_moe", Lfm2Moe),
    "LlamaForCausalLM": ("llama", Llama),
    "MambaForCausalLM": ("mamba", MambaLM),
    "Mamba2ForCausalLM": ("mamba2", Mamba2LM),
    "MiniMaxForCausalLM": ("minimax", MiniMax),
    "MiniMaxM2ForCausalLM": ("minimax_m2", MiniMaxM2),
    "MistralForCausalLM": ("mistral", Mistral),
    "MixtralForCausalLM": ("mixtral", Mixtral),
    "MixtureOfRecursionsForCausalLM": ("llama", MixtureOfRecursions),
    "NemotronHForCausalLM": ("nemotron_h", NemotronH),
    "OlmoHybridForCausalLM": ("olmo_hybrid", OlmoHybrid),
    "Phi3ForCausalLM": ("phi3", Phi3),
    "Qwen2ForCausalLM": ("qwen2", Qwen2),
    "Qwen3ForCausalLM": ("qwen3", Qwen3),
    "Qwen3MoeForCausalLM": ("qwen3_moe", Qwen3Moe),
    "Qwen3NextForCausalLM": ("qwen3_next", Qwen3Next),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", Qwen35),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", Qwen35Moe),
    "Qwen4ExpForCausalLM": ("qwen4_exp_text", Qwen4Exp),
}
# What publishers call a model whose class has another name in transformers.
_PUBLISHED = {"BailingMoeV3ForCausalLM": "BailingHybridForCausalLM"}
# Text parts of multimodal models that compute, for text alone, what a family does.
_ALIKE = {
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
# Models that write text and speak it: of these the part that writes.
_SPEAKING = {
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
_ROTARY = ("rope_scaling", "rope_parameters")
# How their rotary positions have three axes, as their code says; sections where the file has none.
_INTERLEAVED = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
_AXES: dict[str, dict[str, Any]] = {
    "glm4v_moe_text": {"mrope_section": [8, 12, 12]},
    "qwen2_vl_text": {"mrope_section": [16, 24, 24]},
    "qwen2_5_vl_text": {"mrope_section": [16, 24, 24]},
    "qwen2_5_omni_text": {"mrope_section": [16, 24, 24]},
    "qwen3_omni_moe_text": _INTERLEAVED,
    "qwen3_vl_text": _INTERLEAVED,
    "qwen3_vl_moe_text": _INTERLEAVED,
    "qwen3_5_text": _INTERLEAVED | {"mrope_section": [11, 11, 10]},
    "qwen3_5_moe_text": _INTERLEAVED | {"mrope_section": [11, 11, 10]},
}
# Multimodal models whose text is that of a causal language model of transformers, in its masks and
# logits, too: Aya Vision's has no scale of logits, and PaliGemma's prompts see what comes after.
_PLAIN = ("aria", "exaone4_5", "granite_speech", "granite_speech_plus")
_FLAT = ("glm5_next_text",)  # may be published without encoders, and without a part for text
_FIXED = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}  # what their code does, whatever is said
# Of a multimodal model.
TEXT_ONLY = "reads and writes text only: its encoders of images and sound are not loaded"
_OTHER_PARTS = (
    r"(^|\.)\w*(visual|vision|image|video|audio|speech|projector|connector|aligner|perceiver)\w*\.",
    r"(^|\.)(mlp1|vqmodel|vlm_merger|merger|resampler|qformer|query_tokens|newline)\w*(\.|$)",
)
# What fields of types and sizes that no published file has end in, where none is checked by name.
_WRONG = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def supported_architectures() -> tuple[str, ...]:
    """Entries of `architectures` in config.json that HMT runs, sorted."""
    return tuple(sorted(_FAMILIES))


def open_model(config: Mapping[str, Any], path: Path, dtype: torch.dtype) -> Model:
    """The model that a parsed config.json describes; no weight is read.

    path    of the checkpoint, for messages
    dtype   of activations
    Raises UnknownArchitectureError for a family that HMT does not have, and CheckpointError for a
    configuration that is wrong or asks for something that its family does not compute here.
    """
    with errors_of(path):
        text = text_part(config)
        if text is not None:
            model = open_model(text, path, dtype)
            model.spec = replace(
                model.spec,
                remarks=(*model.spec.remarks, TEXT_ONLY),
                ignored=(*model.spec.ignored, *_OTHER_PARTS),
            )
            return model
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if not isinstance(name, str) or name not in _FAMILIES or _is_left(name, config):
            return _open_other(config, name, dtype)
        model_type, family = _FAMILIES[name]
        return _checked(family(read_config(config, model_type), dtype))


def family_of(
    config: Mapping[str, Any], path: Path
) -> tuple[Callable[[Config, torch.dtype], Model], Config]:
    """HMT's own family of a parsed config.json, which has one, and what the family reads of it.

    Raises CheckpointError.
    """
    with errors_of(path):
        text = text_part(config) or config
        model_type, family = _FAMILIES[text["architectures"][0]]
        return family, read_config(text, model_type)


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Let errors of making a model of a config.json name the file, as CheckpointError.

    Fields that no published file has may be of any type.
    """
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{path}/config.json: {error}") from error
    except _WRONG as error:
        raise CheckpointError(
            f"{path}/config.json describes no model of this architecture "
            f"({type(error).__name__}: {error!s:.300}): download it again"
        ) from error


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config.json of a multimodal model's language model; None where HMT has no such family."""
    text, kind = config.get("text_config"), f"{config.get('model_type')}_text"
    if text is None and (kind in _FLAT or (kind in _ALIKE and "vision_config" in config)):
        text = config  # as Qwen2.5-VL was published first
    elif not isinstance(text, Mapping) or "num_hidden_layers" in config:
        return None
    else:
        kind = text.get("model_type") or kind
    # Of several families with a type's configuration the first is the type's own.
    names = {model_type: name for name, (model_type, _) in reversed(_FAMILIES.items())} | _ALIKE
    if not isinstance(kind, str):
        return None
    name = names.get(kind) or _causal(config, kind)
    if name is None:
        return None
    tied = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
    axes = _AXES.get(kind, {})
    rotary = {k: _one_axis(text[k], axes) for k in _ROTARY if k in text}
    own = {k: value for k, value in text.items() if k != "vision_config"}
    own |= tied | rotary | _FIXED.get(kind, {})
    kind = _FAMILIES[name][0] if name in _FAMILIES else kind
    return {**own, "model_type": kind, "architectures": [name]}


def _causal(config: Mapping[str, Any], kind: str) -> str | None:
    """transformers' causal language model of type `kind`, where it is a plain part of another."""
    if config.get("model_type") not in _PLAIN:
        return None
    from transformers.models.auto import modeling_auto  # names only, yet it takes a second

    found: str | None = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    return found


def _one_axis(parameters: Any, axes: Mapping[str, Any]) -> Any:
    """Rotary parameters, of type "default" where they are of several axes, which agree for text.

    `axes`: what they say of these, where the file does not.
    """
    if not isinstance(parameters, Mapping):
        return parameters
    one = {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value
        for key, value in parameters.items()
    }
    return {**axes, **one, **{key: axes[key] for key in axes if key == "mrope_interleaved"}}


def _is_left(name: str, config: Mapping[str, Any]) -> bool:
    """Whether transformers' modules compute it: A.X-K2's experts where they are in groups."""
    return name == "AXK2ForCausalLM" and config.get("n_group") not in (None, 1)


def with_architecture(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parsed config.json with an entry in `architectures` where `model_type` says which.

    That is the type's causal language model, where there is no entry, or it names the bare model of
    that type, without an output layer.  A publisher's own name becomes transformers'.  Of a model
    that also speaks it is what understands and writes.
    """
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping) and config.get("model_type") in _SPEAKING:
        kind = f"{config['model_type']}_thinker"
        return {**thinker, "model_type": kind, "architectures": [_SPEAKING[config["model_type"]]]}
    names, model_type = config.get("architectures"), config.get("model_type")
    name = names[0] if isinstance(names, list) and names else None
    if isinstance(name, str) and name in _PUBLISHED:
        return {**config, "architectures": [_PUBLISHED[name]]}
    if name in _FAMILIES or not isinstance(model_type, str):
        return config
    from transformers.models.auto import modeling_auto  # names only, yet it takes a second

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    bare = modeling_auto.MODEL_MAPPING_NAMES.get(model_type)
    images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    if causal is None or name not in (None, bare) or (name and name == images):
        return config
    return {**config, "architectures": [causal]}


def _checked(model: Model) -> Model:
    """The model, unless fields that are right alone make a tensor of no size."""
    for block in model.spec.blocks:
        for param in block.params:
            if min(param.shape, default=1) < 1:
                raise CheckpointError(
                    f"{param.sources[0]} of {block.id} would have shape {list(param.shape)}: sizes "
                    "do not belong together"
                )
    return model


def _open_other(config: Mapping[str, Any], name: Any, dtype: torch.dtype) -> Model:
    """A model of transformers that no family here computes."""
    from hmt.models import fallback  # transformers' modelling code takes a second to import

    if not isinstance(name, str) or name not in fallback.architectures():
        given = f"architecture {name!r:.100}" if name else "no architecture"
        raise UnknownArchitectureError(
            f"names {given}; HMT runs {', '.join(supported_architectures())}, and causal language "
            "models of the installed transformers library"
        )
    model = _checked(fallback.open_fallback(config, name, dtype))
    if any(config.get(part) for part in ("vision_config", "audio_config")):
        model.spec = replace(model.spec, remarks=(*model.spec.remarks, TEXT_ONLY))
    return model

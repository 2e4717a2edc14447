"""A small configuration of every type that transformers calls a causal language model.

And of every type of images and text, whose text part is compared.

Each is made of the type's own defaults: fields that are sizes become small, and what else its code
needs to be built is written down below.
"""

import random
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from plain_memory import published, random_reference
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

import hmt
from hmt.base.errors import HMTError
from hmt.models import open_model
from hmt.models.fallback.sizes import REMARK

TOKENS, STEPS, CHUNK = 27, 3, 8
LAYERS = 4
_SMALL: dict[str, int] = {
    "vocab_size": 260, "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128,
    "max_seq_len": 128, "seq_length": 128, "max_sequence_length": 128, "sliding_window": 8,
    "attention_window": 8, "sliding_window_size": 8, "window_size": 8, "attention_chunk_size": 8,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embedding_size": 64,
    "input_embedding_size": 64, "output_embedding_size": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "d_ff": 96, "n_inner": 96, "dff": 96,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "ffn_hidden_size": 96, "d_inner": 96,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "n_layers": LAYERS, "num_layers": LAYERS,
    "decoder_layers": LAYERS, "encoder_layers": LAYERS, "num_decoder_layers": LAYERS,
    "num_encoder_layers": LAYERS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2,
    "num_kv_heads": 2, "head_dim": 16, "global_head_dim": 16, "attention_head_size": 16,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "qk_head_dim": 16, "o_lora_rank": 16, "index_head_dim": 16,
    "index_n_heads": 16, "index_topk": 8,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "top_k": 2,
    "top_k_experts": 2, "moe_intermediate_size": 32, "expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48,
    "intermediate_size_mlp": 96, "dense_intermediate_size": 96, "n_shared_experts": 1,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "vocab_size_per_layer_input": 260, "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "state_size": 8,
    "time_step_rank": 4, "num_mtp_modules": 0, "num_nextn_predict_layers": 0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "chunk_size": 8, "lru_width": 64, "rotary_dim": 8,
}  # fmt: skip
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# As published: an indexer, and a table of n-grams in the first layer.
_QWEN4: dict[str, Any] = {
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 6,
    "indexer_compress_ratio": 3, "hc_lowrank": 16, "ple_layer_ids": [1], "ple_embed_dim": 32,
    "ngram_vocab_size_base": 50, "split_ngram_parts": 8, "eos_token_id": 2,
}  # fmt: skip
# What else a type needs, to be built so small or to compute what a published one does.
_MORE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4}
        for kind in ("full_attention", "sliding_attention")
    }},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "glm5_next": {"text_config": {
        "layer_types": ["linear_attention", "indexed_attention"] * (LAYERS // 2),
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "num_key_value_heads": 4, "index_kpool": 4, "linear_num_heads": 4,
        "linear_head_dim": 16, "hc_mult": 2,
    }},
    "granite_swa": {"sliding_window": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4] * LAYERS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "longcat_flash": {"head_dim": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True},
}  # fmt: skip
# Of a type that publishes models of several kinds, one that its defaults are not.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "axk2, groups": ("axk2", {"n_group": 2, "topk_group": 1}),
    "gemma4_text, large": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
         "vocab_size_per_layer_input": 262144},
    ),
    "gemma4_text, experts": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": True,
         "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
}  # fmt: skip
# Encoders, which are causal language models where their configuration says so.
VARIANTS |= {
    f"{name}, is_decoder": (name, {"is_decoder": True})
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    and getattr(CONFIG_MAPPING[name](), "is_decoder", True) is False
}
_IMAGES = ", text part"
_AXES = ("vl", "glm", "omni", "ocr")  # in names of types that turn heads by three positions


@dataclass(frozen=True)
class Outcome:
    """What became of a type.

    kind   "family" and "equal" compute transformers' logits, by a family of HMT's own or by
           transformers' modules; "refused" was refused beforehand, with `reason`; "unbuilt" is not
           built so small by transformers; "wrong" and "died" should not be
    """

    model_type: str
    architecture: str = ""
    kind: str = ""
    reason: str = ""


def types() -> tuple[str, ...]:
    """model_type of every causal language model of transformers, and variants of some.

    And every model of images and text, as `TYPE, text part`.
    """
    images = (f"{name}{_IMAGES}" for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS, *images)


def _of(name: str) -> tuple[str, str]:
    """model_type and architecture."""
    if name.endswith(_IMAGES):
        model_type = name.removesuffix(_IMAGES)
        return model_type, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]
    model_type = VARIANTS.get(name, (name,))[0]
    return model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def config_of(name: str) -> Any:
    """A small configuration."""
    model_type, variant = VARIANTS.get(name, (_of(name)[0], {}))
    kind, more = CONFIG_MAPPING[model_type], _MORE.get(model_type, {}) | variant
    fields = _small(kind())
    for field, value in more.items():
        inner = fields.get(field)
        fields[field] = inner | value if isinstance(inner, dict) else value
    if model_type == "prophetnet":
        del fields["num_hidden_layers"]  # it counts two kinds
    return kind(**fields)


def _small(base: Any) -> dict[str, Any]:
    """Fields of `base` that are sizes, made small, also those of configurations in it."""
    fields: dict[str, Any] = {}
    for name in base.sub_configs:
        inner = getattr(base, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            fields[name] = {"model_type": inner.model_type, **_small(inner)}
    for name, size in _SMALL.items():
        value = _field(base, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > size:
            given = getattr(type(base), name, None)
            if not isinstance(given, property) or given.fset is not None:
                fields[name] = size
    for name, value in vars(base).items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= _SMALL["vocab_size"]:
            fields[name] = 3
    for name, token in _IDS.items():
        if isinstance(_field(base, name), int):
            fields[name] = token
    rotary = _field(base, "rope_parameters")
    if isinstance(rotary, dict) and any(each in base.model_type for each in _AXES):
        turned = int(16 * (rotary.get("partial_rotary_factor") or 1)) // 2
        sections = [turned - turned // 4 * 2, turned // 4, turned // 4]
        fields["rope_parameters"] = rotary | {"mrope_section": sections}
    if "qk_rope_head_dim" in fields:
        fields.pop("head_dim", None)  # is what is rotated
    if "qk_rope_head_dim" in fields and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]  # all latent
    return fields


def _field(base: Any, name: str) -> Any:
    try:
        return getattr(base, name, None)
    except (RuntimeError, ValueError):  # of configurations in which layers differ
        return None


@torch.inference_mode()
def _logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    try:
        logits: torch.Tensor = reference(ids, use_cache=False).logits[0]
    except AttributeError:  # of a version that asks itself for images that nobody gave
        logits = reference.language_model(ids, use_cache=False).logits[0]
    return logits.float()


def outcome_of(model_type: str, folder: Path) -> Outcome:
    """Build it, and run it beside transformers: in chunks, then token by token, and answering."""
    torch.set_num_threads(1)
    name = _of(model_type)[1]
    transformers.logging.set_verbosity_error()
    try:
        images = model_type.endswith(_IMAGES)
        kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
        reference = random_reference(config_of(model_type), 7, kind)
        rng = random.Random(7)
        tokens = [rng.randrange(8, 250) for _ in range(TOKENS)]
        published(reference, folder)
        (folder / "generation_config.json").unlink(missing_ok=True)  # of tokens beyond these
    except Exception as error:
        return _of_defaults(model_type, name, error)
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), folder)
    options = {"host_memory": "256MiB", "dtype": "float32", "context": 64, "max_batch": 2}
    with hmt.Engine(**options, max_prefill_tokens=CHUNK, threads=1) as engine:
        try:
            model = engine.load_model(folder)
        except HMTError as error:
            said = str(error).split("config.json: ")[-1].replace(str(folder), "the checkpoint")
            return Outcome(model_type, name, "refused", said)
        except Exception as error:
            return Outcome(model_type, name, "died", repr(error)[:300])
        by_modules = any(REMARK in note for note in model.summary().notes)
        try:
            found = model.logits(tokens, range(TOKENS), prefill=TOKENS - STEPS)
            prompts = [tokens[:11], tokens]
            asked = [hmt.Request(prompt, 3, ignore_eos=True) for prompt in prompts]
            answers = [list(answer.token_ids) for answer in model.infer_batch(asked)]
        except Exception as error:
            return Outcome(model_type, name, "died", repr(error)[:300])
    try:
        wanted = _logits(reference, tokens)
    except Exception as error:
        return Outcome(model_type, name, "unbuilt", repr(error)[:300])
    allowed = max(1e-4 * float(wanted.std()), 4 * _own_difference(reference, tokens, wanted))
    apart = float((found - wanted).abs().max())
    firsts = [int(_logits(reference, prompt)[-1].argmax()) for prompt in prompts]
    if not apart <= allowed or [answer[0] for answer in answers] != firsts:
        return Outcome(model_type, name, "wrong", f"{apart:.1e} apart, {allowed:.1e} allowed")
    return Outcome(model_type, name, "equal" if by_modules else "family")


def _of_defaults(model_type: str, name: str, error: Exception) -> Outcome:
    """What becomes of a type's own defaults, where it is not built so small."""
    try:
        config = CONFIG_MAPPING[_of(model_type)[0]]().to_dict()
        config |= {"model_type": _of(model_type)[0], "architectures": [name]}
        open_model(config, Path("defaults"), torch.float32)
    except HMTError as refusal:
        return Outcome(model_type, name, "refused", str(refusal).split("config.json: ")[-1])
    except Exception as other:
        return Outcome(model_type, name, "unbuilt", repr(other)[:300])
    return Outcome(model_type, name, "unbuilt", repr(error)[:300])


def _own_difference(reference: Any, tokens: list[int], wanted: torch.Tensor) -> float:
    """How far transformers' two attentions are apart."""
    if not (reference._supports_sdpa and reference._can_set_attn_implementation()):
        return 0.0
    reference.set_attn_implementation("sdpa")
    apart = float((_logits(reference, tokens) - wanted).abs().max())
    reference.set_attn_implementation("eager")
    return apart


def table(outcomes: Sequence[Outcome]) -> str:
    """What became of each type, in Markdown."""
    texts = [o for o in outcomes if not o.model_type.endswith(_IMAGES)]
    parts = [o for o in outcomes if o.model_type.endswith(_IMAGES)]
    kinds: dict[str, set[str]] = {}
    for outcome in texts:
        kinds.setdefault(_of(outcome.model_type)[0], set()).add(outcome.kind)
    run = sum(not found.isdisjoint({"family", "equal"}) for found in kinds.values())
    some = sum(o.kind in ("family", "equal") for o in parts)
    return "\n".join(
        [
            f"With transformers {transformers.__version__}, by `model_type`. {run} of {len(kinds)} "
            f"causal types run, and the text part of {some} of {len(parts)} types of images and "
            "text.",
            "",
            "## Causal language models",
            "",
            *_section(texts),
            "## Text parts of models of images and text",
            "",
            *_section(parts),
        ]
    )


def _section(outcomes: Sequence[Outcome]) -> list[str]:
    def named(kind: str) -> list[str]:
        return by_initial(o.model_type.removesuffix(_IMAGES) for o in outcomes if o.kind == kind)

    counts = Counter(outcome.kind for outcome in outcomes)
    rows = [
        f"| {o.model_type.removesuffix(_IMAGES)} | {o.architecture} | {_clause(o)} |"
        for o in outcomes
        if o.kind not in ("family", "equal")
    ]
    return [
        f"**Families that HMT implements** ({counts['family']}):",
        "",
        *named("family"),
        "",
        f"**Through transformers' modules, equal to transformers** ({counts['equal']}):",
        "",
        *named("equal"),
        "",
        f"**Refused before anything is loaded** ({counts['refused']}), and not tried "
        f"({counts['unbuilt']}), because transformers does not build one so small or lacks a "
        "library:",
        "",
        "| type | architecture | why |",
        "|---|---|---|",
        *rows,
        "",
    ]


def by_initial(model_types: Iterable[str]) -> list[str]:
    """A Markdown list, one item per initial letter; `NAME, VARIANT` becomes `NAME (VARIANT)`."""
    names = sorted(re.sub(r", (.*)", r" (\1)", name) for name in model_types)
    return [f"- {', '.join(group)}" for _, group in groupby(names, lambda name: name[0])]


def _clause(outcome: Outcome) -> str:
    if outcome.kind == "unbuilt":
        return "not tried: transformers builds none of random numbers in this size"
    reason = outcome.reason.partition("either: ")[2] or outcome.reason
    return " ".join(reason.split()).replace("|", "/")

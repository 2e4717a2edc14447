# ruff: noqa: E402  (the converter brings its own gguf package, which must be found first)
"""Asks llama.cpp's converter what it makes of small models; see gguf_conventions.py."""

import gzip
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LLAMA_CPP = Path(sys.argv[1])
sys.path[:0] = [
    str(LLAMA_CPP / "gguf-py"),
    str(LLAMA_CPP),
    str(Path(__file__).parents[1] / "models"),
]

import numpy as np
import transformers
from every_type import config_of
from gguf_conventions import (
    _STEPS,
    GOLDEN,
    VOCABULARY,
    Numbers,
    _checksum,
    _combined,
    _grouped,
    drawn,
    vocabulary,
)
from safetensors.numpy import load_file, save_file

SMALL = {"num_hidden_layers": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
RECURS, ATTENDS = "linear_attention", "full_attention"
GRANITE_HYBRID: dict[str, Any] = {
    "layer_types": [RECURS, ATTENDS, RECURS, RECURS],
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "mamba_n_groups": 2,
    "hidden_size": 64,
}
FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 128, "head_dim": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
    "mamba_n_groups": 2,
}  # fmt: skip
FACTORS: dict[str, Any] = {
    "mamba_rms_norm": False, "embedding_multiplier": 4.0, "lm_head_multiplier": 2.0,
    "key_multiplier": 0.5, "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5,
    "ssm_in_multiplier": 0.5, "ssm_out_multiplier": 2.0, "ssm_multipliers": [2.0] * 5,
    "mlp_multipliers": [2.0, 0.5],
}  # fmt: skip
MAMBA: dict[str, Any] = {"state_size": 4, "intermediate_size": 128}
JAMBA: dict[str, Any] = {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 4}
CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
# (type of transformers, fields beside every_type's) by architecture and what is special.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", SMALL | {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        SMALL | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
    ),
    "qwen2moe": ("qwen2_moe", SMALL),
    "glm4": ("glm4", SMALL | {"attention_bias": True}),
    "glm4moe": ("glm4_moe", SMALL | {"use_qk_norm": True, "attention_bias": True}),
    "minimax-m2": (
        "minimax_m2",
        SMALL
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "seed_oss": ("seed_oss", SMALL),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4}),
    "command-r": ("cohere", SMALL),
    "command-r, norms": ("cohere", SMALL | {"use_qk_norm": True}),
    "mistral3": (
        "ministral3",
        SMALL
        | {
            "rope_parameters": YARN
            | {
                "llama_4_scaling_beta": 0.1,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
    "granite": (
        "granite",
        SMALL
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "granitemoe": (
        "granitemoe",
        SMALL
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "granitemoe, shared": ("granitemoeshared", SMALL | {"shared_intermediate_size": 64}),
    "olmo2": ("olmo2", SMALL),
    "olmo2, windows": ("olmo3", SMALL | {"num_hidden_layers": 4, "sliding_window": 8}),
    "olmoe": ("olmoe", SMALL | {"num_key_value_heads": 4}),
    "olmo": ("olmo", SMALL | {"clip_qkv": 1.5}),
    "hunyuan-dense": ("hunyuan_v1_dense", SMALL),
    "hunyuan-moe": ("hunyuan_v1_moe", SMALL | {"num_experts": 8, "moe_topk": [2] * 2}),
    "exaone4": ("exaone4", SMALL | {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4, windows": ("exaone4", {"sliding_window": 8}),
    "ernie4_5": ("ernie4_5", SMALL),
    "ernie4_5-moe": ("ernie4_5_moe", SMALL | {"intermediate_size": 128}),
    "dots1": ("dots1", SMALL | {"num_key_value_heads": 4}),
    "phi2": ("phi", SMALL | {"num_key_value_heads": 4, "intermediate_size": 256}),
    "phimoe": ("phimoe", SMALL | {"lm_head_bias": True, "attention_bias": True}),
    "starcoder2": ("starcoder2", SMALL),
    "stablelm": ("stablelm", SMALL | {"use_qkv_bias": True}),
    "falcon": ("falcon", SMALL | {"num_kv_heads": 1, "ffn_hidden_size": 256}),
    "falcon, new": (
        "falcon",
        SMALL | {"ffn_hidden_size": 256, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gptneox": ("gpt_neox", SMALL),
    "bloom": ("bloom", SMALL | {"n_layer": 2}),
    "mpt": ("mpt", SMALL | {"n_layers": 2}),
    "gpt2": ("gpt2", SMALL | {"n_layer": 2}),
    "nemotron": ("nemotron", SMALL),
    "minicpm3": ("minicpm3", SMALL | {"v_head_dim": 16}),
    "arcee": ("arcee", SMALL),
    "gemma4": ("gemma4_text, large", {"final_logit_softcapping": 30.0}),
    "gemma4, experts": ("gemma4_text, experts", {}),
    "afmoe": ("afmoe", {"mup_enabled": True}),
    "starcoder": ("gpt_bigcode", SMALL | {"n_layer": 2}),
    "chatglm": ("glm", SMALL | {"rms_norm_eps": 1e-5}),
    "jais2": ("jais2", SMALL),
    "exaone-moe": ("exaone_moe", {}),
    "cohere2moe": ("cohere2_moe", {}),
    "mellum": (
        "mellum",
        {
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            # llama.cpp has one base for all layers.
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 5000.0}
                for kind in ("full_attention", "sliding_attention")
            },
        },
    ),
    "hy-v3": ("hy_v3", {}),
    "qwen3next": ("qwen3_next", DELTA | {"num_hidden_layers": 4}),
    "qwen35": ("qwen3_5_text", DELTA | {"num_hidden_layers": 4}),
    "qwen35, as many keys": ("qwen3_5_text", DELTA | {"linear_num_value_heads": 2}),
    # Rows of whole blocks of 256, of which each has inputs of two heads.
    "qwen35, wide": (
        "qwen3_5_text",
        DELTA
        | SMALL
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "hidden_size": 256,
            "intermediate_size": 256,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_value_heads": 4,
        },
    ),
    "qwen35moe": ("qwen3_5_moe_text", DELTA | {"num_hidden_layers": 4}),
    "lfm2": ("lfm2", CONV),
    "lfm2, as wide as given": ("lfm2", CONV | {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2_moe", CONV | {"num_dense_layers": 1}),
    "deepseek2, lite": ("glm4_moe_lite", SMALL),
    "mamba": ("mamba", SMALL | MAMBA),
    "mamba, norms": ("falcon_mamba", SMALL | MAMBA | {"tie_word_embeddings": False}),
    "mamba2": ("mamba2", SMALL | {"n_groups": 2}),
    "jamba": ("jamba", JAMBA | {"num_experts": 8, "mamba_dt_rank": 4}),
    "jamba, dense": (
        "jamba",
        SMALL | JAMBA | {"attn_layer_offset": 0, "num_experts": 1, "num_experts_per_tok": 1},
    ),
    "granitehybrid": (
        "granitemoehybrid",
        GRANITE_HYBRID | {"num_local_experts": 0, "intermediate_size": 48},
    ),
    "granitehybrid, experts": ("granitemoehybrid", GRANITE_HYBRID),
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": [RECURS, "mlp", ATTENDS, "mlp"], "n_groups": 2},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {"layers_block_type": [RECURS, "moe", ATTENDS, "moe"], "n_groups": 2},
    ),
    "nemotron_h_moe, latent": (
        "nemotron_h",
        {"layers_block_type": [RECURS, "moe", ATTENDS, "moe"], "moe_latent_size": 32},
    ),
    "falcon-h1": ("falcon_h1", SMALL | FALCON_H1),
    "falcon-h1, factors": ("falcon_h1", SMALL | FALCON_H1 | FACTORS),
}


def converted(folder: Path, more: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Numbers]]:
    """(metadata, tensors) that the converter writes of a checkpoint."""
    import torch
    from conversion import ModelBase, get_model_architecture, get_model_class
    from conversion.base import ModelType, gguf

    text = (folder / "config.json").read_text()
    for ours, theirs in SPELLED.items():
        text = text.replace(ours, theirs)
    (folder / "config.json").write_text(text)
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": list(range(VOCABULARY))}, "added_tokens": []})
    )
    hparams = ModelBase.load_hparams(folder, False) | more
    for key in [key for key, value in more.items() if value is None]:
        hparams.pop(key, None)
    name = get_model_architecture(hparams, ModelType.TEXT)
    base = get_model_class(name)
    from conversion.llama import LlamaModel

    LlamaModel.set_vocab = lambda self: vocabulary(self.gguf_writer)  # of Mistral3's inner one
    kind = type(
        base.__name__,
        (base,),
        {
            "model_arch": base.model_arch,
            "no_mtp": True,  # transformers writes no layers that guess further tokens
            "set_vocab": lambda self: vocabulary(self.gguf_writer),
        },
    )
    path = folder / "converted.gguf"
    with torch.inference_mode():
        kind(folder, gguf.LlamaFileType.ALL_F32, path, eager=True, hparams=hparams).write()
    reader = gguf.GGUFReader(path)
    metadata = {}
    for key, field in reader.fields.items():
        if key.startswith(("tokenizer.", "GGUF.", "general.")) and key != "general.architecture":
            continue
        names = [one.name for one in field.types]
        metadata[key] = [" ".join(names), field.contents()]
    tensors = {
        tensor.name: np.array(tensor.data, np.float32).reshape(tensor.shape[::-1].tolist())
        for tensor in reader.tensors
    }
    return metadata, tensors


def checkpoint_of(model_type: str, fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Writes a checkpoint with drawn numbers; its config.json."""
    config = config_of(model_type)
    known = config.to_dict()
    old, new = config.num_hidden_layers, fields.get("num_hidden_layers", config.num_hidden_layers)
    known |= {k: v[:new] for k, v in known.items() if isinstance(v, list) and len(v) == old}
    config = type(config)(**{**known, **fields})
    config.architectures = None
    model = transformers.AutoModelForCausalLM.from_config(config, dtype="float32")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: drawn(name, t.shape) for name, t in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return json.loads((folder / "config.json").read_text())


# What else published configurations say, that the converter needs and transformers does not; None:
# they have no such field.
PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "gptneox": {"rotary_pct": 0.25},
    "gpt2": {"n_ctx": 128},
    "phimoe": {"original_max_position_embeddings": 128},
    "afmoe": {"route_norm": True},
    "dots1": {"scoring_func": "sigmoid"},
    "deepseek2, lite": {"scoring_func": "sigmoid", "first_k_dense_replace": 1},
    "exaone-moe": {"scoring_func": "sigmoid"},
    "granitehybrid": {
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_experts_per_tok": 0,
    },
    "granitehybrid, experts": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "nemotron_h": {
        "hybrid_override_pattern": "M-*-",
        "num_hidden_layers": 4,
        "layers_block_type": None,
        "layer_types": None,
        "num_experts_per_tok": None,
        "num_local_experts": None,
        "n_routed_experts": None,
        "n_group": None,
        "topk_group": None,
    },
    "minimax-m2": {"rotary_dim": 8, "scoring_func": "sigmoid"},
    "hunyuan-moe": {
        "moe_intermediate_size": [96] * 2,
        "moe_topk": [2] * 2,
        "num_shared_expert": [1] * 2,
    },
}
# How published configurations spell what transformers spells otherwise.
SPELLED = {"PhimoeForCausalLM": "PhiMoEForCausalLM", "MptForCausalLM": "MPTForCausalLM"}


def recipe(
    made: Numbers, tensors: Mapping[str, Numbers], heads: set[int], config: Mapping[str, Any]
) -> Any:
    wanted = _checksum(made)
    stacks = defaultdict(list)
    for name in tensors:
        for match in re.finditer(r"\.\d+\.", name):
            stacks[name[: match.start()] + ".*." + name[match.end() :]].append(name)
    groups = [[name] for name in tensors] + [
        sorted(names, key=lambda n: [int(x) for x in re.findall(r"\d+", n)])
        for names in stacks.values()
        if len(names) == made.shape[0] > 1
    ]
    for names in groups:
        source = _combined([tensors[name] for name in names])
        for steps in (*_delta_chains(source, config), *_chains(source, made, heads)):
            numbers = source
            for step, arguments in steps:
                numbers = _STEPS[step](numbers, *arguments)
            if _checksum(np.ascontiguousarray(numbers, np.float32)) == wanted:
                return [names, steps, wanted]
    return None


def _delta_chains(source: Numbers, config: Mapping[str, Any]) -> Iterator[Any]:
    """What is done to delta nets whose heads of values share heads of keys."""
    if "linear_num_key_heads" not in config:
        return
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    shared = heads // groups * value
    if source.shape[0] == heads:
        yield [("tile", (0, groups, 1))]
    if source.shape[0] == heads * value:
        yield [("tile", (0, groups, value))]
    if source.shape[0] == 2 * groups * key + heads * value:
        reshape = [("reshape", (source.shape[0], source.shape[-1]))] if source.ndim > 2 else []
        yield [*reshape, ("tile", (2 * groups * key, groups, value))]
    if source.ndim == 2 and source.shape[1] == heads * value:
        yield [("tile columns", (groups, value))]
    if source.shape[0] == groups * 2 * (key + shared):
        yield [("parts of groups", (groups, key, key, shared, -shared))]
        yield [("parts of groups", (groups, -key, -key, -shared, shared))]


def _chains(source: Numbers, made: Numbers, heads: set[int]) -> Iterator[Any]:
    if source.size == made.size:
        reshape = [] if source.shape == made.shape else [("reshape", made.shape)]
        yield reshape
        yield [("add one", ()), *reshape]
        for power in (2, 4, 8):  # Falcon-H1's factors
            yield [("scale", (power, 1)), *reshape]
            yield [("scale", (1, power)), *reshape]
        if source.ndim >= 2:
            yield [("transpose", ()), *reshape]
        for count in heads:
            if source.shape and source.shape[0] % (2 * count) == 0:
                yield [("permute", (count,)), *reshape]
                for tail in (8, 4):
                    if source.shape[0] // count > tail:
                        yield [("permute tail", (count, tail))]
            if source.shape and source.ndim <= 2 and source.shape[0] % count == 0:
                for group, _ in _grouped(source, count):
                    yield [("group", (count, group)), *reshape]
    elif source.ndim >= 2 and source.ndim == made.ndim and source.shape[-1] == made.shape[-1]:
        rows = made.shape[-2]
        for first in range(0, source.shape[-2] - rows + 1, 4):
            yield [("rows", (first, first + rows))]
            for count in heads:
                if rows % (2 * count) == 0 and source.ndim == 2:
                    yield [("rows", (first, first + rows)), ("permute", (count,))]
    elif source.ndim == 1 and made.ndim == 1 and source.size > made.size:
        for first in range(0, source.size - made.size + 1, 4):
            yield [("part", (first, first + made.size))]
    elif source.ndim == 2 and made.ndim == 3 and source.shape[0] % made.shape[0] == 0:
        each = source.shape[0] // made.shape[0]
        for turned in (False, True):
            rows = made.shape[2] if turned else made.shape[1]
            for first in {0, each - rows}:
                if first >= 0:
                    yield [
                        ("heads of", (made.shape[0], first, first + rows)),
                        *([("transpose", ())] if turned else []),
                    ]


def record(name: str, llama_cpp: Path) -> dict[str, Any]:
    model_type, fields = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        config = checkpoint_of(model_type, fields, Path(folder))
        metadata, tensors = converted(Path(folder), PUBLISHED.get(name, {}))
        sources = load_file(Path(folder) / "model.safetensors")
    heads = {v for k, v in config.items() if "head" in k and type(v) is int and 1 <= v < 64}
    heads |= {1}
    found, made = {}, {}
    for tensor, numbers in tensors.items():
        how = recipe(numbers, sources, heads, config)
        # Logarithms come out otherwise on other machines.
        if how is None and numbers.size <= 512 and ("rope" in tensor or "ssm_a" in tensor):
            made[tensor] = numbers.tolist()
        elif how is None:
            raise SystemExit(f"{name}: no recipe for {tensor} {numbers.shape}")
        else:
            found[tensor] = how
    if config.get("vocab_size") != VOCABULARY:
        raise SystemExit(f"{name} has a vocabulary of {config.get('vocab_size')}")
    shapes = {source: list(t.shape) for source, t in sources.items()}
    return {
        "config": config,
        "sources": shapes,
        "metadata": metadata,
        "tensors": found,
        "made": made,
    }


def main() -> None:
    llama_cpp = LLAMA_CPP
    known: dict[str, Any] = {}
    if GOLDEN.exists():
        with gzip.open(GOLDEN, "rt") as file:
            known = json.load(file)
    for name in sys.argv[2:] or CASES:
        try:
            known[name] = record(name, llama_cpp)
            print(name, "ok", flush=True)
        except (SystemExit, Exception) as error:
            print(name, "FAILED", type(error).__name__, str(error)[:300], flush=True)
            if "-v" in sys.argv:
                raise
    content = json.dumps(known, indent=0, sort_keys=False)
    with gzip.GzipFile(GOLDEN, "wb", mtime=0) as file:
        file.write(content.encode())


if __name__ == "__main__":
    main()

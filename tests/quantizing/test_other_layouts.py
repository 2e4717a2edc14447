"""Models of text and more, hybrids, and experts that are published in one tensor for each layer."""

import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import options
from transformers import (
    CONFIG_MAPPING,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from hmt.engine import Engine
from hmt.quant.methods.interface import Statistics, Target
from hmt.quantizing import quantize
from hmt.quantizing.methods import open_method

TOKENS = list(range(40, 90))
TEXT = {
    "vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "intermediate_size": 32, "max_position_embeddings": 512,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "num_position_embeddings": 16, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
}  # fmt: skip
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_5_moe": (Qwen3_5MoeForConditionalGeneration, HYBRID),
    "qwen3_vl_moe": (Qwen3VLMoeForConditionalGeneration, {}),  # experts are transposed
}


def write(kind: str, folder: Path) -> Path:
    """A random model as transformers saves it, and with a layer that predicts further tokens."""
    made, own = MODELS[kind]
    text = CONFIG_MAPPING[kind]().text_config.to_dict() | TEXT | own
    text["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
        "mrope_section": [4, 2, 2] if kind == "qwen3_vl_moe" else [1, 1, 0],
        "partial_rotary_factor": 1.0 if kind == "qwen3_vl_moe" else 0.25,
    }  # fmt: skip
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=VISION)
    torch.manual_seed(6)
    model = made(config).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file) | {"mtp.fc.weight": torch.ones(3, 4)}
    save_file(tensors, file, {"format": "pt"})
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def logits(folder: Path) -> torch.Tensor:
    with Engine(host_memory="256MiB", dtype="float32", activations="exact", context=64) as engine:
        return engine.load_model(folder).logits(TOKENS, range(len(TOKENS)))


def part(published: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """A view [outputs, inputs] of a linear layer's weight, wherever it is."""
    at, _, rest = module.partition(".experts.")
    if not rest or f"{module}.weight" in published:
        return published[f"{module}.weight"]
    expert, name = rest.split(".")
    if name == "down_proj":
        own, width = published[f"{at}.experts.down_proj"][int(expert)], TEXT["hidden_size"]
    else:
        own, width = (
            published[f"{at}.experts.gate_up_proj"][int(expert)],
            2 * TEXT["moe_intermediate_size"],
        )
    own = own if own.shape[0] == width and own.shape[1] != width else own.T
    if name == "down_proj":
        return own
    return own.chunk(2)[name == "up_proj"]


@pytest.mark.parametrize("kind", MODELS)
def test_stacked_experts_become_linear_layers_of_the_language_model(kind: str, tmp_path: Path):
    model = write(kind, tmp_path / "model")
    published = tensors(model)
    chosen = options(target=Target(group_size=16), keep=(r"experts\.1\.", "o_proj"))
    made = quantize(model, tmp_path / "out", chosen)
    written = tensors(tmp_path / "out")
    modules = {line["module"]: Target(**line["target"]) for line in made.report["weights"]}
    at = "model.language_model.layers.1.mlp.experts"
    assert f"{at}.2.up_proj" in modules and f"{at}.1.up_proj" not in modules
    for name in ("gate_proj", "up_proj", "down_proj"):
        kept = f"{at}.1.{name}"
        assert torch.equal(written[f"{kept}.weight"], part(published, kept))
        assert made.report["kept"][kept] == "kept as asked"
    others = [n for n in published if n.startswith(("model.visual.", "mtp."))]
    assert len(others) > 5 and all(torch.equal(written[n], published[n]) for n in others)
    nearest = open_method("rtn")
    for module, target in modules.items():
        weight = part(published, module)
        rounded = nearest.quantize(weight.contiguous(), Statistics(0), target)
        weight.copy_(replace(rounded, scales=rounded.scales).dequantized())
    for file in model.glob("*.safetensors"):
        save_file({n: published[n] for n in load_file(file)}, file, {"format": "pt"})
    torch.testing.assert_close(logits(tmp_path / "out"), logits(model), atol=1e-4, rtol=0)


def test_a_hybrid_is_calibrated_and_has_bits_for_a_size(tmp_path: Path):
    model = write("qwen3_5_moe", tmp_path / "model")
    quantize(model, tmp_path / "four", options())
    size = sum(file.stat().st_size for file in (tmp_path / "four").glob("*.safetensors"))
    made = quantize(
        model, tmp_path / "out", options(method="gptq", target_bytes=size, sensitivity=False)
    )
    assert 0.99 * size <= made.written_bytes <= size
    names = {group["name"] for group in made.report["groups"]}
    assert {"expert/gate_proj", "expert/down_proj"} <= names
    seen = [line for line in made.report["weights"] if not line["note"]]
    assert any(".linear_attn." in line["module"] for line in seen)
    assert all(line["error"] <= 1.01 * line["nearest"] for line in seen)
    assert sum(line["error"] for line in seen) < 0.9 * sum(line["nearest"] for line in seen)
    exact = logits(model)
    lost = [(logits(tmp_path / name) - exact).square().mean() for name in ("out", "four")]
    assert lost[0] < lost[1], "at the same size"

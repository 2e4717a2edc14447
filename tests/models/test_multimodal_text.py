"""Checkpoints of multimodal models: their text part gives the logits of the whole model."""

import logging
import random
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import every_type
import pytest
import torch
import transformers
from plain_memory import randomise
from random_configs import case_of
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    Gemma3ForConditionalGeneration,
    Glm5NextForConditionalGeneration,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import hmt
from hmt.engine.loading.inspection import inspect
from hmt.models import open_model

QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
CLIP = VISION | {"model_type": "clip_vision_model"}
# By type: the class, the text part's case, and fields of the configuration.
WHOLE: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "qwen3_5": (Qwen3_5ForConditionalGeneration, "qwen3_5_text-0", QWEN_VISION),
    "qwen3_5_moe": (Qwen3_5MoeForConditionalGeneration, "qwen3_5_moe_text-0", QWEN_VISION),
    "qwen2_5_vl": (Qwen2_5_VLForConditionalGeneration, "qwen2-0", QWEN_VISION),
    "qwen3_vl": (Qwen3VLForConditionalGeneration, "qwen3-0", QWEN_VISION),
    "gemma3": (Gemma3ForConditionalGeneration, "gemma3_text-0", VISION),
    "llava": (LlavaForConditionalGeneration, "mistral-0", CLIP),
    "glm5_next": (
        Glm5NextForConditionalGeneration,
        "glm5_next_text-0",
        QWEN_VISION | {"projection_intermediate_size": 24},
    ),
}


def whole_model(kind: str) -> PreTrainedModel:
    made, name, vision = WHOLE[kind]
    case = case_of(name)
    text = case.config.to_dict()
    if kind.startswith(("qwen", "glm")):
        vision = {**vision, "out_hidden_size": text["hidden_size"]}
    if kind.endswith("_vl"):  # positions of three axes, which agree for text
        text["model_type"] = f"{kind}_text"
        turned = (text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]) // 2
        sections = [turned - 2, 1, 1]
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": sections}
    extra = {"mm_tokens_per_image": 4} if kind == "gemma3" else {}
    config = CONFIG_MAPPING[kind](
        text_config=text, vision_config=vision, tie_word_embeddings=kind == "gemma3", **extra
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = made(config).float().eval()
    randomise(model, case.seed)
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    ("kind", "stacked"), [*((kind, False) for kind in WHOLE), ("qwen3_5_moe", True)]
)
def test_text_of_the_whole_model(
    kind: str, stacked: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = whole_model(kind)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if kind.startswith("qwen3_5"):
        tensors["mtp.fc.weight"] = torch.ones(3, 4)
    if kind == "glm5_next":
        assert "model.language_model.layers.0.hc_attn_fn" in tensors, "as it is published"
        tensors["model.language_model.layers.4.eh_proj.weight"] = torch.ones(3, 4)
    if kind == "qwen3_5_moe":
        tensors = arranged(tensors, stacked=stacked)
    save_file(tensors, file, {"format": "pt"})
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), tmp_path)
    rng = random.Random(3)
    tokens = [rng.randrange(16, 250) for _ in range(30)]
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([tokens])).logits[0]
    options = {"dtype": "float32", "max_prefill_tokens": 16, "context": 64}
    with caplog.at_level(logging.WARNING), hmt.Engine(host_memory="64MiB", **options) as engine:
        loaded = engine.load_model(tmp_path)
        found = loaded.logits(tokens, range(30), prefill=20)
        assert any("text only" in remark for remark in loaded.summary().notes)
    atol = 1e-4 * max(1.0, float(wanted.std()))
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)
    assert "are not used" not in caplog.text
    seen = inspect(tmp_path)
    assert not seen.problem and "text only" in seen.remark


def shrunk(base: Any) -> dict[str, Any]:
    """Fields of a type's defaults, made small, of its parts as well."""
    fields = every_type._small(base)
    for name in base.sub_configs:
        inner = getattr(base, name, None)
        if inner is not None and "vision" in name:
            small = {"depth": 1, "num_hidden_layers": 1, "image_size": 16, "out_hidden_size": 64}
            fields[name] |= {key: size for key, size in small.items() if hasattr(inner, key)}
    return fields


@pytest.mark.parametrize(
    "kind",
    ["exaone4_5", "idefics3", "internvl", "kimi_k25", "mistral3", "qianfan_ocr", "qwen3_vl_moe"],
)
def test_text_of_other_models(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Made of their defaults, and written as transformers writes them."""
    made = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind])
    config = CONFIG_MAPPING[kind](**shrunk(CONFIG_MAPPING[kind]()))
    config._attn_implementation = config.text_config._experts_implementation = "eager"
    model = made(config).float().eval()
    randomise(model, 7)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    # transformers renames the vision tower's layers, and those of the text with them.
    begins = {"kimi_k25": "model.blocks.", "qianfan_ocr": "model.encoder.layers."}
    named = "language_model." + begins.get(kind, "")
    assert kind not in begins or any(name.startswith(named) for name in load_file(file))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), tmp_path)
    rng = random.Random(3)
    tokens = [rng.randrange(16, 250) for _ in range(27)]
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([tokens])).logits[0]
    options = {"dtype": "float32", "max_prefill_tokens": 8, "context": 64}
    with caplog.at_level(logging.WARNING), hmt.Engine(host_memory="256MiB", **options) as engine:
        loaded = engine.load_model(tmp_path)
        found = loaded.logits(tokens, range(27), prefill=20)
        assert any("text only" in remark for remark in loaded.summary().notes)
    atol = 1e-4 * max(1.0, float(wanted.std()))
    torch.testing.assert_close(found[:, : wanted.shape[1]], wanted, atol=atol, rtol=0)
    assert "are not used" not in caplog.text


def arranged(tensors: dict[str, torch.Tensor], *, stacked: bool) -> dict[str, torch.Tensor]:
    """A layer's experts in two tensors, as published, or each expert's three apart."""
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        at, _, rest = name.partition(".experts.")
        if not rest:
            found[name] = tensor
        elif rest[0].isdigit():
            expert, kind, _ = rest.split(".")
            parts.setdefault(at, {}).setdefault(kind, {})[int(expert)] = tensor
        elif rest == "gate_up_proj":
            for expert, both in enumerate(tensor):
                for kind, one in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    parts.setdefault(at, {}).setdefault(kind, {})[expert] = one.contiguous()
        else:
            own = parts.setdefault(at, {}).setdefault("down_proj", {})
            own.update((expert, one.contiguous()) for expert, one in enumerate(tensor))
    assert parts
    for at, kinds in parts.items():
        if stacked:
            gate, up, down = (
                torch.stack([one for _, one in sorted(kinds[kind].items())])
                for kind in ("gate_proj", "up_proj", "down_proj")
            )
            found[f"{at}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
            found[f"{at}.experts.down_proj"] = down
            continue
        for kind, experts in kinds.items():
            for expert, one in experts.items():
                found[f"{at}.experts.{expert}.{kind}.weight"] = one
    return found


def test_a_flat_configuration_is_that_of_the_nested_one() -> None:
    """As Qwen2.5-VL was published first: fields of the text, and `mrope`, beside vision_config."""
    config = whole_model("qwen2_5_vl").config.to_dict()
    config["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    rotary = config["text_config"].pop("rope_parameters")
    flat = {k: v for k, v in config.items() if k != "text_config"} | config["text_config"]
    flat["architectures"], flat["model_type"] = config["architectures"], "qwen2_5_vl"
    flat |= {
        "rope_theta": rotary["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rotary["mrope_section"]},
    }
    config["text_config"]["rope_parameters"] = rotary
    path, dtype = Path("some/where"), torch.float32
    nested, opened = (open_model(one, path, dtype) for one in (config, flat))
    assert opened.spec == nested.spec and "text only" in " ".join(opened.spec.remarks)
    ours, theirs = (m._rotaries[0].frequencies(100) for m in (opened, nested))
    assert torch.equal(ours, theirs)


def test_a_text_part_may_be_published_alone() -> None:
    """GLM-5.3-Flash without its vision tower: the fields of the text are at the top."""
    whole = whole_model("glm5_next").config.to_dict()
    whole["architectures"] = ["Glm5NextForConditionalGeneration"]
    text = {k: v for k, v in whole["text_config"].items() if k != "model_type"}
    flat = text | {"architectures": whole["architectures"], "model_type": "glm5_next"}
    path, dtype = Path("some/where"), torch.float32
    nested, opened = (open_model(one, path, dtype) for one in (whole, flat))
    assert opened.spec == nested.spec

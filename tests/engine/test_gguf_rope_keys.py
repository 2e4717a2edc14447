"""GGUF's keys for rotary positions: each is computed as transformers and llama.cpp do, or refused.

Beside the same numbers in transformers, and in llama.cpp where llama-cpp-python is installed.
"""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf import GGUFValueType
from gguf_files import bytes_vocabulary
from reference import MINI_DENSE
from test_gguf_models import PROMPT, random_model

import hmt
from hmt.base.errors import CheckpointError
from hmt.engine.loading.inspection import inspect

THETA, ORIGINAL = 5000.0, 32
PLAIN = {"rope_type": "default", "rope_theta": THETA}


def divided(count: int, scale: float, attention: float) -> dict[str, Any]:
    """All frequencies divided alike, and cosines and sines scaled."""
    return {
        "rope_type": "longrope", "rope_theta": THETA, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [scale] * count, "long_factor": [scale] * count,
        "attention_factor": attention,
    }  # fmt: skip


def yarn(**more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "rope_theta": THETA, "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL, **more,
    }  # fmt: skip


LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 2.0}
YARN_KEYS = {"type": "yarn", "factor": 4.0, "original_context_length": ORIGINAL}
# What is added to a file, and what transformers is told instead.
COMPUTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "the old key": ("llama", {"scale_linear": 2.0}, LINEAR),
    "a factor without type": ("llama", {"scaling.factor": 2.0}, LINEAR),
    "the newer of two": ("llama", {"scaling.factor": 2.0, "scale_linear": 3.0}, LINEAR),
    "no scaling": ("llama", {"scaling.type": "none", "scaling.factor": 2.0}, PLAIN),
    "a factor of none": ("llama", {"scaling.type": "linear", "scaling.factor": 0.0}, PLAIN),
    "attention": ("qwen3", {"scaling.attn_factor": 0.8}, divided(16, 1.0, 0.8)),
    "attention and a factor": (
        "llama",
        {"scaling.attn_factor": 1.1, "scaling.type": "linear", "scaling.factor": 2.0},
        divided(8, 2.0, 1.1),
    ),
    "yarn": ("llama", {f"scaling.{k}": v for k, v in YARN_KEYS.items()}, yarn()),
    "yarn and attention": (
        "llama",
        {f"scaling.{k}": v for k, v in YARN_KEYS.items()} | {"scaling.attn_factor": 0.7},
        yarn(attention_factor=0.7 * (0.1 * math.log(4.0) + 1)),
    ),
    "yarn's range": (
        "qwen2",
        {f"scaling.{k}": v for k, v in YARN_KEYS.items()}
        | {"scaling.yarn_beta_fast": 12.0, "scaling.yarn_beta_slow": 2.0},
        yarn(beta_fast=12.0, beta_slow=2.0),
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope without factors": (
        "llama",
        {"scaling.type": "longrope", "scaling.factor": 2.0},
        r"llama\.rope\.scaling\.type 'longrope', and no tensors rope_factors_long",
    ),
    "an unknown type": ("llama", {"scaling.type": "spiral"}, r"rope\.scaling\.type 'spiral'"),
    "a part of the head": ("llama", {"dimension_count": 8}, r"llama\.rope\.dimension_count 8"),
    "two ways at once": ("llama3", {"scaling.type": "yarn"}, r"beside factors in a tensor rope_f"),
    "windows": ("gemma3", {"scaling.attn_factor": 0.5}, r"gemma3\.rope\.scaling\.attn_factor 0\.5"),
    "latent": ("deepseek2-v3", {"scaling.attn_factor": 0.5}, r"rope\.scaling\.attn_factor 0\.5"),
    "another key": ("llama", {"scaling.alpha": 50.0}, r"llama\.rope\.scaling\.alpha 50\.0"),
    "nothing": ("llama", {"scaling.attn_factor": 0.0}, r"rope\.scaling\.attn_factor 0\.0"),
}


def written(
    name: str, keys: dict[str, Any], folder: Path, **others: Any
) -> tuple[Path, Callable[[], torch.Tensor]]:
    """A file with more keys, and what makes transformers' logits of the same numbers."""
    file = random_model(name, folder, "F32", **others)
    said = {f"{gguf.MODEL_ARCH_NAMES[file.arch]}.rope.{key}": value for key, value in keys.items()}

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        bytes_vocabulary(MINI_DENSE)(writer)
        for key, value in said.items():
            for data in writer.kv_data:
                data.pop(key, None)
            kinds = {str: GGUFValueType.STRING, int: GGUFValueType.UINT32}
            writer.add_key_value(key, value, kinds.get(type(value), GGUFValueType.FLOAT32))

    path = file.write(folder / "model.gguf", vocabulary)

    def theirs() -> torch.Tensor:
        checkpoint = file.write_checkpoint(folder / "checkpoint", MINI_DENSE)
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
        return logits

    return path, theirs


def logits_of(path: Path) -> torch.Tensor:
    with hmt.Engine(host_memory="256MiB", context=128, dtype="float32") as engine:
        return engine.load_model(path).logits(PROMPT, range(len(PROMPT)))


@pytest.mark.parametrize("case", COMPUTED)
def test_a_key_changes_logits_as_in_transformers(case: str, tmp_path: Path) -> None:
    name, keys, rope = COMPUTED[case]
    path, _ = written(name, keys, tmp_path, rope_parameters=dict(PLAIN))
    (tmp_path / "same").mkdir()
    _, theirs = written(name, {}, tmp_path / "same", rope_parameters=rope)
    found = logits_of(path)
    torch.testing.assert_close(found, theirs(), atol=1e-4, rtol=0)
    # llama.cpp leaves YaRN's range aside in these architectures.
    if case != "yarn's range" and importlib.util.find_spec("llama_cpp") is not None:
        from test_llama_cpp import TOLERANCE
        from test_llama_cpp import theirs as llama_cpps

        torch.testing.assert_close(found, llama_cpps(path), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", REFUSED)
def test_a_key_that_is_not_computed_is_named(case: str, tmp_path: Path) -> None:
    name, keys, said = REFUSED[case]
    path, _ = written(name, keys, tmp_path)
    with pytest.raises(CheckpointError, match=said):
        logits_of(path)


@pytest.mark.parametrize("name", ["llama3", "phi3-long"])
def test_factors_that_are_applied_are_not_called_unused(name: str, tmp_path: Path) -> None:
    path, _ = written(name, {}, tmp_path)
    assert inspect(path).extra == ()

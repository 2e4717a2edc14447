"""Each of llama.cpp's architectures answers as transformers does of the checkpoint it was made of.

The files are those of llama.cpp's converter, written again to the bit: see gguf_conventions.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_conventions import VOCABULARY, conventions

import hmt
from hmt.base.errors import HMTError
from hmt.engine.loading.inspection import inspect

PROMPT = torch.randint(
    0, VOCABULARY - 3, (19,), generator=torch.Generator().manual_seed(5)
).tolist()


def logits_of(path: Path) -> torch.Tensor:
    with hmt.Engine(
        host_memory="256MiB", context=64, dtype="float32", activations="exact"
    ) as engine:
        return engine.load_model(path).logits(PROMPT, range(len(PROMPT)))


def transformers_logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.parametrize("name", conventions())
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    one = conventions()[name]
    path = one.write(tmp_path / "model.gguf", "Q8_0")
    folder = one.write_checkpoint(tmp_path / "checkpoint")
    expected, found = transformers_logits(folder), logits_of(path)
    allowed = 2e-4 * float(expected.std())
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed)
    assert not inspect(path).extra


@pytest.mark.parametrize("name", ["qwen2moe", "smollm3"])
def test_tensors_that_the_converter_fuses(name: str, tmp_path: Path) -> None:
    one = conventions()[name]
    plain = logits_of(one.write(tmp_path / "plain.gguf", "Q8_0"))
    path = one.write(tmp_path / "fused.gguf", "Q8_0", fused=True)
    torch.testing.assert_close(logits_of(path), plain, rtol=0, atol=1e-5)
    assert not inspect(path).extra


def test_halves_of_different_types(tmp_path: Path) -> None:
    """Gate and up projections that transformers has in one tensor."""
    one = conventions()["granitemoe"]
    plain = logits_of(one.write(tmp_path / "plain.gguf", "F32"))
    path = one.write(tmp_path / "mixed.gguf", "F32", kinds={"ffn_gate_exps": "Q8_0"})
    torch.testing.assert_close(logits_of(path), plain, rtol=0, atol=1e-4)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown key": ("granite", {"new_thing": ("FLOAT32", 2.0)}, r"granite\.new_thing 2\.0"),
    "another gate": ("dots1", {"expert_gating_func": ("UINT32", 1)}, r"expert_gating_func 1"),
    "an encoder": ("seed_oss", {"attention.causal": ("BOOL", False)}, r"attention\.causal False"),
    "another width of values": (
        "gemma2", {"attention.value_length": ("UINT32", 48)}, r"value_length 48, and keys have 32",
    ),
    "another base in windows": (
        "cohere2", {"rope.freq_base_swa": ("FLOAT32", 77.0)}, r"cohere2\.rope\.freq_base_swa 77",
    ),
    "layers that differ": (
        "glm4", {"feed_forward_length": ("ARRAY UINT32", [96, 128])}, r"differs by layer",
    ),
    "no normalised weights": (
        "afmoe", {"expert_weights_norm": ("BOOL", False)}, r"expert_weights_norm False",
    ),
    "another epsilon": (
        "olmo", {"attention.layer_norm_epsilon": ("FLOAT32", 1e-3)}, r"layer_norm_epsilon 0\.001",
    ),
    "a window for some": ("exaone4, windows", {
        "attention.sliding_window_pattern": ("ARRAY BOOL", [True])}, r"1 items for 4 layers"),
    "a scale of attention": ("qwen2moe", {"attention.scale": ("FLOAT32", 0.5)}, r"scale 0\.5"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_computed_is_refused_by_key(case: str, tmp_path: Path) -> None:
    name, changed, said = REFUSED[case]
    path = conventions()[name].write(tmp_path / "model.gguf", "F32", changed)
    with pytest.raises(HMTError, match=said):
        inspect(path)


def test_a_layer_that_guesses_further_tokens_is_left_aside(tmp_path: Path) -> None:
    """GLM 4.5's files have it last, and count it."""
    one = conventions()["glm4moe"]
    plain = one.write(tmp_path / "plain.gguf", "F32")
    changed = {"block_count": ("UINT32", 3), "nextn_predict_layers": ("UINT32", 1)}
    path = one.write(tmp_path / "more.gguf", "F32", changed, guessing=True)
    torch.testing.assert_close(logits_of(path), logits_of(plain), rtol=0, atol=0)
    assert not inspect(path).extra

"""Each of llama.cpp's architectures answers as transformers does of the checkpoint it was made of.

The files are those of llama.cpp's converter, written again to the bit: see gguf_conventions.py.
"""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf_conventions import VOCABULARY, Numbers, Recipe, _checksum, conventions

import hmt
from hmt.base.errors import HMTError
from hmt.engine import EngineConfig, prepare
from hmt.engine.loading.inspection import inspect
from hmt.engine.loading.packs import convert
from hmt.planner import PlanOptions, smallest_budget

PROMPT = torch.randint(
    0, VOCABULARY - 3, (19,), generator=torch.Generator().manual_seed(5)
).tolist()


def logits_of(path: Path, host_memory: int | str = "256MiB") -> torch.Tensor:
    with hmt.Engine(
        host_memory=host_memory, context=64, dtype="float32", activations="exact"
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


@pytest.mark.parametrize("name", ["qwen2moe", "smollm3", "qwen35moe"])
def test_tensors_that_the_converter_fuses(name: str, tmp_path: Path) -> None:
    one = conventions()[name]
    plain = logits_of(one.write(tmp_path / "plain.gguf", "Q8_0"))
    path = one.write(tmp_path / "fused.gguf", "Q8_0", fused=True)
    torch.testing.assert_close(logits_of(path), plain, rtol=0, atol=1e-5)
    assert not inspect(path).extra


@pytest.mark.parametrize(
    "name", ["qwen3next", "qwen35", "lfm2moe", "mamba2", "falcon-h1", "kimi-linear"]
)
def test_hybrids_in_sixteen_bits(name: str, tmp_path: Path) -> None:
    """Which hold these numbers exactly."""
    one = conventions()[name]
    plain = logits_of(one.write(tmp_path / "plain.gguf", "F32"))
    path = one.write(tmp_path / "model.gguf", "F16")
    torch.testing.assert_close(logits_of(path), plain, rtol=0, atol=1e-4)


def random_blocks(name: str, made: Numbers, kind: GGMLQuantizationType) -> Any:
    """Blocks of any codes with small scales, by the tensor's name; of vectors their numbers.

    The gguf package reads K types and writes none.
    """
    if kind is GGMLQuantizationType.F32:
        return made
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    raw = rng.integers(0, 256, (made.size // numbers, nbytes), dtype=np.uint8)
    scale = nbytes - 2 if kind is GGMLQuantizationType.Q6_K else 0
    raw[:, scale : scale + 2] = np.array([2e-5], np.float16).view(np.uint8)
    if not scale:
        raw[:, 2:4] = np.array([2e-4], np.float16).view(np.uint8)  # of minima
    return raw.reshape(*made.shape[:-1], -1)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_heads_of_values_in_another_order_in_blocks_of_256(kind: str, tmp_path: Path) -> None:
    """Against the numbers of the same blocks, as the gguf package reads them."""
    one, wanted = conventions()["qwen35, wide"], GGMLQuantizationType[kind]

    def plain(name: str, made: Numbers, chosen: GGMLQuantizationType) -> Any:
        if made.ndim < 2 or made.shape[-1] % 256:
            return made
        return gguf.dequantize(random_blocks(name, made, wanted), wanted).reshape(made.shape)

    numbers = logits_of(one.write(tmp_path / "plain.gguf", "F32", encode=plain))
    path = one.write(tmp_path / "model.gguf", kind, encode=random_blocks)
    allowed = 2e-4 * float(numbers.std())
    torch.testing.assert_close(logits_of(path), numbers, rtol=0, atol=allowed)
    assert {kind.lower(), "f32"} >= {one.encoding for one in inspect(path).stored}


@pytest.mark.parametrize("name", ["qwen35moe", "lfm2moe", "nemotron_h_moe", "mamba", "kimi-linear"])
def test_a_hybrid_streams_and_is_packed_to_the_same_bits(name: str, tmp_path: Path) -> None:
    path = conventions()[name].write(tmp_path / "model.gguf", "Q8_0")
    whole = logits_of(path)
    options = EngineConfig.resolve(host_memory="256MiB", context=64, dtype="float32")
    convert(path, tmp_path / "pack", options)
    for source in (path, tmp_path / "pack"):
        least = smallest_budget(prepare(source, options).demand, PlanOptions(0, 64))
        torch.testing.assert_close(logits_of(source, least), whole, rtol=0, atol=0)


def test_projections_as_files_of_2025_have_them(tmp_path: Path) -> None:
    """Qwen3-Next's queries, keys, values and gates in one tensor, by heads of keys."""
    one = conventions()["qwen3next"]
    plain = logits_of(one.write(tmp_path / "plain.gguf", "F32"))
    tensors, numbers = dict(one.tensors), one.numbers()
    for layer in range(3):
        source = f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
        made = Recipe((source,), (), _checksum(numbers[source]))
        tensors[f"blk.{layer}.ssm_in.weight"] = made
        del tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]
    path = replace(one, tensors=tensors).write(tmp_path / "older.gguf", "F32")
    torch.testing.assert_close(logits_of(path), plain, rtol=0, atol=1e-5)
    assert not inspect(path).extra


@pytest.mark.parametrize("name", ["qwen2moe", "qwen35moe"])
def test_a_matrix_of_one_row_that_is_a_vector(name: str, tmp_path: Path) -> None:
    """llama.cpp's quantiser leaves out a dimension of one: the shared expert's gate has one row."""

    def content(name: str, made: Numbers, kind: GGMLQuantizationType) -> Any:
        return made.reshape(-1) if "ffn_gate_inp_shexp" in name else made

    one = conventions()[name]
    plain = logits_of(one.write(tmp_path / "plain.gguf", "F32"))
    path = one.write(tmp_path / "model.gguf", "F32", encode=content)
    torch.testing.assert_close(logits_of(path), plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["qwen3next", "qwen35"])
def test_which_layers_attend_by_their_interval(name: str, tmp_path: Path) -> None:
    """As files say it that have no entry for each layer."""
    one = conventions()[name]
    plain = logits_of(one.write(tmp_path / "plain.gguf", "F32"))
    path = one.write(tmp_path / "older.gguf", "F32", {"attention.recurrent_layers": None})
    torch.testing.assert_close(logits_of(path), plain, rtol=0, atol=0)


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
    "recurrence of too few layers": ("qwen35", {
        "attention.recurrent_layers": ("ARRAY BOOL", [True])}, r"1 items for 4 layers"),
    "heads that share no width": (
        "qwen35", {"ssm.inner_size": ("UINT32", 193)}, r"inner_size 193, which 6 heads cannot",
    ),
    "a scale of experts": (
        "qwen35moe", {"expert_weights_scale": ("FLOAT32", 2.0)}, r"expert_weights_scale 2\.0",
    ),
    "convolutions and a window": (
        "lfm2", {"attention.sliding_window": ("UINT32", 8)}, r"sliding_window 8",
    ),
    "numbers of heads that differ": ("lfm2", {
        "attention.head_count_kv": ("ARRAY INT32", [0, 2, 0, 1])}, r"must all have as many"),
    "another gate of convolutional models": (
        "lfm2moe", {"expert_gating_func": ("UINT32", 1)}, r"expert_gating_func 1",
    ),
    "heads in layers that are no period": ("jamba", {
        "attention.head_count_kv": ("ARRAY INT32", [2, 2, 0, 2])}, r"\[0, 1, 3\] are no period"),
    "networks of two widths": ("nemotron_h", {
        "feed_forward_length": ("ARRAY INT32", [0, 96, 0, 64])}, r"must all be as wide"),
    "Bamba": ("granitehybrid", {"rope.scaling.finetuned": ("BOOL", True)}, r"as Bamba's files"),
    "a scale of attention": ("qwen2moe", {"attention.scale": ("FLOAT32", 0.5)}, r"scale 0\.5"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_computed_is_refused_by_key(case: str, tmp_path: Path) -> None:
    name, changed, said = REFUSED[case]
    path = conventions()[name].write(tmp_path / "model.gguf", "F32", changed)
    with pytest.raises(HMTError, match=said):
        inspect(path)


@pytest.mark.parametrize("name", ["glm4moe", "qwen35, wide"])
def test_a_layer_that_guesses_further_tokens_is_left_aside(name: str, tmp_path: Path) -> None:
    """These files have it last, and count it."""
    one = conventions()[name]
    plain = one.write(tmp_path / "plain.gguf", "F32")
    changed: dict[str, tuple[str, Any] | None] = {
        "block_count": ("UINT32", 3), "nextn_predict_layers": ("UINT32", 1),
    }  # fmt: skip
    if name.startswith("qwen"):
        changed["attention.recurrent_layers"] = ("ARRAY BOOL", [True, False, False])
    path = one.write(tmp_path / "more.gguf", "F32", changed, guessing=True)
    torch.testing.assert_close(logits_of(path), logits_of(plain), rtol=0, atol=0)
    assert not inspect(path).extra

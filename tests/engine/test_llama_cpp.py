"""The same file through llama.cpp, where llama-cpp-python is installed (CI has not got it).

With keys, values and attention in f32 there, logits of up to 7 differ by at most 0.004; a wrong
order of rows, a wrong frequency or a wrong norm makes them differ by 1 or more.  llama.cpp rounds
activations to 8 bits for weights of few bits, so that those differ by more.
"""

import ctypes
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_conventions import conventions
from gguf_files import ModelFile, bytes_vocabulary
from reference import MINI_DENSE
from safetensors.torch import load_file
from test_gguf_architectures import PROMPT as ARCHITECTURE_PROMPT
from test_gguf_architectures import logits_of as architecture_logits
from test_gguf_models import CASES, PROMPT, answer, random_model
from transformers import AutoConfig

from hmt.formats.gguf import FILE_TYPES
from hmt.profiling.random_model import Shape
from hmt_bench.random_gguf import write_random_gguf

llama_cpp = pytest.importorskip("llama_cpp")

TOLERANCE = 0.01
RELATIVE = 0.01  # of the spread of the logits, for the largest difference of any
ROUNDED = 0.08  # of the logits' own spread, as mean squares
# llama.cpp rounds YaRN's limits to whole dimensions, which gpt-oss's configuration says not to do.
OTHERS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
}

# What llama.cpp's own answers show to be its own way, beside transformers' numbers.
UNLIKE = {
    "command-r, norms": "llama.cpp has these norms in models of 64 layers alone",
    "phimoe": "llama.cpp takes a softmax of the routers, for the publisher's sparse mixer",
    "exaone4, windows": "llama.cpp has windows in models of 64 layers alone",
}
# Queries are not scaled, so that softmax makes more of llama.cpp's roundings.
CLOSE = {"gemma4": 0.2, "gemma4, experts": 0.2}


def theirs(path: Path, prompt: list[int] = PROMPT) -> torch.Tensor:
    """Logits of the prompt's tokens: f32 [tokens, vocab]."""
    defaults = llama_cpp.llama_model_default_params

    def as_they_lie() -> Any:
        params = defaults()
        params.use_extra_bufts = False  # its copies for AMX crash with so small a model (0.3.36)
        return params

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", as_they_lie)
        model = llama_cpp.Llama(
            str(path), n_ctx=128, n_threads=1, logits_all=True, verbose=False, flash_attn=False,
            type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
        )  # fmt: skip
    try:
        model.eval(prompt)
        return torch.from_numpy(model.scores[: len(prompt)].copy())
    finally:
        model.close()


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("experts", [0, 16])
def test_file_types_are_those_of_its_quantiser(name: str, experts: int, tmp_path: Path) -> None:
    shape = Shape(17, 256, 256, 8, 2, 32, 4096, experts=experts, experts_per_token=min(2, experts))
    plain, made = tmp_path / "plain.gguf", tmp_path / "made.gguf"
    write_random_gguf(plain, shape, "Q8_0")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.allow_requantize = True
    failed = llama_cpp.llama_model_quantize(
        str(plain).encode(), str(made).encode(), ctypes.byref(params)
    )
    assert not failed
    for tensor in gguf.GGUFReader(made).tensors:
        if tensor.tensor_type.name != "F32":
            block, _, rest = tensor.name.removeprefix("blk.").partition(".")
            part = rest if tensor.name.startswith("blk.") else tensor.name
            layer = int(block) if tensor.name.startswith("blk.") else 0
            wanted = FILE_TYPES[name].type_of(
                part.removesuffix(".weight"), layer, shape.layers, int(tensor.shape[0])
            )
            assert tensor.tensor_type.name == wanted, tensor.name


@pytest.mark.parametrize("name", CASES)
def test_logits_are_llama_cpps(name: str, tmp_path: Path) -> None:
    file = random_model(name, tmp_path, "F32", **OTHERS.get(name, {}))
    if name.startswith("deepseek"):
        file.split_latent()  # llama.cpp reads no others any more
    path = file.write(tmp_path / "model.gguf", bytes_vocabulary(MINI_DENSE))
    _, logits, _ = answer(path)
    torch.testing.assert_close(logits, theirs(path), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", conventions())
def test_logits_of_every_architecture_are_llama_cpps(name: str, tmp_path: Path) -> None:
    """Of the files that llama.cpp's converter writes."""
    if name in UNLIKE:
        pytest.skip(UNLIKE[name])
    path = conventions()[name].write(tmp_path / "model.gguf", "F32")
    found = architecture_logits(path)
    error = float((found - theirs(path, ARCHITECTURE_PROMPT)).abs().max() / found.std())
    assert error < CLOSE.get(name, RELATIVE)


def quantised(source: Path, kind: str) -> Path:
    """The file that llama.cpp's quantiser makes."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    path = source.with_name("model.gguf")
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params) == 0
    return path


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize(
    "name",
    [
        "qwen3next", "qwen35, wide", "qwen35moe", "lfm2", "lfm2moe", "mamba2", "mamba, norms",
        "jamba", "granitehybrid, experts", "nemotron_h_moe", "falcon-h1",
    ],
)  # fmt: skip
def test_hybrids_of_its_own_quantiser(name: str, kind: str, tmp_path: Path) -> None:
    """And the same numbers in f32 there, since roundings choose other experts."""
    one = conventions()[name]
    path = quantised(one.write(tmp_path / "source.gguf", "F32"), kind)
    numbers = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in gguf.GGUFReader(path).tensors
    }
    plain = one.write(
        tmp_path / "plain.gguf",
        "F32",
        encode=lambda name, made, kind: numbers[name].reshape(made.shape),
    )
    found, expected = architecture_logits(path), theirs(plain, ARCHITECTURE_PROMPT)
    torch.testing.assert_close(found, expected, rtol=0, atol=RELATIVE * float(found.std()))


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M", "Q2_K"])
def test_files_of_its_own_quantiser(kind: str, tmp_path: Path) -> None:
    """mini-dense, whose rows are whole blocks of K types; and the same numbers in f32 there."""
    config = AutoConfig.from_pretrained(MINI_DENSE)
    file = ModelFile(gguf.MODEL_ARCH.LLAMA, config, lambda tensor: "F32")
    file.add(load_file(MINI_DENSE / "model.safetensors"))
    source = file.write(tmp_path / "source.gguf", bytes_vocabulary(MINI_DENSE))
    path = quantised(source, kind)
    for tensor in gguf.GGUFReader(path).tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        plain = numbers.reshape(tensor.shape[::-1].tolist()).astype(np.float32)
        file.tensors[tensor.name] = plain, gguf.GGMLQuantizationType.F32
    _, logits, _ = answer(path)
    exact = theirs(file.write(tmp_path / "plain.gguf", bytes_vocabulary(MINI_DENSE)))
    torch.testing.assert_close(logits, exact, atol=TOLERANCE, rtol=0)
    rounded = (logits - theirs(path)).square().mean().sqrt() / logits.std()
    assert rounded < ROUNDED

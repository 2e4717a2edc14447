"""The reference models in the formats that others publish: written, and measured.

    python benchmarks/published_formats.py write FOLDER
    python benchmarks/published_formats.py measure FOLDER RESULTS.json

`write` makes FOLDER/MODEL/FORMAT.  GGUF types are rounded by llama.cpp's own quantiser (of
llama-cpp-python), bitsandbytes' formats by that package, everything else to nearest by the
publishers of HMT's tests: what is measured is a format, not how well a method chooses its codes.
`measure` adds one form after the other to RESULTS.json, and goes on where it was cut off.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(_ROOT / "tests" / "quant"), str(_ROOT / "tests" / "engine")]

Tensors = dict[str, torch.Tensor]
Publish = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]

# Ours by llama.cpp's names; the mixes (_M) are what is published most.
_GGUF = {
    "BF16": "BF16", "F16": "F16", "Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q5_K_M": "Q5_K_M",
    "Q5_1": "Q5_1", "Q5_0": "Q5_0", "Q4_K_M": "Q4_K_M", "Q4_K_S": "Q4_K_S", "Q4_1": "Q4_1",
    "Q4_0": "Q4_0", "IQ4_NL": "IQ4_NL", "IQ4_XS": "IQ4_XS", "MXFP4": "MXFP4_MOE",
    "Q3_K_M": "Q3_K_M", "Q2_K": "Q2_K",
}  # fmt: skip
_LENGTH, _WINDOWS, _TASKS = 2048, 4, 200
_KEPT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def models() -> dict[str, Path]:
    """The reference models' folders."""
    from reference import MODELS

    return dict(MODELS)


def write(folder: Path) -> None:
    """Every form of both models that is not there yet."""
    for name, model in models().items():
        tensors, config = numbers(model)
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        for form, (section, publish) in _publishers().items():
            if form.startswith("fp8-block") and "quantization_config" in _config(model):
                publish = None  # published so: there is nothing to write
            if not (target / form).exists():
                print(name, form, flush=True)
                _write_checkpoint(target / form, model, config | section, tensors, publish)
        write_gguf(target, model, tensors)


def _config(model: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((model / "config.json").read_text())
    return content


def numbers(model: Path) -> tuple[Tensors, dict[str, Any]]:
    """All weights in bf16 but those that are f32, and the configuration without FP8 and MTP."""
    from reference import published_tensors

    config = _config(model)
    config.pop("quantization_config", None)
    behind = f"model.layers.{config['num_hidden_layers']}."
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0
    tensors = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16().float()
        for name, tensor in published_tensors(model).items()
        if not name.startswith(behind)
    }
    return tensors, config


def _publishers() -> dict[str, tuple[dict[str, Any], Publish | None]]:
    """By the names of formats: what config.json says of them, and what writes a matrix."""
    from publishers import PUBLISHERS, awq, fp8_blocks, gptq, packed_integers

    made = {
        "fp8-block (128 x 128)": fp8_blocks(128),
        "fp8 by tensor (ModelOpt)": PUBLISHERS["modelopt-fp8"],
        "fp8 by channel (compressed-tensors)": PUBLISHERS["float"],
        "int8 by channel (compressed-tensors)": PUBLISHERS["int8"],
        "GPTQ, 8 bits, groups of 128": gptq(8, symmetric=True, size=128, less=0),
        "GPTQ, groups of 128": gptq(4, symmetric=True, size=128),
        "GPTQ, desc_act, groups of 128": gptq(4, symmetric=True, ordered=True, size=128),
        "GPTQ, 3 bits, groups of 32": gptq(3, symmetric=False, size=32),
        "AWQ, groups of 128": awq(128),
        "AWQ, groups of 32": awq(32),
        "int4, groups of 128 (compressed-tensors)": packed_integers(128),
        "NVFP4 (ModelOpt)": PUBLISHERS["modelopt-nvfp4"],
        "NVFP4 (compressed-tensors)": PUBLISHERS["nvfp4"],
        "MXFP4 (compressed-tensors)": PUBLISHERS["mxfp4"],
    }
    found: dict[str, tuple[dict[str, Any], Publish | None]] = {"bf16": ({}, None)}
    found |= {
        name: ({"quantization_config": one.config}, one.publish) for name, one in made.items()
    }
    section = {"quant_method": "bitsandbytes"}
    return found | {
        "bitsandbytes int8": ({"quantization_config": section | {"load_in_8bit": True}}, _rows),
        "bitsandbytes NF4": ({"quantization_config": section | {"load_in_4bit": True}}, _nf4),
    }


def _rows(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    import bitsandbytes.functional as bnb

    codes, scales, _ = bnb.int8_vectorwise_quant(matrix.half())
    parts = {"weight": codes, "SCB": scales, "weight_format": torch.zeros(1).byte()}
    return parts, bnb.int8_vectorwise_dequant(codes, scales)


def _nf4(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 64, scales quantised again: QLoRA's."""
    import bitsandbytes.functional as bnb

    codes, state = bnb.quantize_4bit(
        matrix.bfloat16(), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    return parts | {"weight": codes}, matrix


def _write_checkpoint(
    folder: Path, model: Path, config: dict[str, Any], tensors: Tensors, publish: Publish | None
) -> None:
    from safetensors.torch import save_file

    if publish is None and "quantization_config" in config:
        shutil.copytree(model, folder)
        return
    held: Tensors = {}
    torch.manual_seed(6)  # desc_act draws an order
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        layered = name.startswith("model.layers") and tensor.dim() == 2
        if publish is not None and layered and not module.endswith("mlp.gate"):
            held |= {f"{module}.{end}": part for end, part in publish(tensor)[0].items()}
        else:
            exact = name.endswith("e_score_correction_bias")
            held[name] = tensor if exact else tensor.bfloat16()
    made = folder.with_name(f".{folder.name}")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config, indent=1))
    for name in _KEPT:
        shutil.copy(model / name, made)
    save_file({name: part.contiguous() for name, part in held.items()}, made / "model.safetensors")
    made.rename(folder)


def write_gguf(
    folder: Path, model: Path, tensors: Tensors, types: Mapping[str, str] = _GGUF
) -> None:
    """As convert_hf_to_gguf.py writes it in f32, and what llama.cpp's quantiser makes of that.

    types   llama.cpp's names of file types, by ours
    """
    import gguf
    import llama_cpp
    from gguf_files import ModelFile, bytes_vocabulary
    from transformers import AutoConfig

    source = folder / "f32.gguf"
    latent = "kv_lora_rank" in _config(model)
    arch = gguf.MODEL_ARCH.DEEPSEEK2 if latent else gguf.MODEL_ARCH.LLAMA
    if not source.exists():
        file = ModelFile(arch, AutoConfig.from_pretrained(model), lambda name: "F32")
        file.add(tensors)
        if latent:
            file.split_latent()  # llama.cpp reads no others any more
        file.write(source, bytes_vocabulary(model))
    for ours, theirs in types.items():
        target = folder / f"GGUF {ours}.gguf"
        if target.exists():
            continue
        print(folder.name, ours, flush=True)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{theirs}")
        params.nthread = 2
        made = target.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(made).encode(), params):
            raise SystemExit(f"llama.cpp cannot quantise {source} to {theirs}")
        made.rename(target)


def _written(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """(model, format, where), in the order in which tables show them."""
    order = [*_publishers(), *(f"GGUF {name}" for name in _GGUF)]
    for model in models():
        for form in order:
            for path in (folder / model / form, folder / model / f"{form}.gguf"):
                if path.exists():
                    yield model, form, path


def measure(folder: Path, results: Path) -> None:
    """Measure what `results` has not yet."""
    content: dict[str, Any] = {"benchmark": "published formats", "results": []}
    if results.exists():
        content = json.loads(results.read_text())
    known = {(one["model"], one["format"]) for one in content["results"]}
    for model, form, path in _written(folder):
        if (model, form) in known:
            continue
        begin = time.monotonic()
        measured, machine = _measured(path)
        content["results"].append({"model": model, "format": form, **measured})
        content.setdefault("measured_on", machine)
        draft = results.with_suffix(".part")
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.rename(results)
        shown = {key: value for key, value in measured.items() if key not in ("stored", "options")}
        print(f"{model} {form}: {shown}, {time.monotonic() - begin:.0f} s", flush=True)


def _measured(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores and sizes of one form, and the machine."""
    from hmt.bench.environment import describe
    from hmt.bench.quality import Extent, evaluate
    from hmt.engine import Engine
    from hmt.engine.loading import inspection

    found = inspection.inspect(path)
    options: dict[str, Any] = {"context": _LENGTH, "max_batch": 1, "dtype": "bfloat16"}
    text = (_ROOT / "assets" / "text" / "valid.txt").read_text(encoding="utf-8")
    with Engine(**options) as engine:
        model = engine.load_model(path)
        extent = Extent(_TASKS, {_LENGTH: 8}, _WINDOWS)
        scores = evaluate(model, model.tokenizer.encode, text, extent).as_json()
        machine = describe(model.prepared.machine)
    sizes = {
        "numbers": sum(one.numbers for one in found.stored),
        "published_bytes": sum(one.published_bytes for one in found.stored),
        "memory_bytes": sum(one.nbytes for one in found.stored),
        "stored": [
            f"{one.kind}: {one.published} in {one.published_bits:.2f} bits becomes {one.encoding} "
            f"in {one.bits:.2f}, {one.kernel or 'looked up'}"
            for one in found.stored
        ],
    }  # fmt: skip
    return {**scores, **sizes, "options": options}, machine


def main() -> int:
    """Write or measure."""
    if sys.argv[1:2] == ["write"] and len(sys.argv) == 3:
        write(Path(sys.argv[2]))
        return 0
    if sys.argv[1:2] == ["measure"] and len(sys.argv) == 4:
        measure(Path(sys.argv[2]), Path(sys.argv[3]))
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())

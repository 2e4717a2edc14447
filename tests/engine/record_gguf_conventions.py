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
from gguf_cases import CASES, PUBLISHED, SPELLED
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
        {name: drawn(name, t.shape) for name, t in map(_as_published, tensors.items())},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return json.loads((folder / "config.json").read_text())


def _as_published(tensor: tuple[str, Numbers]) -> tuple[str, Numbers]:
    """Kimi Linear's dense networks are called otherwise than transformers calls them."""
    name, numbers = tensor
    dense = re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name)
    return dense, numbers


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
        if len(names) == made.shape[0] > 1 and len({tensors[name].shape for name in names}) == 1
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

"""What llama.cpp's converter makes of a small model of each architecture.

The converter's answers are kept in gguf_conventions.json.gz: the configuration that it read, the
metadata that it wrote, and for every tensor which of transformers' tensors it was made of and how,
with a checksum of the numbers.  Numbers are drawn by the name of a tensor, so that the test writes
the converter's file again, to the bit, and needs no converter.

record_gguf_conventions.py asks the converter again, in a folder of llama.cpp's source:

    python tests/engine/record_gguf_conventions.py LLAMA_CPP_FOLDER [NAME ...]
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from safetensors.numpy import save_file

GOLDEN = Path(__file__).with_name("gguf_conventions.json.gz")
VOCABULARY = 260
Numbers = np.ndarray[Any, np.dtype[np.float32]]


def drawn(name: str, shape: tuple[int, ...]) -> Numbers:
    """Numbers by the name of a tensor, which Q8_0 holds exactly, however rows are ordered.

    Integers below 128 by a power of two; of each 32 numbers in a row or a column one is 127.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    whole = np.asarray(rng.integers(-126, 127, shape), np.float32)
    if len(shape) < 2:
        centre = 1 if "norm" in name or ".ln_" in name else 0
        if "q_norm" in name:
            # Gemma 4 divides no scores by the square root of the width: its norm of queries does.
            # With weights near 1 attention is a choice of one token, which amplifies rounding.
            return np.asarray((centre + whole / 256) / 16, np.float32)
        return np.asarray(centre + whole / (256 if centre else 2048), np.float32)
    rows, columns = np.ogrid[: shape[-2], : shape[-1]]
    whole[..., (rows - columns) % 32 == 0] = 127
    return whole / np.float32(512)


# What the converter does to numbers, by name; `count` is a number of heads, layers or parts.
def _permuted(numbers: Numbers, heads: int) -> Numbers:
    return numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)


def _grouped(numbers: Numbers, heads: int) -> Iterator[tuple[int, Numbers]]:
    """(query heads of a group, queries before keys before values) of a fused tensor."""
    rows = numbers.shape[0]
    for group in range(1, 9):
        if rows % (heads * (group + 2)) == 0:
            parts = numbers.reshape(heads, group + 2, -1, *numbers.shape[1:])
            split = (parts[:, :group], parts[:, group : group + 1], parts[:, group + 1 :])
            yield group, np.concatenate([p.reshape(-1, *numbers.shape[1:]) for p in split])


@dataclass(frozen=True)
class Recipe:
    """How one tensor of the file is made: of which tensors, and what is done to them.

    checksum   of the result's bytes
    """

    sources: tuple[str, ...]
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    checksum: int

    def make(self, tensors: Mapping[str, Numbers]) -> Numbers:
        """The numbers.  Raises AssertionError where they are not the converter's."""
        numbers = _combined([tensors[name] for name in self.sources])
        for step, arguments in self.steps:
            numbers = _STEPS[step](numbers, *arguments)
        numbers = np.ascontiguousarray(numbers, np.float32)
        if _checksum(numbers) != self.checksum:
            raise AssertionError(f"{self} makes other numbers than the converter")
        return numbers


def _combined(parts: list[Numbers]) -> Numbers:
    return parts[0] if len(parts) == 1 else np.stack(parts)


_STEPS: dict[str, Callable[..., Numbers]] = {
    "add one": lambda numbers: numbers + np.float32(1),
    "transpose": lambda numbers: numbers.swapaxes(-1, -2),
    "permute": _permuted,
    "permute tail": lambda numbers, heads, tail: _tail_permuted(numbers, heads, tail),
    "group": lambda numbers, heads, group: dict(_grouped(numbers, heads))[group],
    "rows": lambda numbers, first, end: numbers[..., first:end, :],
    "part": lambda numbers, first, end: numbers[first:end],
    "heads of": lambda numbers, heads, first, end: numbers.reshape(heads, -1, numbers.shape[-1])[
        :, first:end
    ],
    "reshape": lambda numbers, *shape: numbers.reshape(shape),
    "scale": lambda numbers, times, by: numbers * np.float32(times / by),
    "tile": lambda numbers, first, groups, width: np.concatenate(
        (numbers[:first], _tiled(numbers[first:], groups, width))
    ),
    "tile columns": lambda numbers, groups, width: _tiled(numbers.T, groups, width).T,
    "parts of groups": lambda numbers, groups, *sizes: _parts_of_groups(numbers, groups, sizes),
}


def _tiled(numbers: Numbers, groups: int, width: int) -> Numbers:
    """Rows of heads of `width`, of which groups share something: the first of all groups first."""
    parts = numbers.reshape(groups, -1, width, *numbers.shape[1:])
    return parts.swapaxes(0, 1).reshape(numbers.shape)


def _parts_of_groups(numbers: Numbers, groups: int, sizes: tuple[int, ...]) -> Numbers:
    """Each part of all groups after the one before it; sizes below 0 are left out."""
    parts = numbers.reshape(groups, -1, numbers.shape[-1])
    ends = np.cumsum(np.abs(sizes))
    chosen = [parts[:, end - size : end] for end, size in zip(ends, sizes, strict=True) if size > 0]
    return np.concatenate([part.reshape(-1, numbers.shape[-1]) for part in chosen])


def _tail_permuted(numbers: Numbers, heads: int, tail: int) -> Numbers:
    """The last `tail` rows of each head, interleaved."""
    parts = numbers.reshape(heads, -1, *numbers.shape[1:]).copy()
    last = parts[:, -tail:]
    parts[:, -tail:] = (
        last.reshape(heads, 2, tail // 2, *numbers.shape[1:]).swapaxes(1, 2).reshape(last.shape)
    )
    return parts.reshape(numbers.shape)


def _checksum(numbers: Numbers) -> int:
    return zlib.crc32(np.ascontiguousarray(numbers, "<f4").tobytes())


@dataclass(frozen=True)
class Conventions:
    """One architecture, as the converter writes it.

    config     config.json
    sources    shapes of transformers' tensors
    metadata   (type, value) by key, without the tokenizer's
    tensors    of the file
    made       tensors that are made of the configuration
    """

    config: Mapping[str, Any]
    sources: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, tuple[str, Any]]
    tensors: Mapping[str, Recipe]
    made: Mapping[str, list[float]]

    def numbers(self) -> dict[str, Numbers]:
        """transformers' tensors."""
        return {name: drawn(name, shape) for name, shape in self.sources.items()}

    def write_checkpoint(self, folder: Path) -> Path:
        """As transformers publishes it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.numbers(), folder / "model.safetensors", {"format": "pt"})
        return folder

    def write(
        self,
        path: Path,
        kind: str,
        changed: Mapping[str, tuple[str, Any] | None] = MappingProxyType({}),
        *,
        fused: bool = False,
        kinds: Mapping[str, str] = MappingProxyType({}),
        guessing: bool = False,
        encode: Callable[[str, Numbers, GGMLQuantizationType], Any] | None = None,
    ) -> Path:
        """The converter's file, with matrices in `kind` where their rows are whole blocks.

        changed   metadata to add, or None to leave out, by keys without the architecture's name
        fused     as with --fuse-qkv and --fuse-gate-up-exps
        kinds     of some tensors, by their names in a layer
        guessing  the last layer is there once more, as one that guesses further tokens
        encode    gives the bytes of a tensor in a type; None: as the gguf package rounds it
        """
        architecture = self.metadata["general.architecture"][1]
        writer = GGUFWriter(path, architecture)
        said = dict(self.metadata) | {
            f"{architecture}.{key}": value for key, value in changed.items()
        }
        for key, value in said.items():
            if value is not None and key != "general.architecture":
                _add(writer, key, *value)
        vocabulary(writer)
        numbers = self.numbers()
        contents = {name: recipe.make(numbers) for name, recipe in self.tensors.items()}
        if guessing:
            contents |= {n.replace("blk.1.", "blk.2."): made for n, made in contents.items()}
        for name, made in (_fused(contents) if fused else contents).items():
            wanted = GGMLQuantizationType[kinds.get(name.split(".")[-2], kind)]
            block, _ = gguf.GGML_QUANT_SIZES[wanted]
            plain = made.ndim < 2 or made.shape[-1] % block or "ffn_gate_inp" in name
            plain = plain or name.endswith("_norm.weight")  # as llama.cpp's quantiser leaves them
            chosen = GGMLQuantizationType.F32 if plain else wanted
            if encode is None:
                content = gguf.quants.quantize(made, chosen)
            else:
                content = encode(name, made, chosen)
            writer.add_tensor(name, content, raw_dtype=chosen)
        for name, values in self.made.items():
            writer.add_tensor(name, np.array(values, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _fused(contents: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Queries, keys and values as one tensor, and gate and up projections of experts, too."""
    made = dict(contents)
    for name in contents:
        at, _, kind = name.partition(".attn_q.")
        if kind:
            parts = [made.pop(f"{at}.attn_{part}.{kind}") for part in "qkv"]
            made[f"{at}.attn_qkv.{kind}"] = np.concatenate(parts)
        at, _, kind = name.partition(".ffn_gate_exps.")
        if kind:
            parts = [made.pop(f"{at}.ffn_{part}_exps.{kind}") for part in ("gate", "up")]
            made[f"{at}.ffn_gate_up_exps.{kind}"] = np.concatenate(parts, axis=1)
    return made


def _add(writer: GGUFWriter, key: str, kind: str, value: Any) -> None:
    if kind.startswith("ARRAY"):
        writer.add_key_value(
            key, value, GGUFValueType.ARRAY, sub_type=GGUFValueType[kind.partition(" ")[2]]
        )
    else:
        writer.add_key_value(key, value, GGUFValueType[kind])


def vocabulary(writer: Any) -> None:
    """Bytes, one merged pair and three marks."""
    known = [c for c in range(256) if 33 <= c <= 126 or 161 <= c <= 172 or c >= 174]
    others = [c for c in range(256) if c not in known]
    letters = [chr(c) for c in known] + [chr(256 + n) for n in range(len(others))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, "Ġt", "<|begin|>", "<|end|>", "<|pad|>"])
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(VOCABULARY - 2)


@cache
def conventions() -> dict[str, Conventions]:
    """What was recorded, by architecture, or architecture and what is special."""
    with gzip.open(GOLDEN, "rt") as file:
        raw = json.load(file)
    return {
        name: Conventions(
            one["config"],
            {source: tuple(shape) for source, shape in one["sources"].items()},
            {key: tuple(value) for key, value in one["metadata"].items()},
            {
                tensor: Recipe(
                    tuple(names), tuple((step, tuple(more)) for step, more in steps), checksum
                )
                for tensor, (names, steps, checksum) in one["tensors"].items()
            },
            one["made"],
        )
        for name, one in raw.items()
    }

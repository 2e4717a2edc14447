"""GGUF files of any size with random weights, in the types that llama.cpp's file types choose.

Matrices repeat one pattern of random blocks: speed does not depend on the numbers, and a file is
written as fast as the disk takes it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.resources import as_file, files
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hmt.contracts.checkpoint import Checkpoint, TensorRecord
from hmt.contracts.encoding import BLOCK_SHAPES
from hmt.formats.gguf import FILE_TYPES, FileType
from hmt.profiling.random_model import Shape
from hmt_bench.gguf_deepseek import GgufDeepSeek
from hmt_bench.gguf_model import (
    GgufTensor,
    add_sizes,
    add_tokenizer,
    architecture,
    begin_file,
    block_of,
    gguf_tensors,
    load_gguf,
)
from hmt_bench.random_hybrid import DeltaShape

_PATTERN_BYTES = 1 << 21
_DEVIATION = 0.02  # of the numbers: Llama's own initial one
_NORMS = 0.1  # of those of vectors, around 1
_ROUTER = _DEVIATION / _NORMS  # a router around 1 would give all experts a sigmoid of 0 or of 1

# Where blocks hold f16 scales, of types of which BLOCK_SHAPES does not say it; else at byte 0.
_SCALES: Mapping[str, tuple[int, ...]] = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82),
}  # fmt: skip


def write_random_gguf(
    path: Path, shape: Shape | DeltaShape | GgufDeepSeek, file_type: str | None = None
) -> int:
    """Write a random model of `shape`; the bytes of its tensors.

    file_type   one of FILE_TYPES; None: as `gguf_model` writes a checkpoint, in Q4_0 with the
                embedding and the output layer in Q8_0; GgufDeepSeek has its own
    """
    gguf = load_gguf()
    if isinstance(shape, DeltaShape | GgufDeepSeek):
        writer = gguf.GGUFWriter(path, shape.architecture)
        shape.add_sizes(writer)
        tokens, tensors = shape.tokens(), list(shape.tensors())
    else:
        tokens = shape.config(shape.vocab_size or 256)
        writer = gguf.GGUFWriter(path, architecture(tokens))
        add_sizes(writer, tokens)
        tensors = gguf_tensors(_checkpoint(shape, tokens))
    with as_file(files("hmt") / "embedded" / "mini-dense") as embedded:
        add_tokenizer(writer, embedded, tokens)
    if file_type is not None and not isinstance(shape, GgufDeepSeek):
        tensors = list(_by_file_type(tensors, shape.layers, FILE_TYPES[file_type]))
    begin_file(writer, tensors)
    patterns = {kind: _pattern(gguf, kind) for kind in {tensor.kind for tensor in tensors}}
    for tensor in tensors:
        numbers = np.resize(patterns[tensor.kind], tensor.nbytes)
        if tensor.name.endswith(".ssm_a"):  # -exp of what decays
            numbers = (-numbers.view(np.float32)).view(np.uint8)
        elif tensor.name.endswith(".ffn_gate_inp.weight"):
            numbers = ((numbers.view(np.float32) - 1) * _ROUTER).view(np.uint8)
        elif tensor.name.endswith(".exp_probs_b.bias"):
            numbers = np.zeros_like(numbers)
        writer.write_tensor_data(numbers)
    writer.close()
    return sum(tensor.nbytes for tensor in tensors)


def _checkpoint(shape: Shape, config: dict[str, Any]) -> Checkpoint:
    """The checkpoint of a random model that is in no file: names and shapes."""
    nowhere = Path("random")
    records = {
        name: TensorRecord(name, "BF16", sizes, nowhere, 0, 2 * prod(sizes))
        for name, sizes in shape.tensors(config)
    }
    return Checkpoint(nowhere, config, records)


def _by_file_type(
    tensors: Iterable[GgufTensor], layers: int, file_type: FileType
) -> Iterator[GgufTensor]:
    for tensor in tensors:
        parts = tensor.name.split(".")
        layer = int(parts[1]) if parts[0] == "blk" else 0
        name = parts[2] if parts[0] == "blk" else parts[0]
        if tensor.kind != "F32":
            kind = file_type.type_of(name, layer, layers, tensor.shape[-1])
            tensor = replace(tensor, kind=kind)
        yield tensor


def _scales_at(kind: str) -> tuple[int, ...]:
    """The bytes of a block at which its f16 scales are."""
    known = {encoding.name: block.scale_at for encoding, block in BLOCK_SHAPES.items()}
    at = known.get(kind)
    return _SCALES.get(kind, (0,)) if at is None else (at,)


def _pattern(gguf: Any, kind: str) -> np.ndarray[Any, Any]:
    """Whole blocks of a type with random codes, whose numbers deviate by _DEVIATION: uint8."""
    random = np.random.default_rng(0)
    if kind == "F32":  # norms
        return random.normal(1.0, _NORMS, _PATTERN_BYTES // 4).astype(np.float32).view(np.uint8)
    number = gguf.GGMLQuantizationType[kind]
    size = block_of(kind)[1]
    blocks = random.integers(0, 256, (_PATTERN_BYTES // size, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 120
        return blocks.reshape(-1)

    def with_scale(scale: float) -> np.ndarray[Any, Any]:
        half = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        for at in _scales_at(kind):
            blocks[:, at : at + 2] = half
        return blocks

    deviation = float(gguf.dequantize(with_scale(1.0)[:64], number).std())
    return with_scale(_DEVIATION / deviation).reshape(-1)

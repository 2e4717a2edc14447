"""GGUF files of any size with random weights, in the types that llama.cpp's file types choose.

Matrices repeat one pattern of random blocks: speed does not depend on the numbers, and a file is
written as fast as the disk takes it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib.resources import as_file, files
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

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

_PATTERN_BYTES = 1 << 25  # so that tens of thousands of tokens have rows of their own
_DEVIATION = 0.02  # of the numbers: Llama's own initial one
_NORMS = 0.1  # of those of vectors, around 1
# Embeddings are so large that a token's own remains most of the residual stream behind all layers.
# With small ones the layers' outputs, much alike for all tokens, decided: 30B-A3B's shape decoded
# any text with the same 8 of 128 experts, which a cache of any size holds.
_EMBEDDINGS = 50.0  # their deviation
_ROUTER = _DEVIATION / _NORMS  # a router around 1 would give all experts a sigmoid of 0 or of 1

_SAMPLE = 1024  # blocks whose numbers are looked at

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
    pattern = cache(partial(_pattern, gguf))
    for tensor in tensors:
        deviation = _EMBEDDINGS if tensor.name == "token_embd.weight" else _DEVIATION
        numbers = _begun_elsewhere(pattern(tensor.kind, deviation), tensor)
        if tensor.name.endswith(".ssm_a"):  # -exp of what decays
            numbers = (-numbers.view(np.float32)).view(np.uint8)
        elif tensor.name.endswith(".ffn_gate_inp.weight"):
            numbers = ((numbers.view(np.float32) - 1) * _ROUTER).view(np.uint8)
        elif tensor.name.endswith(".exp_probs_b.bias"):
            numbers = np.zeros_like(numbers)
        writer.write_tensor_data(numbers)
    writer.close()
    return sum(tensor.nbytes for tensor in tensors)


def _begun_elsewhere(pattern: np.ndarray[Any, Any], tensor: GgufTensor) -> np.ndarray[Any, Any]:
    """The pattern from a block on that follows from the name, so that layers' routers differ."""
    size = block_of(tensor.kind)[1]
    begin = crc32(tensor.name.encode()) % (len(pattern) // size) * size
    if begin + tensor.nbytes <= len(pattern):
        return pattern[begin : begin + tensor.nbytes]
    return np.resize(np.concatenate((pattern[begin:], pattern[:begin])), tensor.nbytes)


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


def _pattern(gguf: Any, kind: str, wanted: float) -> np.ndarray[Any, Any]:
    """Whole blocks of a type with random codes, whose numbers deviate by `wanted`: uint8."""
    random = np.random.default_rng(0)
    if kind == "F32":  # norms
        return random.normal(1.0, _NORMS, _PATTERN_BYTES // 4).astype(np.float32).view(np.uint8)
    number = gguf.GGMLQuantizationType[kind]
    size = block_of(kind)[1]
    blocks = random.integers(0, 256, (_PATTERN_BYTES // size, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 120
        return blocks.reshape(-1)

    # A matrix whose mean is not 0 sends all inputs in one direction: the scale of the minima lets a
    # block's be 0, and half of the blocks have a negative scale, since codes are not even around 0.
    signs = random.choice((-1.0, 1.0), len(blocks))

    def with_scales(*scales: float) -> np.ndarray[Any, Any]:
        if kind == "IQ1_M":  # four bits of its scale in each of four bytes
            bits = (scales[0] * signs).astype(np.float16).view(np.uint16)
            for at in range(4):
                rest = blocks[:, 49 + 2 * at] & 15
                blocks[:, 49 + 2 * at] = rest | ((bits >> 4 * at & 15) << 4).astype(np.uint8)
            return blocks
        for at, scale in zip(_scales_at(kind), scales, strict=True):
            blocks[:, at : at + 2] = (scale * signs).astype(np.float16)[:, None].view(np.uint8)
        return blocks

    def numbers(*scales: float) -> np.ndarray[Any, Any]:
        return signs[:_SAMPLE, None] * gguf.dequantize(with_scales(*scales)[:_SAMPLE], number)

    scales: tuple[float, ...] = (1.0,)
    if len(_scales_at(kind)) > 1:
        scales = (1.0, -float(numbers(1.0, 0.0).mean() / numbers(0.0, 1.0).mean()))
    factor = wanted / float(numbers(*scales).std())
    return with_scales(*(scale * factor for scale in scales)).reshape(-1)

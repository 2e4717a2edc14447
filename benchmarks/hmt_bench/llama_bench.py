"""llama.cpp beside HMT on a GPU: its own benchmark program, on random weights of the same shape.

The program places the model itself (`--fit-target`): it is told to leave so much of the card free
that no more than the given memory is used.
"""

import json
import subprocess
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hmt.base.errors import MachineError
from hmt.base.units import MIB
from hmt.contracts.checkpoint import Checkpoint, TensorRecord
from hmt.kernels.cpu.threads import usable_threads
from hmt.profiling.random_model import Shape
from hmt_bench.gguf_model import add_sizes, architecture, gguf_tensors, load_gguf
from hmt_bench.peer_environment import peer_environment

_RUNS = 3
_PATTERN_BLOCKS = 1 << 16  # of 32 numbers, repeated: all matrices hold the same ones
_SCALE = 1 / 256  # of 4-bit numbers from -8 to 7, and of 8-bit ones
_PATIENCE_S = 240.0


class LlamaBench:
    """Implements bench.gpu.Peer for one sequence and for prompts."""

    name = "llama.cpp"
    most_tokens = 128

    def __init__(self, program: Path, folder: Path, shape: Shape, gpu_bytes: int) -> None:
        """Writes the model to `folder` unless it is there.

        Raises MachineError where the gguf package is missing or `program` is none.
        """
        if not program.is_file():
            raise MachineError(
                f"{program} is not llama.cpp's llama-bench: build it with CUDA "
                "(cmake -DGGML_CUDA=ON), or leave out --llama-bench"
            )
        self._program = program
        sizes = (shape.layers, shape.hidden_size, shape.intermediate_size, shape.experts)
        self._model = folder / f"random-{'x'.join(map(str, sizes))}-q4_0.gguf"
        if not self._model.exists():
            partial = self._model.with_suffix(".partial")
            write_random_gguf(partial, shape)
            partial.rename(self._model)
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
        self._margin_bytes = max(0, free - gpu_bytes)
        self._found: dict[tuple[str, ...], list[float]] = {}
        self.note = (
            f"Q4_0, embedding and output Q8_0, flash attention, --fit-target leaves "
            f"{self._margin_bytes // MIB} MiB of the card; {_RUNS} runs in one go"
        )

    def decode_rate(self, batch: int, tokens: int) -> float:
        """Tokens per second.  RuntimeError for more than one sequence: it decodes one."""
        if batch != 1:
            raise RuntimeError("llama-bench decodes one sequence at a time")
        return self._next("-p", "0", "-n", str(tokens))

    def prompt_rate(self, tokens: int) -> float:
        """Tokens per second."""
        chunk = str(min(tokens, 2048))
        return self._next("-p", str(tokens), "-n", "0", "-b", chunk, "-ub", chunk)

    def close(self) -> None:
        """Nothing runs between two measurements."""

    def _next(self, *what: str) -> float:
        if not self._found.get(what):
            self._found[what] = self._measure(what)
        return self._found[what].pop(0)

    def _measure(self, what: tuple[str, ...]) -> list[float]:
        """Tokens per second of each run.  Raises RuntimeError with what the program says."""
        command = [str(self._program), "-m", str(self._model), *what, "-r", str(_RUNS), "-fa", "1"]
        command += ["-t", str(usable_threads()), "-fitt", str(self._margin_bytes // MIB)]
        command += ["-o", "json"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PATIENCE_S, env=peer_environment()
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"llama-bench took more than {_PATIENCE_S:.0f} s") from error
        if done.returncode:
            raise RuntimeError(f"llama-bench failed: {done.stderr.strip()[-250:]}")
        return rates_of(done.stdout)


def rates_of(text: str) -> list[float]:
    """Tokens per second of each run in what `llama-bench -o json` prints for one test."""
    (entry,) = json.loads(text)
    return [float(rate) for rate in entry["samples_ts"]]


def write_random_gguf(path: Path, shape: Shape) -> int:
    """A GGUF file of `shape` in 4 bits with random weights; the bytes of its tensors.

    Matrices repeat one pattern: speed does not depend on the numbers, and a model of 40 GB is
    written as fast as the disk takes it.
    """
    gguf = load_gguf()
    config = shape.config(shape.vocab_size or 256)
    checkpoint = as_checkpoint(shape, config)
    tensors = gguf_tensors(checkpoint)
    writer = gguf.GGUFWriter(path, architecture(config))
    add_sizes(writer, config)
    writer.add_tokenizer_model("no_vocab")
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, np.float32, tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    patterns = {kind: _pattern(kind) for kind in ("Q4_0", "Q8_0", "F32")}
    for tensor in tensors:
        writer.write_tensor_data(np.resize(patterns[tensor.kind], tensor.nbytes))
    writer.close()
    return sum(tensor.nbytes for tensor in tensors)


def as_checkpoint(shape: Shape, config: dict[str, Any]) -> Checkpoint:
    """The checkpoint of a random model that nobody wrote: names and shapes."""
    nowhere = Path("random")
    records = {
        name: TensorRecord(name, "BF16", sizes, nowhere, 0, 2 * prod(sizes))
        for name, sizes in shape.tensors(config)
    }
    return Checkpoint(nowhere, config, records)


def _pattern(kind: str) -> np.ndarray[Any, Any]:
    """Blocks of 32 random numbers as GGML lays them out: a scale in f16 before the codes."""
    random = np.random.default_rng(0)
    if kind == "F32":  # norms, and routers, whose choices need not mean anything
        return random.normal(1.0, 0.1, 2 * _PATTERN_BLOCKS).astype(np.float32).view(np.uint8)
    codes = 16 if kind == "Q4_0" else 32
    blocks = np.empty((_PATTERN_BLOCKS, 2 + codes), np.uint8)
    scale = _SCALE if kind == "Q4_0" else _SCALE / 16
    blocks[:, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    blocks[:, 2:] = random.integers(0, 256, (_PATTERN_BLOCKS, codes), dtype=np.uint8)
    return blocks.reshape(-1)

"""llama.cpp beside HMT on a GPU: its own benchmark program, on random weights of the same shape.

The program places the model itself (`--fit-target`): it is told to leave so much of the card free
that no more than the given memory is used.
"""

import json
import subprocess
from pathlib import Path

import torch

from hmt.base.errors import MachineError
from hmt.base.units import MIB
from hmt.kernels.cpu.threads import usable_threads
from hmt.profiling.random_model import Shape
from hmt_bench.peer_environment import peer_environment
from hmt_bench.random_gguf import write_random_gguf

_RUNS = 3
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
        return rates_of(run_llama_bench(command, _PATIENCE_S))


def run_llama_bench(command: list[str], timeout_s: float) -> str:
    """What it prints.  Raises RuntimeError with what it says where it fails or takes longer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=peer_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"llama-bench took more than {timeout_s:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"llama-bench failed: {done.stderr.strip()[-250:]}")
    return done.stdout


def rates_of(text: str) -> list[float]:
    """Tokens per second of each run in what `llama-bench -o json` prints for one test."""
    (entry,) = json.loads(text)
    return [float(rate) for rate in entry["samples_ts"]]

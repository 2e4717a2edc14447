"""HMT beside llama.cpp and its kin on one GGUF file as people download it, interleaved.

Each engine runs with what it does by default for such a file: no conversion, no flags but threads,
memory and what is measured.  In every round each engine loads the file, decodes and reads a prompt;
medians over the rounds count, and ratios within one run.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hmt.base.errors import MachineError
from hmt.base.units import MIB
from hmt.bench.environment import describe
from hmt.contracts.request import Request
from hmt.engine import Engine
from hmt_bench.llama_bench import run_llama_bench
from hmt_bench.llama_cpp import LlamaCpp, load_llama_cpp
from hmt_bench.peer_environment import peer_environment

PROMPT_TOKENS = 512
DECODED_TOKENS = 128
_MOST_BATCH = 4096  # tokens
_PATIENCE_S = 1200.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How all engines run.

    gpu_bytes   of the GPU that each may take; 0: none; None: all of it
    """

    threads: int
    gpu_bytes: int | None = 0
    prompt: int = PROMPT_TOKENS
    tokens: int = DECODED_TOKENS


@dataclass(slots=True)
class Rates:
    """Tokens per second of each round of one engine."""

    decode: list[float] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)
    note: str = ""

    def summary(self) -> dict[str, Any]:
        """Medians, and every round."""
        return {
            "decode_tokens_per_s": median(self.decode) if self.decode else None,
            "prompt_tokens_per_s": median(self.prompt) if self.prompt else None,
            "decode_rounds": self.decode,
            "prompt_rounds": self.prompt,
            "note": self.note,
        }


def run(
    file: Path,
    setting: Setting,
    programs: Mapping[str, Path],
    *,
    rounds: int = 3,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure one file; an entry of a benchmark file.

    programs   llama-bench of other engines, by the engine's name; on a CPU the package
               llama-cpp-python is llama.cpp where it is installed and no program is
    options    of hmt.Engine, besides those that `setting` gives
    Raises MachineError where a program is none, and what loading raises.
    """
    for name, program in programs.items():
        if not program.is_file():
            raise MachineError(f"{program} is not llama-bench of {name}: build it, or leave it out")
    in_process = setting.gpu_bytes == 0 and "llama.cpp" not in programs and _has_llama_cpp()
    peers = [*(["llama.cpp"] if in_process else []), *programs]
    found = {name: Rates() for name in ("HMT", *peers)}
    machine: dict[str, Any] = {}
    for number in range(1, rounds + 1):
        progress(f"{file.name}: HMT, round {number} of {rounds}")
        machine = _hmt(file, setting, options or {}, found["HMT"])
        for name in peers:
            progress(f"{file.name}: {name}, round {number} of {rounds}")
            if name in programs:
                _peer(file, setting, programs[name], found[name])
            else:
                _llama_cpp(file, setting, found[name])
    engines = {name: rates.summary() for name, rates in found.items()}
    ratios = {
        name: {
            what: _ratio(engines["HMT"][f"{what}_tokens_per_s"], told[f"{what}_tokens_per_s"])
            for what in ("decode", "prompt")
        }
        for name, told in engines.items()
        if name != "HMT"
    }
    return {
        "file": file.name,
        "bytes": file.stat().st_size,
        "machine": machine,
        "threads": setting.threads,
        "gpu_bytes": setting.gpu_bytes,
        "prompt_tokens": setting.prompt,
        "decoded_tokens": setting.tokens,
        "engines": engines,
        "ratios": ratios,
    }


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if not ours or not theirs else ours / theirs


def _hmt(file: Path, setting: Setting, options: Mapping[str, Any], rates: Rates) -> dict[str, Any]:
    """One round; what the machine is."""
    given: dict[str, Any] = {"threads": setting.threads, "max_batch": 1}
    given["context"] = setting.prompt + 2 * setting.tokens + 64
    if setting.gpu_bytes != 0:
        given |= {"gpus": "0"}
        given |= {} if setting.gpu_bytes is None else {"gpu_memory": setting.gpu_bytes}
    with Engine(**given | dict(options)) as engine:
        model = engine.load_model(file)
        vocabulary = model.prepared.model.spec.vocab_size
        generator = torch.Generator().manual_seed(0)

        def request(prompt: int, tokens: int) -> Request:
            ids = torch.randint(2, vocabulary, (prompt,), generator=generator).tolist()
            return Request(ids, tokens, ignore_eos=True)

        # Warms both up, as llama-bench does: the first steps of decoding are compiled and captured.
        model.infer(request(setting.prompt, 8))
        model.infer(request(8, setting.tokens + 1))
        before = model.summary()
        model.infer(request(setting.prompt, 1))
        read = model.summary()
        model.infer(request(8, setting.tokens + 1))
        decoded = model.summary()
        rates.prompt.append(setting.prompt / (read.prompt.seconds - before.prompt.seconds))
        steps = decoded.generation.tokens - read.generation.tokens
        rates.decode.append(steps / (decoded.generation.seconds - read.generation.seconds))
        rates.note = "; ".join(decoded.notes)
        return describe(model.prepared.machine)


def _has_llama_cpp() -> bool:
    try:
        load_llama_cpp()
    except MachineError:
        return False
    return True


def _llama_cpp(file: Path, setting: Setting, rates: Rates) -> None:
    """One round in a separate process, whose OpenMP workers wait as llama.cpp has them."""
    code = "from hmt_bench.published import time_llama_cpp; time_llama_cpp()"
    sizes = map(str, (setting.threads, setting.prompt, setting.tokens))
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), *sizes],
        capture_output=True, text=True, timeout=_PATIENCE_S, env=peer_environment(),
    )  # fmt: skip
    if done.returncode:
        rates.note = f"failed: {done.stderr.strip()[-250:]}"
        return
    prompt, decode = json.loads(done.stdout)
    rates.prompt.append(prompt)
    rates.decode.append(decode)


def time_llama_cpp() -> None:
    """Print tokens per second of a prompt and of decoding, timed inside llama_decode alone.

    Of both kinds of attention the faster one counts.  Arguments: file, threads, prompt, tokens.
    """
    threads, count, tokens = map(int, sys.argv[2:])
    with closing(LlamaCpp(Path(sys.argv[1]), threads)) as peer:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, 1000, (count + tokens,), generator=generator).tolist()
        prompt, others = ids[:count], ids[count:]
        peer.prompt(prompt, flash=True)  # warms up
        read = min(peer.prompt(prompt, flash=flash) for flash in (True, False))
        wrote = min(peer.generate([prompt[:8]], [others], flash=flash) for flash in (True, False))
    print(json.dumps([count / read, tokens / wrote]))


def _peer(file: Path, setting: Setting, program: Path, rates: Rates) -> None:
    """One round; on a GPU the faster of two prompts counts: in batches of 512 and in large ones.

    Where experts are copied for each batch, those of 512 tokens cost several times the speed.
    """
    command = [str(program), "-m", str(file), "-t", str(setting.threads)]
    command += ["-r", "1", "-o", "json", "-fa", "1"]
    if setting.gpu_bytes == 0:
        command += ["-ngl", "0"]
    elif setting.gpu_bytes is None:
        command += ["-ngl", "99"]
    else:
        free = torch.cuda.mem_get_info()[0]
        command += ["-fitt", str(max(0, free - setting.gpu_bytes) // MIB)]
    prompt, batch = str(setting.prompt), str(min(setting.prompt, _MOST_BATCH))
    asked = [["-p", prompt, "-n", str(setting.tokens)]]
    if setting.gpu_bytes != 0:
        asked.append(["-p", prompt, "-n", "0", "-b", batch, "-ub", batch])
    prompts: list[float] = []
    for more in asked:
        try:
            printed = run_llama_bench(command + more, _PATIENCE_S)
        except RuntimeError as error:
            rates.note = str(error)
            continue
        for entry in json.loads(printed):
            where = rates.decode if entry["n_gen"] else prompts
            where += [float(rate) for rate in entry["samples_ts"]]
    if prompts:
        rates.prompt.append(max(prompts))

"""Models larger than RAM: HMT beside memory maps and accelerate, under one hard limit.

Every run is a process of its own in a control group with the same limit, page cache included, and
begins with none of the model's files in the page cache.  Contenders take turns; medians count.  A
contender that does not finish in time counts with the tokens that it produced.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from hmt.base.errors import MachineError
from hmt.base.units import GIB, MIB, round_down
from hmt.bench.environment import describe
from hmt.contracts.machine import Machine
from hmt.engine import EngineConfig
from hmt.engine.experts.trace import Routed
from hmt.engine.loading.packs import convert
from hmt.memory import DiskRate, disk_rate
from hmt.profiling.random_model import Shape
from hmt_bench.cgroup_run import WatchedRun, forget_pages, run_in_cgroup
from hmt_bench.four_bits import four_bit_noise, write_four_bit_model
from hmt_bench.gguf_model import write_gguf
from hmt_bench.peer_environment import peer_environment
from hmt_bench.routed_model import write_routed_model

# Python, torch and threads: 0.38 GB in runs of a model of 4 MiB; the rest is room for page tables
# and what torch allocates for a step.
PROCESS_BYTES = 640 * MIB
_PAGE_BYTES = 4096
_DISK_S = 6.0


@dataclass(frozen=True, slots=True)
class Competitor:
    """One way of running the model.

    engine     as in `decoder_process`
    path       its files
    sequences  that decode together
    options    of the engine
    """

    name: str
    engine: str
    path: Path
    sequences: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """One run: seconds per step after the first, and HMT's own account.

    disk_read_rate  bytes per second that the disk gave just before and after: the mean
    """

    steps: int
    step_s: float | None
    finished: bool
    ready_s: float | None
    rss_bytes: int
    group_bytes: int
    account: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    disk_read_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of a contender's runs.

    tokens_per_s    None where no run came to a second step; then it is below the next figure
    disk_rate       bytes per second that were read
    read_share      of what the disk gave before and after
    busy_share      the same, of the time in which the disk had something to read
    useful_share    of the bytes that were read: parameters, not padding or what lies between them
    waiting_share   of the time in which the computation waited for the disk
    overlap         of the shorter of computing and reading, the share beside the longer
    hit_rate        leases of streamed blocks that had not to wait
    table_share     of the time that steps spent on rows of tables, waiting included
    """

    name: str
    sequences: int
    tokens_per_s: float | None
    at_most_tokens_per_s: float | None
    runs_tokens_per_s: tuple[float | None, ...]
    disk_rate: float | None
    read_share: float | None
    busy_share: float | None
    useful_share: float | None
    waiting_share: float | None
    overlap: float | None
    hit_rate: float | None
    table_share: float | None
    disk_bytes_per_step: float | None
    rss_bytes: int
    group_bytes: int
    failures: tuple[str, ...]


# At 4 bits: 6.4 GB of a Llama of 11 billion parameters; and 8.6 GB of a Qwen3 mixture.
SHAPES = {
    "dense": Shape(40, 5120, 13824, 40, 8, vocab_size=32000),
    "moe": Shape(24, 2048, 768, 32, 4, 128, vocab_size=32000, experts=128, experts_per_token=8),
    # For trying it out: 0.6 GB.
    "small": Shape(22, 2048, 5632, 32, 4, vocab_size=32000),
}


def prepare(
    folder: Path,
    shape: Shape,
    quantization: str,
    progress: Callable[[str], None],
    trace: Sequence[Routed] = (),
) -> tuple[Path, Path, Path]:
    """Random weights as checkpoint, pack and GGUF in `folder`, what is there already left alone.

    A mixture of experts is routed like `trace`.  Without the checkpoint nothing is made when the
    others are there.  Returns their paths.  Raises MachineError without the `gguf` package, and
    ConfigError for a trace that does not fit.
    """
    checkpoint, pack, gguf = folder / "checkpoint", folder / "pack", folder / "model.gguf"
    if pack.exists() and gguf.exists():
        return checkpoint, pack, gguf
    if not (checkpoint / "config.json").exists():
        progress("writing random weights")
        if shape.experts:
            write_routed_model(checkpoint, shape, trace, noise=four_bit_noise)
        else:
            write_four_bit_model(checkpoint, shape, shard_bytes=GIB)
    if not pack.exists():
        progress("converting")
        config = EngineConfig.resolve(quantization=quantization)
        convert(
            checkpoint,
            pack,
            config,
            progress=lambda what, done, total: progress(f"{what}: {done / max(1, total):.0%}"),
        )
    if not gguf.exists():
        progress("writing GGUF")
        partial = gguf.with_suffix(".partial")
        write_gguf(checkpoint, partial)
        partial.rename(gguf)
    return checkpoint, pack, gguf


def competitors(
    pack: Path,
    memory_bytes: int,
    *,
    gguf: Path | None,
    checkpoint: Path | None,
    context: int,
    gpu_memory: int | None = None,
) -> list[Competitor]:
    """HMT as it comes, with a batch, through a memory map; llama.cpp and accelerate if given.

    accelerate computes with the checkpoint's own numbers: it has no kernels for 4 bits here.  HMT
    has as many bytes of the first GPU as `gpu_memory` says, the others none.
    """
    budget = round_down(memory_bytes - PROCESS_BYTES, _PAGE_BYTES)
    if budget <= 0:
        raise MachineError(
            f"{memory_bytes} bytes are not more than Python and torch take ({PROCESS_BYTES}); "
            "give more memory"
        )
    # Routers of models that are made for this foresee the next layer rightly, always; real ones do
    # not, so nothing is read on a guess.
    options: dict[str, Any] = {"host_memory": budget, "context": context, "expert_prefetch": False}
    if gpu_memory is not None:
        options |= {"gpus": "0", "gpu_memory": gpu_memory}
    found = [
        Competitor("hmt", "hmt", pack, options=options),
        Competitor("hmt, batch 8", "hmt", pack, 8, options | {"context": 8 * context}),
        Competitor("hmt, mmap", "hmt", pack, options=options | {"disk_reader": "mmap"}),
    ]
    if gguf is not None:
        found.append(Competitor("llama.cpp, mmap", "llama.cpp", gguf))
    if checkpoint is not None:
        offload = {"cpu_bytes": budget // 2, "offload_folder": str(checkpoint / "offload")}
        found.append(Competitor("accelerate", "accelerate", checkpoint, options=offload))
    return found


def disk_rate_now(pack: Path, best: DiskRate) -> float:
    """Bytes per second that the disk gives now, read in the way that was found `best`."""
    file = max(pack.glob("data-*"), key=lambda path: path.stat().st_size)
    return disk_rate(file, best.reader, best.block_bytes, best.depth, _DISK_S).rate


def run(
    rivals: Sequence[Competitor],
    memory_bytes: int,
    machine: Machine,
    disk: Callable[[], float],
    *,
    tokens: int = 16,
    runs: int = 3,
    timeout_s: float = 150.0,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Let all decode `tokens` in each of `runs` rounds; the content of a benchmark file.

    `disk` measures the disk's rate, with nothing else running, between the runs: it differs from
    minute to minute, so each run is compared with what it was just before and after.
    """
    done: dict[str, list[Run]] = {rival.name: [] for rival in rivals}
    rates = [disk()]
    for number in range(1, runs + 1):
        for rival in rivals:
            progress(f"{rival.name}: run {number} of {runs}")
            one = run_once(rival, memory_bytes, tokens, timeout_s)
            progress("measuring the disk")
            rates.append(disk())
            done[rival.name].append(replace(one, disk_read_rate=(rates[-2] + rates[-1]) / 2))
    results = [result(rival, done[rival.name], timeout_s) for rival in rivals]
    return {
        "benchmark": "bigger-than-ram",
        "machine": describe(machine),
        "memory_limit_bytes": memory_bytes,
        "tokens": tokens,
        "timeout_s": timeout_s,
        "drive_rates": rates,
        "sizes": {rival.name: _size(rival.path) for rival in rivals},
        "results": [asdict(found) for found in results],
        "runs": {name: [asdict(one) for one in own] for name, own in done.items()},
    }


def run_once(rival: Competitor, memory_bytes: int, tokens: int, timeout_s: float) -> Run:
    """One process, from a cold page cache."""
    forget_pages(rival.path if rival.path.is_dir() else rival.path.parent)
    command = [sys.executable, "-m", "hmt_bench.decoder_process", rival.engine, str(rival.path)]
    command += [str(tokens), str(rival.sequences), json.dumps(rival.options)]
    # One arena keeps glibc's own share of the limit small, for all alike.
    environment = os.environ if rival.engine == "hmt" else peer_environment()
    environment = {**environment, "MALLOC_ARENA_MAX": "2"}
    return read_run(run_in_cgroup(command, memory_bytes, timeout_s, environment), tokens)


def read_run(watched: WatchedRun, tokens: int) -> Run:
    """What a contender's lines say."""
    steps = [at for at, line in watched.lines if line.startswith("token ")]
    ready = [at for at, line in watched.lines if line == "ready"]
    accounts = [line for _, line in watched.lines if line.startswith("{")]
    finished = len(steps) == tokens + 1
    failed = watched.returncode not in (0, None)
    return Run(
        steps=max(0, len(steps) - 1),
        step_s=(steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else None,
        finished=finished,
        ready_s=ready[0] if ready else None,
        rss_bytes=watched.rss_bytes,
        group_bytes=watched.group_bytes,
        account=json.loads(accounts[-1]) if accounts else {},
        failure=f"exit code {watched.returncode}: {watched.errors.strip()[-300:]}"
        if failed
        else "",
    )


def result(rival: Competitor, runs: Sequence[Run], timeout_s: float) -> Result:
    """Medians of `runs`."""
    rates = [rival.sequences / one.step_s if one.step_s else None for one in runs]
    known = [rate for rate in rates if rate is not None]
    accounts = [one.account for one in runs if one.account]

    def middle(figure: Callable[[dict[str, float]], float | None]) -> float | None:
        known = [value for value in map(figure, accounts) if value is not None]
        return median(known) if known else None

    shares = [
        one.account["disk_bytes"] / one.account["seconds"] / one.disk_read_rate
        for one in runs
        if one.account and one.disk_read_rate
    ]
    busy = [
        one.account["disk_bytes"] / one.account["disk_s"] / one.disk_read_rate
        for one in runs
        if one.account and one.account["disk_s"] and one.disk_read_rate
    ]
    leases = [a for a in accounts if a["hits"] + a["pending"] + a["misses"]]
    return Result(
        name=rival.name,
        sequences=rival.sequences,
        tokens_per_s=median(known) if known else None,
        at_most_tokens_per_s=None if known else rival.sequences / timeout_s,
        runs_tokens_per_s=tuple(rates),
        disk_rate=middle(lambda a: a["disk_bytes"] / a["seconds"]),
        read_share=median(shares) if shares else None,
        busy_share=median(busy) if busy else None,
        useful_share=middle(lambda a: a["useful_share"]),
        waiting_share=middle(lambda a: a["waited_s"] / a["seconds"]),
        overlap=middle(lambda a: a["overlap"]),
        hit_rate=median(a["hits"] / (a["hits"] + a["pending"] + a["misses"]) for a in leases)
        if leases
        else None,
        table_share=middle(lambda a: a["table_s"] / a["seconds"]),
        disk_bytes_per_step=middle(lambda a: a["disk_bytes"] / a["steps"]),
        rss_bytes=max(one.rss_bytes for one in runs),
        group_bytes=max(one.group_bytes for one in runs),
        failures=tuple(one.failure for one in runs if one.failure),
    )


def _size(path: Path) -> float:
    """GiB of the model's files."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return round(sum(file.stat().st_size for file in files) / GIB, 3)

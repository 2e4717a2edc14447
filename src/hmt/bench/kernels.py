"""Kernels by themselves, turn by turn with torch's: their share of what the machine can do.

With one token a product is bound by reading its weight, so its figure is the share of the rate at
which this machine reads memory; with hundreds it is bound by arithmetic, and its figure is the
share of what the machine's best instruction reaches on registers.  Both limits are measured in
between, on the same threads.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hmt.base.errors import MachineError
from hmt.bench.ceilings import Peaks, ReadRate, computing_with
from hmt.bench.competitors import Competitor, attention_competitors, linear_competitors
from hmt.bench.environment import describe
from hmt.hardware.machine import machine_for
from hmt.kernels.cpu import extension
from hmt.memory import available_host_bytes, cache_bytes

SHAPES = ((4096, 4096), (14336, 4096))  # of Llama 3 8B: an output projection, and up
TOKENS = (1, 256, 1024)
CONTEXTS = ((1, 4096), (1, 32768), (16, 1024))  # sequences, positions
_SAMPLE_S = 0.02
_CACHES = 2  # copies fill the caches so many times: each is gone when its turn comes again


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one kernel.

    case          shape of the weight, or of the keys and values
    tokens        rows of x, or sequences
    rate          bytes of the weight, or of keys and values, per second
    read_share    of the measured rate of memory
    peak_share    of the measured peak of `peak`; None where that is not known
    """

    case: str
    tokens: int
    engine: str
    name: str
    seconds: float
    runs: tuple[float, ...]
    nbytes: int
    rate: float
    read_share: float
    operations_per_s: float
    peak: str
    peak_share: float | None


def run(
    *,
    threads: int | None = None,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    contexts: Sequence[tuple[int, int]] = CONTEXTS,
    names: set[str] | None = None,
    runs: int = 5,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure every kernel, or those called `names`; the content of a benchmark file.

    On `threads` threads; as many as torch would choose when None.  Raises MachineError without the
    compiled kernels.
    """
    native = extension.load()
    if native is None:
        raise MachineError("there are no compiled kernels to measure: see HMT_KERNELS")
    threads = threads or torch.get_num_threads()
    results = []
    with computing_with(threads):
        reads, peaks = ReadRate(), Peaks(threads)
        for what, count, contenders in _groups(shapes, tokens, contexts, names):
            progress(f"{what}, {count}")
            seconds = measure(contenders, runs, (reads.sample, peaks.sample))
            results += [
                (what, count, contender, times)
                for contender, times in zip(contenders, seconds, strict=True)
            ]
    return {
        "benchmark": "kernels",
        "machine": describe(machine_for(Path.cwd())) | {"threads": threads},
        "isa": native.isa(),
        "read_rate": reads.rate,
        "peaks": peaks.rates,
        "results": [
            asdict(result_of(what, count, contender, times, reads.rate, peaks.rates))
            for what, count, contender, times in results
        ],
    }


def measure(
    contenders: Sequence[Competitor], runs: int, between: Sequence[Callable[[], object]] = ()
) -> list[list[float]]:
    """Seconds per call of each contender in each of `runs` rounds, in which all take turns.

    `between` is called once in every round.
    """
    calls = [cycle(contender.calls) for contender in contenders]
    counts = []
    for contender, call in zip(contenders, calls, strict=True):
        for warm in contender.calls:
            warm()
        begin = time.perf_counter()
        next(call)()
        counts.append(max(1, int(_SAMPLE_S / (time.perf_counter() - begin))))
    found: list[list[float]] = [[] for _ in contenders]
    for _ in range(runs):
        for sample in between:
            sample()
        for call, count, times in zip(calls, counts, found, strict=True):
            next(call)()  # wakes the threads
            begin = time.perf_counter()
            for _ in range(count):
                next(call)()
            times.append((time.perf_counter() - begin) / count)
    return found


def _groups(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    contexts: Sequence[tuple[int, int]],
    names: set[str] | None,
) -> Iterator[tuple[str, int, list[Competitor]]]:
    """(what is computed, tokens, who computes it), one after the other, each freed for the next."""
    copies = min(_CACHES * cache_bytes(), available_host_bytes() // 64)
    for rows, columns in shapes:
        for count in tokens:
            found = linear_competitors(rows, columns, count, copies if count == 1 else 0, names)
            yield f"[{rows}, {columns}]", count, list(found)
    for sequences, context in contexts:
        found = attention_competitors(sequences, context, copies, names)
        yield f"attention to {context}", sequences, list(found)


def result_of(
    what: str,
    tokens: int,
    contender: Competitor,
    times: list[float],
    read_rate: float,
    peaks: dict[str, float],
) -> Result:
    """The figures of a contender that took `times` seconds per call; rates are per second."""
    seconds = median(times)
    rate, operations = contender.nbytes / seconds, contender.operations / seconds
    peak = peaks.get(contender.peak)
    return Result(
        case=what,
        tokens=tokens,
        engine=contender.engine,
        name=contender.name,
        seconds=seconds,
        runs=tuple(times),
        nbytes=contender.nbytes,
        rate=rate,
        read_share=rate / read_rate,
        operations_per_s=operations,
        peak=contender.peak,
        peak_share=operations / peak if peak else None,
    )

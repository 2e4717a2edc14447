"""Cache policies on traces of experts: hit rate against residency, beside the best there is."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hmt.base.errors import ConfigError
from hmt.bench.load.chart import chart_svg
from hmt.bench.replay import Cache, Hits, Sizes
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.engine.experts.trace import Routed, TraceFile, TraceHeader
from hmt.weights.eviction import LRU, DenseByScan, EvictionPolicy
from hmt_bench.charts import stacked_svg
from hmt_bench.expert_prediction import predicted_experts
from hmt_bench.policies import POLICIES, PolicyContext
from hmt_bench.replay import best, replay
from hmt_bench.synthetic_trace import synthetic_trace

RESIDENCIES = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
DEFAULT = "heat"
BEST = "best possible"
GUESSING = f"{DEFAULT} and guesses"
_SYNTHETIC_STEPS = 1000
_DENSE_BLOCKS, _DENSE_ROUNDS = 64, 20
_DENSE_RESIDENCIES = (0.25, 0.5, 0.75)
_DENSE: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "scan": lambda: DenseByScan(LRU())}
_PREDICTED_RESIDENCY = 0.375
_COST_BLOCKS = 6000
_COST_ROUNDS = 3000


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in memory, under the name that results are shown by."""

    name: str
    header: TraceHeader
    records: Sequence[Routed]


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy on one trace, at each residency.

    rates   share of the expert bytes that were served from memory
    reads   bytes that came from the disk, guesses included, per needed byte
    """

    policy: str
    rates: tuple[float, ...]
    reads: tuple[float, ...]


def load_traces(files: Sequence[Path]) -> list[Trace]:
    """The traces in `files`, and all one after the other where they are of one model.

    A synthetic one without files.  Raises ConfigError for a file that is none.
    """
    if not files:
        return [Trace("synthetic", *synthetic_trace(_SYNTHETIC_STEPS))]
    traces = []
    for file in files:
        opened = TraceFile(file)
        traces.append(Trace(file.name.split(".")[0], opened.header, list(opened)))
        if not traces[-1].records:
            raise ConfigError(f"the trace {file} has no steps: record some with --expert-trace")
    headers = [trace.header for trace in traces]
    if len(traces) > 1 and all(h.block_bytes == headers[0].block_bytes for h in headers):
        joined = [record for trace in traces for record in trace.records]
        traces.append(Trace("one after the other", headers[0], joined))
    return traces


def run(
    traces: Sequence[Trace], progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """The content of a benchmark file: curves of every policy on every trace, and their cost."""
    results = []
    for trace in traces:
        curves = []
        for name in (*POLICIES, GUESSING, BEST):
            progress(f"{trace.name}: {name}")
            if name != GUESSING or any(record.guess for record in trace.records):
                curves.append(curve(trace, name))
        results.append(
            {
                "trace": trace.name,
                "model": trace.header.model,
                "records": len(trace.records),
                "experts": trace.header.experts,
                "experts_bytes": trace.header.total_bytes,
                "curves": [
                    {"policy": c.policy, "rates": list(c.rates), "reads": list(c.reads)}
                    for c in curves
                ],
                "foreseen": _predicted(trace),
            }
        )
    progress("cost of an eviction")
    return {
        "benchmark": "cache",
        "residencies": list(RESIDENCIES),
        "results": results,
        "eviction_us": {name: eviction_seconds(name) * 1e6 for name in POLICIES},
        "eviction_blocks": _COST_BLOCKS,
        "dense": {name: dense_reads(make()) for name, make in _DENSE.items()},
        "dense_residencies": list(_DENSE_RESIDENCIES),
    }


def curve(trace: Trace, name: str, residencies: Sequence[float] = RESIDENCIES) -> Curve:
    """A policy of POLICIES, GUESSING or BEST on `trace`.

    Residency is the share of all experts' bytes that the cache holds, rounded down to whole
    experts.  The cache begins empty, and what fills it counts.
    """
    sizes = trace.header.block_sizes()
    step = max(sizes.values())
    found = []
    for share in residencies:
        capacity = int(share * trace.header.total_bytes) // step * step
        found.append(_measure(trace.records, sizes, capacity, name))
    reads = [(hits.missed_bytes + hits.guessed_bytes) / hits.needed_bytes for hits in found]
    return Curve(name, tuple(hits.rate for hits in found), tuple(reads))


def _predicted(trace: Trace) -> dict[str, Any] | None:
    """See `predicted_experts`; with the default policy at _PREDICTED_RESIDENCY."""
    sizes = trace.header.block_sizes()
    policy = POLICIES[DEFAULT](PolicyContext(block_bytes=sizes))
    capacity = int(_PREDICTED_RESIDENCY * trace.header.total_bytes)
    found = predicted_experts(trace.records, sizes, capacity, policy)
    return found and {"residency": _PREDICTED_RESIDENCY, **found}


def _measure(records: Sequence[Routed], sizes: Sizes, capacity: int, name: str) -> Hits:
    if name == BEST:
        return best(records, sizes, capacity)
    policy = POLICIES[DEFAULT if name == GUESSING else name]

    def make(pressure: Callable[[], float]) -> EvictionPolicy:
        return policy(PolicyContext(block_bytes=sizes, pressure=pressure))

    return replay(records, sizes, capacity, make, guesses=name == GUESSING)


def dense_reads(policy: EvictionPolicy) -> list[float]:
    """Share of a dense model that a token reads from the disk, at each of _DENSE_RESIDENCIES.

    All blocks are of one size and pass through the cache in a circle; none is placed by a plan.
    The best there is, is one less the residency.
    """
    blocks = [BlockId(n, BlockKind.FFN) for n in range(_DENSE_BLOCKS)]
    shares = []
    for residency in _DENSE_RESIDENCIES:
        cache = Cache(policy, dict.fromkeys(blocks, 1), int(residency * _DENSE_BLOCKS))
        reads = 0
        for _ in range(_DENSE_ROUNDS):
            reads = 0  # of the last round
            for block in blocks:
                if block not in cache.blocks:
                    cache.admit(block, ())
                    reads += 1
                policy.used(block)
        shares.append(reads / _DENSE_BLOCKS)
        for block in cache.blocks:
            policy.removed(block)
    return shares


def eviction_seconds(name: str, blocks: int = _COST_BLOCKS) -> float:
    """Seconds of CPU to choose a victim among `blocks`, drop it, and cache and use another one.

    With 48 layers and eight uses of other blocks between two evictions, which are not counted.
    """
    rng = random.Random(0)
    ids = [BlockId(n % 48, BlockKind.EXPERT, n // 48) for n in range(2 * blocks)]
    policy = POLICIES[name](PolicyContext(block_bytes=dict.fromkeys(ids, 1 << 21)))
    cached, absent = ids[:blocks], ids[blocks:]
    for block in cached:
        policy.cached(block)
        policy.used(block)
    places = {block: place for place, block in enumerate(cached)}
    seconds = 0.0
    for round_number in range(_COST_ROUNDS):
        for block in sorted(rng.sample(cached, 8)):
            policy.used(block)
        incoming = absent[round_number % blocks]
        begin = time.perf_counter()
        victim = next(policy.eviction_order())
        policy.removed(victim)
        policy.cached(incoming)
        policy.used(incoming)
        seconds += time.perf_counter() - begin
        absent[round_number % blocks] = victim
        places[incoming] = places.pop(victim)
        cached[places[incoming]] = incoming
    return seconds / _COST_ROUNDS


def hit_curves_svg(content: dict[str, Any]) -> str:
    """The results of `run` as one SVG image, a chart per trace."""
    places = [f"{residency:.3g}" for residency in content["residencies"]]
    charts = [
        chart_svg(
            f"{result['model']}, {result['trace']}",
            "experts in memory; share of those needed that were there",
            places,
            {curve["policy"]: curve["rates"] for curve in result["curves"]},
        )
        for result in content["results"]
    ]
    return stacked_svg(charts)

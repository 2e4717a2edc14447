"""What a trace of experts says of caches, for predictions: hits of a text that goes on decoding."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import fmean

from hmt.bench.cache import DEFAULT, Trace, load_traces
from hmt.bench.replay import replay
from hmt.engine.expert_trace import Routed, TraceHeader
from hmt.planner.routing import HitCurve, measured_curve, needed_experts
from hmt.weights.policies import POLICIES, EvictionPolicy, Surroundings

# Between two points the curve is straight; small caches, which several texts share, matter most.
RESIDENCIES = tuple(
    n / 64 for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
)
_LEAST_STEPS = 8  # of one token: with fewer the whole trace counts
_MOST_TEXTS = 8
_SURE = 0.995  # hits beyond this are no less chance than more
_GRID = 40


def traced_curve(file: Path) -> HitCurve:
    """Hits of the engine's own policy, once its cache is full.

    Steps of one token count, as a text decodes, and the first half of them fills the cache: reads
    of what no cache could have had yet would make large caches look as bad as small ones.  Where
    more steps have a token of each of several texts, these count, each text by itself; and all
    together, which says how far apart texts are.  A trace without such steps counts as it is.
    Raises ConfigError for a file that is no trace.
    """
    trace = load_traces([file])[0]
    first, origin = trace.header.layers[0], f"the trace {file}"
    counts = Counter(len(one.experts) for one in trace.records if one.layer == first)
    texts = max(range(1, _MOST_TEXTS + 1), key=lambda count: counts[count])
    together = [one for one in trace.records if len(one.experts) == texts]
    if counts[texts] < _LEAST_STEPS:
        return measured_curve(RESIDENCIES, _rates(trace, trace.records, 0), origin)
    each = [
        _rates(trace, [_of_text(one, text) for one in together], len(together) // 2)
        for text in range(texts)
    ]
    curve = measured_curve(RESIDENCIES, list(map(fmean, zip(*each, strict=True))), origin)
    if texts == 1:
        return curve
    found = _rates(trace, together, len(together) // 2)
    return replace(curve, apart=_fitted(curve, trace.header, texts, found))


def _rates(trace: Trace, records: Sequence[Routed], skip: int) -> list[float]:
    """Hits at each residency, behind the first few records."""
    sizes, total = trace.header.block_sizes(), trace.header.total_bytes

    def policy(pressure: Callable[[], float]) -> EvictionPolicy:
        return POLICIES[DEFAULT](Surroundings(block_bytes=sizes, pressure=pressure))

    return [
        replay(records, sizes, int(share * total), policy, skip=skip).rate for share in RESIDENCIES
    ]


def _of_text(record: Routed, text: int) -> Routed:
    return record._replace(
        experts=record.experts[text : text + 1], scales=record.scales[text : text + 1], guess=None
    )


def _fitted(curve: HitCurve, header: TraceHeader, texts: int, found: Sequence[float]) -> float:
    """How far apart texts are that together have hits as `found`."""
    seen = [pair for pair in zip(RESIDENCIES, found, strict=True) if pair[1] < _SURE]

    def error(apart: float) -> float:
        one, wrong = replace(curve, apart=apart), 0.0
        for share, rate in seen:
            cached = share * header.experts
            needed = needed_experts(header.experts, header.top_k, texts, cached, one, texts)
            missed = max(1 - _SURE, needed.absent / (needed.absent + needed.cached))
            wrong += log(missed / (1 - rate)) ** 2
        return wrong

    return min((n / _GRID for n in range(_GRID + 1)), key=error) if seen else curve.apart

"""What a trace of experts says of caches, for predictions: hits of a text that goes on decoding."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from statistics import fmean

import torch

from hmt.bench.cache import DEFAULT, Trace, load_traces
from hmt.bench.replay import replay
from hmt.engine.experts.trace import Routed, TraceHeader
from hmt.kernels.reference.expert_cache import ExpertSlots, divide_experts
from hmt.planner.cost.expert_hit_rate import HitCurve, measured_curve, needed_experts
from hmt.weights.eviction import POLICIES, EvictionPolicy, PolicyContext

# Between two points the curve is straight; small caches, which several texts share, matter most.
RESIDENCIES = tuple(
    n / 64 for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
)
_LEAST_STEPS = 8  # of one token: with fewer the whole trace counts
_MOST_TEXTS = 8
_SHARES = (0.5, 0.75, 1.0)  # of a GPU's cache, of which each of several texts has a part
_SURE = 0.995  # hits beyond this are no less chance than more
_GRID = 40


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """A GPU's cache of experts, of which each layer has `slots`; see DevicePlan for `link_share`.

    It goes by other rules than caches in host memory.
    """

    slots: int
    link_share: float


def traced_curve(file: Path, device: DeviceCache | None = None) -> HitCurve:
    """Hits of the engine's own policy, once its cache is full.

    device  whose cache it is, measured at its own size and some below; None: that in host memory,
            at many sizes

    Steps of one token count, as a text decodes, and the first half of them fills the cache: reads
    of what no cache could have had yet would make large caches look as bad as small ones.  Where
    more steps have a token of each of several texts, these count, each text by itself; and all
    together, which says how far apart texts are.  A trace without such steps counts as it is.
    Raises ConfigError for a file that is no trace.
    """
    trace = load_traces([file])[0]
    residencies: Sequence[float] = RESIDENCIES
    rates_of: Callable[[Trace, Sequence[Routed], int], list[float]] = _rates
    if device is not None:
        sizes = sorted({max(1, round(share * device.slots)) for share in _SHARES})
        residencies = [size / trace.header.experts for size in sizes]
        rates_of = partial(_device_rates, [replace(device, slots=size) for size in sizes])
    first, origin = trace.header.layers[0], f"the trace {file}"
    counts = Counter(len(one.experts) for one in trace.records if one.layer == first)
    texts = max(range(1, _MOST_TEXTS + 1), key=lambda count: counts[count])
    together = [one for one in trace.records if len(one.experts) == texts]
    if counts[texts] < _LEAST_STEPS:
        return measured_curve(residencies, rates_of(trace, trace.records, 0), origin)
    each = [
        rates_of(trace, [_of_text(one, text) for one in together], len(together) // 2)
        for text in range(texts)
    ]
    curve = measured_curve(residencies, list(map(fmean, zip(*each, strict=True))), origin)
    if texts == 1:
        return curve
    found = rates_of(trace, together, len(together) // 2)
    points = list(zip(residencies, found, strict=True))
    if device is not None:
        points = points[-1:]  # the size that it has; others are what a text's part of it may be
    return replace(curve, independence=_fitted(curve, trace.header, texts, points))


def _rates(trace: Trace, records: Sequence[Routed], skip: int) -> list[float]:
    """Hits at each residency, behind the first few records."""
    sizes, total = trace.header.block_sizes(), trace.header.total_bytes

    def policy(pressure: Callable[[], float]) -> EvictionPolicy:
        return POLICIES[DEFAULT](PolicyContext(block_bytes=sizes, pressure=pressure))

    return [
        replay(records, sizes, int(share * total), policy, skip=skip).rate for share in RESIDENCIES
    ]


def _device_rates(
    devices: Sequence[DeviceCache], trace: Trace, records: Sequence[Routed], skip: int
) -> list[float]:
    """The same of GPUs' caches; what kernels do is told by their reference."""
    return [_device_rate(device, trace, records, skip) for device in devices]


def _device_rate(device: DeviceCache, trace: Trace, records: Sequence[Routed], skip: int) -> float:
    share, caches, before = torch.tensor([device.link_share]), dict[int, ExpertSlots](), {}
    for number, record in enumerate(records):
        if number == skip:
            before = {layer: cache.counts.clone() for layer, cache in caches.items()}
        cache = caches.get(record.layer)
        if cache is None:
            cache = caches[record.layer] = _empty(device.slots, trace.header.experts)
        divide_experts(cache, torch.tensor(record.experts), share)
    counts = sum((c.counts - before.get(layer, 0) for layer, c in caches.items()), torch.zeros(4))
    found, brought, left, _ = counts.tolist()
    return float(found / max(1.0, found + brought + left))


def _empty(slots: int, experts: int) -> ExpertSlots:
    """Addresses are any numbers."""
    return ExpertSlots(
        table=torch.zeros(experts, dtype=torch.int64),
        addresses=torch.arange(1, slots + 1),
        holders=torch.full((slots,), -1),
        scores=torch.zeros(experts),
        staging=torch.arange(slots + 1, slots + 1 + experts),
        origins=torch.zeros(experts, dtype=torch.int64),
        counts=torch.zeros(4, dtype=torch.int64),
    )


def _of_text(record: Routed, text: int) -> Routed:
    return record._replace(
        experts=record.experts[text : text + 1], scales=record.scales[text : text + 1], guess=None
    )


def _fitted(
    curve: HitCurve, header: TraceHeader, texts: int, found: Sequence[tuple[float, float]]
) -> float:
    """How far apart texts are that together have hits as `found`, by residency."""
    seen = [pair for pair in found if pair[1] < _SURE]

    def error(apart: float) -> float:
        one, wrong = replace(curve, independence=apart), 0.0
        for share, rate in seen:
            cached = share * header.experts
            needed = needed_experts(header.experts, header.top_k, texts, cached, one, texts)
            missed = max(1 - _SURE, needed.absent / (needed.absent + needed.cached))
            wrong += log(missed / (1 - rate)) ** 2
        return wrong

    return min((n / _GRID for n in range(_GRID + 1)), key=error) if seen else curve.independence

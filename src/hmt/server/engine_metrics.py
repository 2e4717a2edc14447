"""The engine's account as Prometheus's metrics: bytes by tier and link, pages, and lost time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hmt.contracts.model import PAGE_TOKENS
from hmt.engine import Load, Phase, RunSummary

MODEL_LABEL: Final = "model_name"  # as others call it
_LARGE_BATCH = 128  # up to which sizes have buckets


@dataclass(slots=True)
class Account:
    """What one model's engine last told, and how many answers of it are under way."""

    summary: RunSummary | None = None
    load: Load | None = None
    inside: int = 0

    def metrics(self) -> Iterator[Metric]:
        """All of it; nothing of what is not known."""
        yield GaugeMetricFamily("hmt_answers_inside", "Answers under way", value=self.inside)
        if self.load is not None:
            yield from _load(self.load)
        if self.summary is not None:
            yield from _memory(self.summary)
            yield from _pages(self.summary)
            yield from _work(self.summary)


class TierCollector(Collector):
    """Metrics of the accounts that were last set here, by the names of their models."""

    def __init__(self) -> None:
        self.accounts: Mapping[str, Account] = {}

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client.  A metric's samples come together, as its text form wants them."""
        whole: dict[str, Metric] = {}
        for name, account in self.accounts.items():
            for metric in account.metrics():
                samples = [
                    one._replace(labels={MODEL_LABEL: name, **one.labels}) for one in metric.samples
                ]
                metric.samples = whole[metric.name].samples if metric.name in whole else []
                metric.samples += samples
                whole[metric.name] = metric
        yield from whole.values()
        told = [one.summary for one in self.accounts.values() if one.summary is not None]
        if told:
            yield GaugeMetricFamily(
                "hmt_peak_resident_bytes",
                "Of the process, at its peak",
                value=max(one.peak_rss_bytes for one in told),
            )


def _load(load: Load) -> Iterator[Metric]:
    yield GaugeMetricFamily("hmt_running", "Answers in the batch", value=load.running)
    yield GaugeMetricFamily("hmt_waiting", "Answers that wait for room", value=load.waiting)
    pages = GaugeMetricFamily("hmt_kv_pages", "Pages of keys and values", labels=["state"])
    free = load.free_tokens // PAGE_TOKENS
    pages.add_metric(["free"], free)
    pages.add_metric(["reserved"], load.capacity_tokens // PAGE_TOKENS - free)
    yield pages
    yield GaugeMetricFamily(
        "hmt_pressure", "How scarce pages are: 0 easy, 1 tight, 2 short", value=load.pressure
    )
    yield GaugeMetricFamily("hmt_kv_used_ratio", "Share of pages that is reserved", value=load.used)
    yield GaugeMetricFamily(
        "hmt_batch_limit", "Answers in the batch beyond which none is admitted", value=load.most
    )
    gave_way = CounterMetricFamily(
        "hmt_preemptions", "Times that an answer had to wait again, by kind", labels=["kind"]
    )
    gave_way.add_metric(["parked"], load.parked)
    gave_way.add_metric(["dropped"], load.dropped)
    yield gave_way
    yield _histogram("hmt_batch_size", "Answers that had tokens in a step", load.batches)


def _histogram(name: str, text: str, counts: Mapping[int, int]) -> Metric:
    """Of how often each size came, in buckets of powers of two."""
    buckets, bound = [], 1
    while bound <= _LARGE_BATCH:
        within = sum(count for size, count in counts.items() if size <= bound)
        buckets.append((str(float(bound)), within))
        bound *= 2
    buckets.append(("+Inf", sum(counts.values())))
    total = sum(size * count for size, count in counts.items())
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=total)


def _memory(summary: RunSummary) -> Iterator[Metric]:
    used = GaugeMetricFamily(
        "hmt_used_bytes", "Of the budget, by tier and purpose", labels=["tier", "purpose"]
    )
    budget = GaugeMetricFamily("hmt_budget_bytes", "Allowed, by tier", labels=["tier"])
    budget.add_metric(["host"], summary.budget_bytes)
    for purpose, nbytes in summary.used_bytes.items():
        used.add_metric(["host", purpose], nbytes)
    if summary.device is not None:
        budget.add_metric(["device"], summary.device.budget_bytes)
        for purpose, nbytes in summary.device.used_bytes.items():
            used.add_metric(["device", purpose], nbytes)
    yield used
    yield budget
    weights = GaugeMetricFamily("hmt_weight_bytes", "Weights by home", labels=["tier"])
    weights.add_metric(["host"], summary.resident_bytes)
    weights.add_metric(["disk"], summary.streamed_bytes)
    if summary.device is not None:
        weights.add_metric(["device"], summary.device.resident_bytes)
    yield weights


def _pages(summary: RunSummary) -> Iterator[Metric]:
    if summary.kv is not None:
        capacity = GaugeMetricFamily(
            "hmt_kv_level_pages", "Pages that there is room for, by level", labels=["level"]
        )
        most = GaugeMetricFamily(
            "hmt_kv_level_pages_peak", "Pages that were there at once", labels=["level"]
        )
        moved = CounterMetricFamily(
            "hmt_kv_moved_pages", "Pages that went from level to level", labels=["way"]
        )
        for level, pages in summary.kv.capacity.items():
            capacity.add_metric([level], pages)
        for level, pages in summary.kv.peak.items():
            most.add_metric([level], pages)
        for way, pages in summary.kv.moved.items():
            moved.add_metric([way], pages)
        stalled = CounterMetricFamily(
            "hmt_kv_drive_stall_seconds",
            "Time in which steps waited for the disk to take pages",
            value=summary.kv.stalled_s,
        )
        yield from (capacity, most, moved, stalled)
    if summary.prefixes is not None:
        found = CounterMetricFamily(
            "hmt_prefix", "What the prefix cache counts, by name", labels=["what"]
        )
        for name, count in summary.prefixes.items():
            found.add_metric([name], count)
        yield found


_SECONDS = {
    "disk": "waited_s",
    "device": "device_s",
}


def _work(summary: RunSummary) -> Iterator[Metric]:
    phases: dict[str, Phase] = {"prompt": summary.prompt, "generation": summary.generation}
    tokens = CounterMetricFamily("hmt_computed_tokens", "Tokens computed", labels=["phase"])
    steps = CounterMetricFamily("hmt_steps", "Steps that had tokens of it", labels=["phase"])
    seconds = CounterMetricFamily("hmt_step_seconds", "Time in steps", labels=["phase"])
    stalls = CounterMetricFamily(
        "hmt_stall_seconds", "Time in steps that waited, by what for", labels=["phase", "cause"]
    )
    moved = CounterMetricFamily("hmt_link_bytes", "Bytes by link", labels=["phase", "link"])
    leases = CounterMetricFamily(
        "hmt_block_leases", "Blocks that do not live in memory, when needed", labels=["result"]
    )
    for name, phase in phases.items():
        tokens.add_metric([name], phase.tokens)
        steps.add_metric([name], phase.steps)
        seconds.add_metric([name], phase.seconds)
        for cause, field in _SECONDS.items():
            stalls.add_metric([name, cause], getattr(phase, field))
        for link in ("disk", "host", "link"):
            moved.add_metric([name, link], getattr(phase, f"{link}_bytes"))
    both = (summary.prompt, summary.generation)
    for result in ("hits", "pending", "misses"):
        leases.add_metric([result], sum(getattr(phase, result) for phase in both))
    yield from (tokens, steps, seconds, stalls, moved, leases)

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


def _labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """One metric with a sample for each value of `label`."""
    family = kind(name, text, labels=[label])
    for value, measured in values.items():
        family.add_metric([value], measured)
    return family


def _load(load: Load) -> Iterator[Metric]:
    yield GaugeMetricFamily("hmt_running", "Answers in the batch", value=load.running)
    yield GaugeMetricFamily("hmt_waiting", "Answers that wait for room", value=load.waiting)
    free = load.free_tokens // PAGE_TOKENS
    pages = {"free": free, "reserved": load.capacity_tokens // PAGE_TOKENS - free}
    yield _labelled(GaugeMetricFamily, "hmt_kv_pages", "Pages of the KV cache", "state", pages)
    yield GaugeMetricFamily(
        "hmt_pressure", "How scarce pages are: 0 easy, 1 tight, 2 short", value=load.pressure
    )
    yield GaugeMetricFamily("hmt_kv_used_ratio", "Share of pages that is reserved", value=load.used)
    yield GaugeMetricFamily(
        "hmt_batch_limit", "Answers in the batch beyond which none is admitted", value=load.most
    )
    text = "Times that an answer had to wait again, by kind"
    gave_way = {"parked": load.parked, "dropped": load.dropped}
    yield _labelled(CounterMetricFamily, "hmt_preemptions", text, "kind", gave_way)
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
    budget = {"host": summary.budget_bytes}
    weights = {"host": summary.resident_bytes, "disk": summary.streamed_bytes}
    for purpose, nbytes in summary.used_bytes.items():
        used.add_metric(["host", purpose], nbytes)
    if summary.device is not None:
        budget["device"] = summary.device.budget_bytes
        weights["device"] = summary.device.resident_bytes
        for purpose, nbytes in summary.device.used_bytes.items():
            used.add_metric(["device", purpose], nbytes)
    yield used
    yield _labelled(GaugeMetricFamily, "hmt_budget_bytes", "Allowed, by tier", "tier", budget)
    yield _labelled(GaugeMetricFamily, "hmt_weight_bytes", "Weights by home", "tier", weights)


def _pages(summary: RunSummary) -> Iterator[Metric]:
    if (kv := summary.kv) is not None:
        for kind, name, text, label, values in (
            (GaugeMetricFamily, "level_pages", "Pages that there is room for, by level", "level",
             kv.capacity),
            (GaugeMetricFamily, "level_pages_peak", "Pages that were there at once", "level",
             kv.peak),
            (CounterMetricFamily, "moved_pages", "Pages that went from level to level", "way",
             kv.moved),
        ):  # fmt: skip
            yield _labelled(kind, f"hmt_kv_{name}", text, label, values)
        yield CounterMetricFamily(
            "hmt_kv_drive_stall_seconds",
            "Time in which steps waited for the disk to take pages",
            value=kv.stalled_s,
        )
    if summary.prefixes is not None:
        text = "What the prefix cache counts, by name"
        yield _labelled(CounterMetricFamily, "hmt_prefix", text, "what", summary.prefixes)


def _work(summary: RunSummary) -> Iterator[Metric]:
    phases: dict[str, Phase] = {"prompt": summary.prompt, "generation": summary.generation}
    tokens = CounterMetricFamily("hmt_computed_tokens", "Tokens computed", labels=["phase"])
    steps = CounterMetricFamily("hmt_steps", "Steps that had tokens of it", labels=["phase"])
    seconds = CounterMetricFamily("hmt_step_seconds", "Time in steps", labels=["phase"])
    stalls = CounterMetricFamily(
        "hmt_stall_seconds", "Time in steps that waited, by what for", labels=["phase", "cause"]
    )
    moved = CounterMetricFamily("hmt_link_bytes", "Bytes by link", labels=["phase", "link"])
    for name, phase in phases.items():
        tokens.add_metric([name], phase.tokens)
        steps.add_metric([name], phase.steps)
        seconds.add_metric([name], phase.seconds)
        stalls.add_metric([name, "disk"], phase.waited_s)
        stalls.add_metric([name, "device"], phase.device_s)
        for link in ("disk", "host", "link"):
            moved.add_metric([name, link], getattr(phase, f"{link}_bytes"))
    yield from (tokens, steps, seconds, stalls, moved)
    drafts, text = summary.speculation, "Draft tokens, by what became of them"
    counts = {"accepted": drafts.accepted, "rejected": drafts.proposed - drafts.accepted}
    yield _labelled(CounterMetricFamily, "hmt_speculated_tokens", text, "result", counts)
    text = "Draft tokens that were right, by their place in the draft"
    depths = {str(n): float(right) for n, (_, right) in enumerate(drafts.by_depth, 1)}
    yield _labelled(CounterMetricFamily, "hmt_speculated_depth", text, "depth", depths)
    yield CounterMetricFamily(
        "hmt_speculation_failures", "Proposers that failed", value=drafts.failures
    )
    yield GaugeMetricFamily(
        "hmt_speculation_saved_seconds", "Time that drafts saved", value=drafts.saved_s
    )
    if summary.ranks:
        text = "Whether a process that computes the model with the server's runs, by rank"
        runs = {str(rank.number): float(rank.alive and not rank.failure) for rank in summary.ranks}
        yield _labelled(GaugeMetricFamily, "hmt_rank_up", text, "rank", runs)
    if (drift := summary.drift) is not None:
        yield CounterMetricFamily(
            "hmt_drifted_requests", "Answers that went on in higher precision", value=drift.requests
        )
        yield CounterMetricFamily(
            "hmt_raised_tokens", "Tokens computed in higher precision", value=drift.tokens
        )
        yield CounterMetricFamily(
            "hmt_drift_windows", "Windows compared with calibration", value=drift.windows
        )
    leases = {
        result: sum(getattr(phase, result) for phase in phases.values())
        for result in ("hits", "pending", "misses")
    }
    text = "Blocks that do not live in memory, when needed"
    yield _labelled(CounterMetricFamily, "hmt_block_leases", text, "result", leases)

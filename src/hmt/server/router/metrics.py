"""What all replicas have measured on one page, each number with its replica."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typing_extensions import override

from hmt.server.router.forwarding import Counts
from hmt.server.router.replicas import Replica

_LABEL = "replica"


def merged(pages: Mapping[int, str], replicas: Sequence[Replica], counts: Counts) -> bytes:
    """One page for Prometheus of those of several servers, by number, and of the router's own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Pages(pages, replicas, counts))
    return generate_latest(registry)


class _Pages(Collector):
    def __init__(
        self, pages: Mapping[int, str], replicas: Sequence[Replica], counts: Counts
    ) -> None:
        self._pages, self._replicas, self._counts = pages, replicas, counts

    @override
    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for number, page in self._pages.items():
            for found in text_string_to_metric_families(page):
                kept = families.setdefault(
                    found.name, Metric(found.name, found.documentation, found.type)
                )
                kept.samples += [
                    one._replace(labels={**one.labels, _LABEL: str(number)})
                    for one in found.samples
                ]
        yield from families.values()
        yield from self._own()

    def _own(self) -> Iterator[Metric]:
        label = (_LABEL,)
        up = GaugeMetricFamily("hmt_replica_up", "Whether it takes requests", labels=label)
        running = GaugeMetricFamily(
            "hmt_router_running", "Requests that a replica answers now", labels=label
        )
        for one in self._replicas:
            up.add_metric((str(one.number),), float(not one.failure))
            running.add_metric((str(one.number),), one.running)
        chosen = CounterMetricFamily(
            "hmt_router_requests", "Requests, by why a replica was chosen",
            labels=(_LABEL, "reason"),
        )  # fmt: skip
        for (number, reason), count in self._counts.chosen.items():
            chosen.add_metric((str(number), reason.value), count)
        yield from (up, running, chosen)
        yield CounterMetricFamily(
            "hmt_router_retries", "Requests that were sent to another replica",
            value=self._counts.retried,
        )  # fmt: skip
        yield CounterMetricFamily(
            "hmt_router_cut", "Answers that a replica's end has cut off", value=self._counts.cut
        )

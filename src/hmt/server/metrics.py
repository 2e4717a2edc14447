"""What was measured, for Prometheus."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from starlette.types import Scope
from typing_extensions import override

from hmt.base.errors import ClosedError
from hmt.engine import LoadedModel, RunSummary
from hmt.server.engine_metrics import MODEL_LABEL, Account, TierCollector
from hmt.server.generation import ChoiceState, Observer
from hmt.server.service import Service

_PATIENCE_S: Final = 1.0  # that a scrape waits for the step that runs
_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(slots=True)
class _ModelMetrics:
    """One model, with what it is being asked and what it last told."""

    model: LoadedModel
    account: Account = field(default_factory=Account)
    reading: Future[RunSummary] | None = None

    async def read(self, inside: int) -> None:
        """Bring the account up to date, or leave it as it is while a step takes long."""
        with suppress(ClosedError, TimeoutError):
            if self.reading is None:
                self.reading = self.model.begin_summary()
            reading = asyncio.shield(asyncio.wrap_future(self.reading))
            self.account.summary = await asyncio.wait_for(reading, _PATIENCE_S)
            self.reading = None
        self.account.load = self.model.load
        self.account.inside = inside


class _AnswerCounter(Observer):
    """Counts the answers of one model.  An Observer."""

    def __init__(self, metrics: "Metrics", name: str) -> None:
        self._queue, self._ttft, self._tpot, self._whole = (
            one.labels(name) for one in metrics.times
        )
        self._tokens = metrics.tokens.labels(name)
        self._name, self._ends = name, metrics.ends

    @override
    def ended(self, choice: ChoiceState) -> None:
        ticket = choice.ticket
        reason = choice.finish_reason
        end = "failed" if choice.failed else "cancelled" if reason is None else reason.value
        self._ends.labels(self._name, end).inc()
        self._tokens.inc(choice.tokens)
        if ticket.admitted_s is not None:
            self._queue.observe(ticket.admitted_s - ticket.submitted_s)
        if choice.first_s is None or choice.last_s is None:
            return
        self._ttft.observe(choice.first_s - ticket.submitted_s)
        if choice.tokens > 1:
            self._tpot.observe((choice.last_s - choice.first_s) / (choice.tokens - 1))
        if reason is not None:
            self._whole.observe(choice.last_s - ticket.submitted_s)


class Metrics:
    """Counts requests and answers, and asks the engine for its account when it is read.

    What concerns a model is labelled with its name.  A registry of its own, so that several
    applications can be in one process.
    """

    def __init__(self) -> None:
        self._watched: dict[str, _ModelMetrics] = {}
        self._tiers = TierCollector()
        self.registry = CollectorRegistry()
        self.registry.register(self._tiers)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
        ) -> Histogram:
            return Histogram(f"hmt_{name}", text, labels, registry=self.registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hmt_{name}", text, labels, registry=self.registry)

        model = (MODEL_LABEL,)
        self.times = (
            histogram("queue_seconds", "Time until an answer began to be computed", _LONG, model),
            histogram("time_to_first_token_seconds", "Time until its first token", _LONG, model),
            histogram("time_per_output_token_seconds", "Mean per later token", _SHORT, model),
            histogram("answer_seconds", "Time until its last token", _LONG, model),
        )
        self.ends = counter("answers", "Answers, by how they ended", *model, "end")
        self.tokens = counter("tokens", "Tokens of answers", *model)
        self._http = counter("http_responses", "Responses", "path", "status")
        self._http_s = histogram("http_seconds", "Time until a response had ended", _LONG)

    def responded(self, scope: Scope, status: int, seconds: float) -> None:
        """A response has ended."""
        route = scope.get("route")  # None where nothing is: what was asked for is not counted by
        path = getattr(route, "path", "")
        self._http.labels(path, str(status)).inc()
        self._http_s.observe(seconds)

    def of(self, name: str) -> Observer:
        """Who counts the answers of the model with this name."""
        return _AnswerCounter(self, name)

    async def render(self, services: Mapping[str, Service]) -> tuple[bytes, str]:
        """All of it as text, and the text's content type.  `services`: the models, by name.

        The engines' accounts are as of a moment ago, or, while a step takes long, of the last time.
        """
        before, self._watched = self._watched, {}
        for name, service in services.items():
            known = before.get(name)
            same = known is not None and known.model is service.model
            self._watched[name] = known if known and same else _ModelMetrics(service.model)
        looks = [self._watched[name].read(one.limit.inside) for name, one in services.items()]
        await asyncio.gather(*looks)
        self._tiers.accounts = {name: one.account for name, one in self._watched.items()}
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

"""What was measured, for Prometheus."""

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from starlette.types import Scope

from hmt.base.errors import ClosedError
from hmt.engine import LoadedModel, RunSummary
from hmt.server.generation import Course
from hmt.server.tiers import TierCollector

_PATIENCE_S: Final = 1.0  # that a scrape waits for the step that runs
_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counts requests and answers, and asks the engine for its account when it is read.

    A registry of its own, so that several applications can be in one process.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._reading: Future[RunSummary] | None = None
        self._tiers = TierCollector()
        self.registry = CollectorRegistry()
        self.registry.register(self._tiers)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"hmt_{name}", text, registry=self.registry, buckets=buckets)

        self._queue = histogram("queue_seconds", "Time until an answer began to be computed", _LONG)
        self._ttft = histogram("time_to_first_token_seconds", "Time until its first token", _LONG)
        self._tpot = histogram("time_per_output_token_seconds", "Mean time per later token", _SHORT)
        self._whole = histogram("answer_seconds", "Time until its last token", _LONG)
        self._ends = Counter(
            "hmt_answers", "Answers, by how they ended", ["end"], registry=self.registry
        )
        self._tokens = Counter("hmt_tokens", "Tokens of answers", registry=self.registry)
        self._http = Counter(
            "hmt_http_responses", "Responses", ["path", "status"], registry=self.registry
        )
        self._http_s = histogram("http_seconds", "Time until a response had ended", _LONG)

    def responded(self, scope: Scope, status: int, seconds: float) -> None:
        """A response has ended."""
        route = scope.get("route")  # None where nothing is: what was asked for is not counted by
        path = getattr(route, "path", "")
        self._http.labels(path, str(status)).inc()
        self._http_s.observe(seconds)

    def ended(self, course: Course) -> None:
        """See Observer."""
        ticket = course.ticket
        reason = course.finish_reason
        end = "failed" if course.failed else "cancelled" if reason is None else reason.value
        self._ends.labels(end).inc()
        self._tokens.inc(course.tokens)
        if ticket.admitted_s is not None:
            self._queue.observe(ticket.admitted_s - ticket.submitted_s)
        if course.first_s is None or course.last_s is None:
            return
        self._ttft.observe(course.first_s - ticket.submitted_s)
        if course.tokens > 1:
            self._tpot.observe((course.last_s - course.first_s) / (course.tokens - 1))
        if reason is not None:
            self._whole.observe(course.last_s - ticket.submitted_s)

    def watch(self, model: LoadedModel) -> None:
        """Whose account is told from now on."""
        self._model, self._reading = model, None

    async def render(self, inside: int) -> tuple[bytes, str]:
        """All of it as text, and the text's content type.  `inside`: answers under way.

        The engine's account is as of a moment ago, or, while a step takes long, of the last time.
        """
        with suppress(ClosedError, TimeoutError):
            if self._reading is None:
                self._reading = self._model.begin_summary()
            reading = asyncio.shield(asyncio.wrap_future(self._reading))
            self._tiers.summary = await asyncio.wait_for(reading, _PATIENCE_S)
            self._reading = None
        self._tiers.load = self._model.load
        self._tiers.inside = inside
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

"""Answers under way, for asyncio: the engine's thread tells, the event loop listens."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

from typing_extensions import override

from hmt.base.errors import Cancelled, DeadlineError, HMTError
from hmt.contracts.request import (
    FinishReason,
    PromptEvent,
    Request,
    TokenEvent,
)
from hmt.engine import LoadedModel, RequestHandle
from hmt.engine.outputs.output_processor import TokenListener
from hmt.server.client import CLIENT, off_loop
from hmt.server.concurrency_limit import ConcurrencyLimit
from hmt.server.errors import as_api_error

EngineEvent = TokenEvent | PromptEvent | HMTError | None

_LATE_S: Final = 2.0  # that the engine has to tell itself that a request's time is over
_TO_READ_S: Final = 5.0  # that a client then has to read the error


@dataclass(frozen=True, slots=True)
class _QueueListener(TokenListener):
    """Listener of one answer: hands what it is told to the event loop."""

    number: int
    loop: asyncio.AbstractEventLoop
    hear: Callable[[int, EngineEvent], None]

    @override
    def put(self, event: EngineEvent, /) -> None:
        try:
            self.loop.call_soon_threadsafe(self.hear, self.number, event)
        except RuntimeError:
            return  # the loop has ended, and with it whoever would have listened


@dataclass(slots=True)
class ChoiceState:
    """How one answer goes.  Times are time.perf_counter() seconds.

    prompt   what was asked of the prompt, with the first answer to it
    """

    ticket: RequestHandle
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    finish_reason: FinishReason | None = None
    failed: bool = False
    prompt: PromptEvent = field(default_factory=lambda: PromptEvent(()))

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.failed or self.finish_reason is not None


class Observer(Protocol):
    """Counts what it is told; on the event loop."""

    def ended(self, choice: ChoiceState) -> None:
        """An answer has ended, failed, or was cancelled."""
        ...


@dataclass(slots=True, eq=False)
class Generation:
    """All answers that one HTTP request asked for: for each prompt as many as there are choices.

    Use as a context: leaving it cancels what has not ended, so that its pages come back at once.
    Answers are numbered by prompt, then by choice.

    Its places at the gate are free once the engine has written all, whether or not the client
    reads; what waits to be read is bounded by `gate.unread`.
    """

    limit: ConcurrencyLimit
    observer: Observer
    param: str
    choices: list[ChoiceState] = field(default_factory=list)
    prompts: list[RequestHandle] = field(default_factory=list)  # the first answer of each
    _events: "asyncio.Queue[tuple[int, EngineEvent]]" = field(default_factory=asyncio.Queue)
    _answers: int = 0
    _writing: int = 0  # answers of which the engine has not told the end
    _took_s: float | None = None  # the longest answer that ended by itself
    _begun_s: float = 0.0
    _inside: bool = False
    _closed: bool = False
    _over: HMTError | None = None  # why it ends before the engine says so
    _timer: asyncio.TimerHandle | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _state: dict[str, Any] = field(default_factory=dict)  # of the HTTP request
    _recurrent: bool = False  # whether the model has recurrent state

    async def begin(
        self,
        model: LoadedModel,
        requests: Callable[[], Sequence[Request]],
        answers: int,
        timeout_s: float,
        *,
        images: bool = False,
    ) -> None:
        """Have the engine begin so many answers in all, to what `requests` makes on a thread.

        images   whether any of them has some
        Raises ApiError: 429 at once where there is no room, 400 for requests that cannot be.
        """
        self.limit.enter(answers)
        self._answers = self._writing = answers
        self._inside, self._begun_s = True, time.perf_counter()
        loop, client = asyncio.get_running_loop(), CLIENT.get()
        self._state, self._recurrent = client.state, bool(model.prepared.model.spec.state_bytes)
        # Beside the engine, whose word waits behind what a client does not read.
        self._timer = loop.call_later(timeout_s + _LATE_S, self._expire, timeout_s, client.cut)
        ears = [_QueueListener(number, loop, self._hear) for number in range(answers)]

        def submit() -> None:
            if self._stopped:
                return
            made = requests()
            choices = answers // len(made)
            for number, request in enumerate(made):
                if self._stopped:
                    return
                tickets = model.begin(request, ears[number * choices : (number + 1) * choices])
                self.prompts.append(tickets[0])
                self.choices += map(ChoiceState, tickets)

        # Long texts take their time to become tokens; the loop is for everybody.
        submitting = asyncio.create_task(off_loop(submit, images=images))
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({submitting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._over is not None:
                raise self._over
            submitting.result()
        except BaseException as error:
            self.close()  # the thread may go on: what it begins is cancelled at its end
            submitting.add_done_callback(self._cancel_late)
            if isinstance(error, HMTError):
                raise as_api_error(error, self.param) from error
            raise
        finally:
            ended.cancel()

    @property
    def _stopped(self) -> bool:
        return self._closed or self._over is not None

    def _hear(self, number: int, event: EngineEvent) -> None:
        """What the engine tells, on the event loop."""
        if self._stopped:
            return
        ends = not isinstance(event, TokenEvent | PromptEvent)
        if isinstance(event, TokenEvent | PromptEvent) and event.finish_reason is not None:
            ends, self._took_s = True, time.perf_counter() - self._begun_s
        self._writing -= ends
        if not self._writing:
            self._leave_gate()
        self._events.put_nowait((number, event))
        if isinstance(event, TokenEvent):
            self.limit.unread.add(self, _size_of(event))

    def cut_off(self, error: HMTError) -> None:
        """End all answers: `begin` or `events` raises `error`, as an ApiError."""
        if not self._closed and self._over is None:
            self._over = error
            self._cancel()
            self._leave_gate()
            self._drop_unread()
            self._events.put_nowait((0, error))
            self._ended.set()

    def _expire(self, timeout_s: float, cut: Callable[[], None]) -> None:
        self.cut_off(DeadlineError(f"the answer took longer than {timeout_s:g} s"))
        self._timer = asyncio.get_running_loop().call_later(_TO_READ_S, cut)

    async def events(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """(answer, token) as they come, until all have ended.  Raises ApiError.

        What was asked of a prompt is in its first course before that answer's first token.
        """
        left = sum(not course.ended for course in self.choices)
        while left:
            number, event = await self._events.get()
            if self._over is not None:
                raise as_api_error(self._over, self.param) from self._over
            course = self.choices[number]
            if isinstance(event, PromptEvent):
                course.prompt, course.finish_reason = event, event.finish_reason
                course.last_s = time.perf_counter()
                left -= event.finish_reason is not None
                continue
            if not isinstance(event, TokenEvent):
                course.failed = True
                error = event or Cancelled("the request was cancelled")
                raise as_api_error(error, self.param) from error
            self.limit.unread.read(self, _size_of(event))
            course.last_s = time.perf_counter()
            course.first_s = course.first_s or course.last_s
            course.tokens += 1
            course.finish_reason = event.finish_reason
            left -= event.finish_reason is not None
            yield number, event

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(ticket.prompt_tokens for ticket in self.prompts)

    @property
    def held_tokens(self) -> int:
        """Of them, those that the prefix cache had."""
        return sum(ticket.held_tokens for ticket in self.prompts)

    @property
    def diverged_at(self) -> int | None:
        """Token at which the prompt differed from all that the prefix cache had.

        None of several prompts, and where the prefix cache was not asked.
        """
        return self.prompts[0].diverged_at if len(self.prompts) == 1 else None

    @property
    def reuse(self) -> dict[str, int]:
        """What the log says of the prompt.

        Recurrent state goes on from the checkpoint behind the last token that was cached.
        """
        told = {"tokens": self.prompt_tokens, "cached": self.held_tokens}
        if self.diverged_at is not None:
            told["diverged_at"] = self.diverged_at
            if self._recurrent:
                told["checkpoint_at"] = self.held_tokens
        return told

    @property
    def is_raised(self) -> bool:
        """Whether tokens of any answer were computed in higher precision."""
        return any(choice.ticket.raised_at is not None for choice in self.choices)

    @property
    def completion_tokens(self) -> int:
        """Of all answers, until now."""
        return sum(course.tokens for course in self.choices)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what has not ended.  Does nothing twice."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._cancel()
        self._leave_gate()
        self._drop_unread()
        if self.prompts:
            self._state["prompt"] = self.reuse
        if self.is_raised:
            self._state["precision"] = "raised"
        for course in self.choices:
            self.observer.ended(course)

    def _leave_gate(self) -> None:
        if self._inside:
            self._inside = False
            self.limit.leave(self._answers, self._took_s)

    def _drop_unread(self) -> None:
        self.limit.unread.drop(self)
        while not self._events.empty():
            self._events.get_nowait()

    def _cancel_late(self, submitted: "asyncio.Task[None]") -> None:
        if not submitted.cancelled():
            submitted.exception()  # nobody is left to be told
        self._cancel()

    def _cancel(self) -> None:
        for course in self.choices:
            if not course.ended:
                course.ticket.cancel()


def _size_of(event: TokenEvent) -> int:
    """Bytes of memory that it takes, about: measured with and without log-probabilities."""
    return 400 + 2 * len(event.text) + (130 * len(event.logprob.top) if event.logprob else 0)

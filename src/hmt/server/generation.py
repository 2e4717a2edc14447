"""Answers under way, for asyncio: the engine's thread tells, the event loop listens."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from hmt.base.errors import Cancelled, HMTError
from hmt.contracts.request import (
    FinishReason,
    PromptEvent,
    Request,
    TokenEvent,
)
from hmt.engine import LoadedModel, Ticket
from hmt.server.errors import told
from hmt.server.gate import Gate
from hmt.server.observer import Observer

Told = TokenEvent | PromptEvent | HMTError | None


@dataclass(frozen=True, slots=True)
class _Ear:
    """Listener of one answer: hands what it is told to the event loop."""

    number: int
    loop: asyncio.AbstractEventLoop
    heard: "asyncio.Queue[tuple[int, Told]]"

    def put(self, event: Told, /) -> None:
        """See hmt.engine.Listener."""
        try:
            self.loop.call_soon_threadsafe(self.heard.put_nowait, (self.number, event))
        except RuntimeError:
            return  # the loop has ended, and with it whoever would have listened


@dataclass(slots=True)
class Course:
    """How one answer goes.  Times are time.perf_counter() seconds.

    prompt   what was asked of the prompt, with the first answer to it
    """

    ticket: Ticket
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


@dataclass(slots=True)
class Generation:
    """All answers that one HTTP request asked for: for each prompt as many as there are choices.

    Use as a context: leaving it cancels what has not ended, so that its pages come back at once.
    Answers are numbered by prompt, then by choice.
    """

    gate: Gate
    observer: Observer
    param: str
    courses: list[Course] = field(default_factory=list)
    prompts: list[Ticket] = field(default_factory=list)  # the first answer of each
    _heard: "asyncio.Queue[tuple[int, Told]]" = field(default_factory=asyncio.Queue)
    _answers: int = 0
    _closed: bool = False

    async def begin(
        self, model: LoadedModel, requests: Callable[[], Sequence[Request]], answers: int
    ) -> None:
        """Have the engine begin so many answers in all, to what `requests` makes on a thread.

        Raises ApiError: 429 at once where there is no room, 400 for requests that cannot be.
        """
        self.gate.enter(answers)
        self._answers = answers
        loop = asyncio.get_running_loop()
        ears = [_Ear(number, loop, self._heard) for number in range(answers)]

        def submit() -> None:
            made = requests()
            choices = answers // len(made)
            for number, request in enumerate(made):
                if self._closed:
                    return
                tickets = model.begin(request, ears[number * choices : (number + 1) * choices])
                self.prompts.append(tickets[0])
                self.courses += map(Course, tickets)

        # Long texts take their time to become tokens; the loop is for everybody.
        submitting = asyncio.create_task(asyncio.to_thread(submit))
        try:
            await asyncio.shield(submitting)
        except HMTError as error:
            self.close()
            raise told(error, self.param) from error
        except BaseException:
            self.close()  # the thread goes on: what it begins is cancelled at its end
            submitting.add_done_callback(self._cancel_late)
            raise

    async def events(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """(answer, token) as they come, until all have ended.  Raises ApiError.

        What was asked of a prompt is in its first course before that answer's first token.
        """
        left = sum(not course.ended for course in self.courses)
        while left:
            number, event = await self._heard.get()
            course = self.courses[number]
            if isinstance(event, PromptEvent):
                course.prompt, course.finish_reason = event, event.finish_reason
                course.last_s = time.perf_counter()
                left -= event.finish_reason is not None
                continue
            if not isinstance(event, TokenEvent):
                course.failed = True
                error = event or Cancelled("the request was cancelled")
                raise told(error, self.param) from error
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
    def completion_tokens(self) -> int:
        """Of all answers, until now."""
        return sum(course.tokens for course in self.courses)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what has not ended.  Does nothing twice."""
        if self._closed:
            return
        self._closed = True
        self._cancel()
        took = [
            c.last_s - c.ticket.submitted_s for c in self.courses if c.finish_reason and c.last_s
        ]
        self.gate.leave(self._answers, max(took, default=None))
        for course in self.courses:
            self.observer.ended(course)

    def _cancel_late(self, submitted: "asyncio.Task[None]") -> None:
        if not submitted.cancelled():
            submitted.exception()  # nobody is left to be told
        self._cancel()

    def _cancel(self) -> None:
        for course in self.courses:
            if not course.ended:
                course.ticket.cancel()

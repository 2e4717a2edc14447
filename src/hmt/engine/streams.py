"""What a caller holds of its requests: tokens as they come, and the right to cancel."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hmt.base.errors import HMTError
from hmt.contracts.request import (
    Completion,
    FinishReason,
    PromptEvent,
    Request,
    TokenEvent,
)
from hmt.engine.scheduling.sequence import SequenceState

Cancel = Callable[[SequenceState], None]
StreamEvent = TokenEvent | PromptEvent | HMTError | None


class TokenStream(Iterator[TokenEvent]):
    """The tokens of one request, as they come.  Closing or dropping it cancels the request."""

    def __init__(
        self,
        sequence: SequenceState,
        events: "queue.SimpleQueue[StreamEvent]",
        cancel: Cancel,
    ) -> None:
        """`events` are those of `sequence`."""
        self._sequence = sequence
        self._events = events
        self._cancel = cancel
        self._ended = False
        self._prompt = PromptEvent(())

    def __next__(self) -> TokenEvent:
        """The next token.  Raises what failed the request."""
        if self._ended:
            raise StopIteration
        event = self._events.get()
        if isinstance(event, PromptEvent):
            self._prompt = event
            event = self._events.get() if event.finish_reason is None else None
        assert not isinstance(event, PromptEvent)
        self._ended = event is None or isinstance(event, HMTError) or bool(event.finish_reason)
        if event is None:
            raise StopIteration
        if isinstance(event, HMTError):
            raise event
        return event

    def close(self) -> None:
        """Cancel what is left of the request."""
        if not self._ended:
            self._ended = True
            self._cancel(self._sequence)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, those of images included."""
        return self._sequence.prompt_tokens

    def completion(self) -> Completion:
        """All that is left, once it has come.  Raises what failed the request."""
        events = list(self)
        finish_reason = events[-1].finish_reason if events else self._prompt.finish_reason
        return Completion(
            text="".join(event.text for event in events),
            token_ids=tuple(event.token_id for event in events),
            finish_reason=finish_reason or FinishReason.CANCELLED,
            prompt_tokens=self._sequence.prompt_tokens,
            logprobs=tuple(event.logprob for event in events if event.logprob is not None),
            prompt_logprobs=self._prompt.logprobs,
            embedding=self._prompt.embedding,
            raised_at=self._sequence.raised_at if self._sequence.was_raised else None,
        )

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """A request that was begun with listeners; see LoadedModel.begin.  For any thread.

    Times are time.perf_counter() seconds.
    """

    _sequence: SequenceState
    _cancel: Cancel

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._sequence.prompt_tokens

    @property
    def held_tokens(self) -> int:
        """Of them, those whose keys and values others had computed; 0 until it runs."""
        return self._sequence.cached_tokens

    @property
    def diverged_at(self) -> int | None:
        """Token of the prompt at which it differed from all that the prefix cache had.

        None until it runs, and where the prefix cache was not asked.
        """
        return self._sequence.diverged_at

    @property
    def raised_at(self) -> int | None:
        """Position from which on its tokens were computed in higher precision; None: none were."""
        return self._sequence.raised_at if self._sequence.was_raised else None

    @property
    def submitted_s(self) -> float:
        """When it was made."""
        return self._sequence.submitted_s

    @property
    def admitted_s(self) -> float | None:
        """When it began to run; None while it waits."""
        return self._sequence.admitted_s

    def cancel(self) -> None:
        """End it, if it has not ended; its listener is told None."""
        self._cancel(self._sequence)


def nth(request: Request, number: int) -> Request:
    """The request for a prompt's answer `number`."""
    if not isinstance(request, Request) or not number:
        return request
    if request.prompt_logprobs is not None and request.max_new_tokens != 0:
        request = replace(request, prompt_logprobs=None)  # the first answer tells them
    seed = request.sampling.seed
    if seed is None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=seed + number))


def completions(streams: list[TokenStream]) -> list[Completion]:
    """All of them; the others are cancelled when one fails."""
    try:
        return [stream.completion() for stream in streams]
    finally:
        for stream in streams:
            stream.close()

"""One request while it runs: its tokens, its place in the KV cache, and what it has produced."""

import itertools
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hmt.base.errors import HMTError, NumericsError
from hmt.contracts.request import (
    FinishReason,
    PromptEvent,
    Request,
    TokenEvent,
    TokenLogprob,
)
from hmt.engine.sampler import SamplerState, logprob_of, not_finite
from hmt.engine.shown import Pool
from hmt.kernels import ops
from hmt.kernels.ops import Survey
from hmt.text import Constraint, StopStrings, TextStream, ThoughtLimit

_numbers = itertools.count(1)


class Listener(Protocol):
    """Who is told what becomes of a request."""

    def put(self, event: TokenEvent | PromptEvent | HMTError | None, /) -> None:
        """A token, the last with a finish reason; or the error that ended it; None: cancelled.

        Before the first token what was asked of the prompt, if anything was.

        On the engine's thread: it must neither wait nor raise.
        """
        ...


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one request.  Only the engine's thread changes it.

    tokens      prompt and answer so far
    positions   positions of KV that prompt and answer may take
    computed    tokens whose KV has been written
    given       tokens that are computed in chunks, like a prompt: that, and of a sequence that was
                sent back and has to begin again what it had answered
    whole       tokens whose rotary positions go by their number: the prompt, and of a sequence that
                has crossed a `RotaryBorder` all that it had then
    kv          handle in the KV cache; None while it has nothing there
    room        positions that are reserved for it
    sent_back   times that it had begun and others needed its place or its room
    leader      another of the same prompt, whose keys and values are to be shared once computed
    form        what holds the answer to the form that was asked for, or its reasoning to a length
    events      who is told of tokens and of the end
    scores      of the prompt's tokens from the second on, as far as computed; None: not wanted
    pool        of its hidden states, likewise
    held        positions whose keys and values were there when it began to run
    submitted_s, admitted_s   time.perf_counter() when it was made, and when it began to run
    deadline_s  time.monotonic() at which it fails if it has not ended; None: never
    """

    request: Request
    tokens: list[int]
    prompt_tokens: int
    positions: int
    sampler: SamplerState
    text: TextStream
    stops: StopStrings
    eos_ids: frozenset[int]
    events: Listener
    form: Constraint | ThoughtLimit | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    computed: int = 0
    given: int = field(init=False)
    whole: int = field(init=False)
    kv: int | None = None
    room: int = 0
    sent_back: int = 0
    leader: "Sequence | None" = None
    finish_reason: FinishReason | None = None
    scores: list[TokenLogprob] | None = None
    pool: Pool | None = None
    held: int = 0
    submitted_s: float = field(default_factory=time.perf_counter)
    admitted_s: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        self.given = self.whole = self.prompt_tokens

    @property
    def finished(self) -> bool:
        """True once nothing more will be produced."""
        return self.finish_reason is not None

    @property
    def wants_tokens(self) -> bool:
        """False where only the prompt is computed."""
        return self.positions > self.prompt_tokens

    @property
    def shows(self) -> bool:
        """Whether something was asked of the prompt that is not told yet."""
        return self.scores is not None or self.pool is not None

    def shown_rows(self, first: int, count: int) -> tuple[int, int]:
        """Of `count` tokens from position `first` on, rows that are scored, and pooled.

        Those that are scored are the first of them, those that are pooled the last.
        """
        left = self.prompt_tokens - first
        if left <= 0 or not self.shows:
            return 0, 0
        scored = 0 if self.scores is None else min(count, left - 1)
        pooled = 0 if self.pool is None else self.pool.rows(count, complete=count == left)
        return scored, pooled

    def score(self, position: int, logits: torch.Tensor) -> None:
        """Score the prompt token behind `position` by logits f32 [vocab].

        Fails the sequence where they are not numbers.
        """
        if self.finished or self.scores is None:
            return
        found = ops.survey(logits)
        if not found.finite:
            self.fail(not_finite(logits))
            return
        del self.scores[position:]  # where it is computed again
        most, token = self.request.prompt_logprobs or 0, self.tokens[position + 1]
        self.scores.append(logprob_of(logits, token, found.log_sum_exp, most))

    def read(self) -> None:
        """The prompt has been computed: tell what was asked of it, and end where that is all."""
        if self.finished or not self.shows:
            return
        embedding = None if self.pool is None else self.pool.embedding()
        if embedding is not None and not embedding.isfinite().all():
            self.fail(NumericsError("the prompt's hidden states are not all numbers"))
            return
        reason = None if self.wants_tokens else FinishReason.LENGTH
        self.finish_reason = reason
        self.events.put(PromptEvent(tuple(self.scores or ()), reason, embedding))
        self.scores = self.pool = None

    def accept(self, logits: torch.Tensor, known: Survey | None = None) -> None:
        """Choose the next token from f32 [vocab] logits and add its event.

        known   what `ops.survey` says of them, where somebody has looked already

        Raises NumericsError where the logits are not numbers, RequestError where the form that was
        asked for allows nothing more.
        """
        allowed = None if self.form is None else self.form.allowed()
        chosen = self.sampler.choose(logits, known, allowed)
        self.tokens.append(chosen.token_id)
        logprob = chosen if self.request.sampling.logprobs is not None else None
        if chosen.token_id in self.eos_ids and not self.request.ignore_eos:
            self._finish_text(chosen.token_id, logprob, FinishReason.STOP, self.text.flush())
            return
        if self.form is not None:
            self.form.push(chosen.token_id)
        text = self.stops.push(self.text.push(chosen.token_id))
        if self.stops.matched is not None:
            self._finish(chosen.token_id, text, logprob, FinishReason.STOP)
        elif self.form is not None and self.form.complete:
            rest = self.text.flush()
            self._finish_text(chosen.token_id, logprob, FinishReason.STOP, rest, text)
        elif len(self.tokens) == self.positions:
            rest = self.text.flush()
            self._finish_text(chosen.token_id, logprob, FinishReason.LENGTH, rest, text)
        else:
            self.events.put(TokenEvent(chosen.token_id, text, logprob))

    def fail(self, error: HMTError) -> None:
        """End with an error, which whoever fetches events will see."""
        if not self.finished:
            self.finish_reason = FinishReason.ERROR
            self.events.put(error)

    def cancel(self) -> None:
        """End without a word."""
        if not self.finished:
            self.finish_reason = FinishReason.CANCELLED
            self.events.put(None)

    def _finish_text(
        self,
        token_id: int,
        logprob: TokenLogprob | None,
        reason: FinishReason,
        rest: str,
        before: str = "",
    ) -> None:
        """End after letting go of what the detokenizer and the stop strings still hold."""
        text = before + self.stops.push(rest)
        if self.stops.matched is not None:
            reason = FinishReason.STOP
        else:
            text += self.stops.flush()
        self._finish(token_id, text, logprob, reason)

    def _finish(
        self, token_id: int, text: str, logprob: TokenLogprob | None, reason: FinishReason
    ) -> None:
        self.finish_reason = reason
        self.events.put(TokenEvent(token_id, text, logprob, reason, self.stops.matched))

"""One request while it runs: its tokens, its place in the KV cache, and what it has produced."""

import itertools
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hmt.base.errors import HMTError, NumericsError, RequestError
from hmt.base.log import logger
from hmt.contracts.request import (
    FinishReason,
    PromptEvent,
    Request,
    TokenEvent,
    TokenLogprob,
)
from hmt.engine.scheduling.prompt_outputs import EmbeddingPool
from hmt.engine.scheduling.sampler import SamplerState, logprob_of, not_finite
from hmt.kernels import ops
from hmt.kernels.ops import LogitStats
from hmt.text import Constraint, StopStrings, TextStream, ThoughtLimit

_numbers = itertools.count(1)


class TokenListener(Protocol):
    """Who is told what becomes of a request."""

    def put(self, event: TokenEvent | PromptEvent | HMTError | None, /) -> None:
        """A token, the last with a finish reason; or the error that ended it; None: cancelled.

        Before the first token what was asked of the prompt, if anything was.

        On the engine's thread: it must neither wait nor raise.
        """
        ...


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """What is behind a prompt of which there are several answers: all of these begin with it.

    logits   f32 [vocab], where the model computes
    known    what `ops.survey` says of them, where that is known
    """

    logits: torch.Tensor
    known: LogitStats | None


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one request.  Only the engine's thread changes it.

    tokens            prompt and answer so far
    max_total_tokens  positions of KV that prompt and answer may take
    computed          tokens whose KV has been written
    prefill_tokens    tokens that are computed in chunks, like a prompt: that, and of a sequence
                      that was sent back and has to begin again what it had answered
    eos_ids           tokens that end the answer
    whole             tokens whose rotary positions go by their number: the prompt, and of a
                      sequence that has crossed a `RotaryBorder` all that it had then
    kv                handle in the KV cache; None while it has nothing there
    reserved_tokens   positions that are reserved for it
    preemptions       times that it had begun and others needed its place or its room
    prefix_leader     another of the same prompt, whose keys and values are to be shared once
                      computed
    prompt_end        what `scheduler.fork` was told of the prompt that `kv` begins with, while
                      others of the same prompt can begin with it, too
    constraint        what holds the answer to the form that was asked for, or its reasoning to a
                      length
    listener          who is told of tokens and of the end
    scores            of the prompt's tokens from the second on, as far as computed; None: not
                      wanted
    pool              of its hidden states, likewise
    unsettled         the last token's event, until `constraint` knows whether it ends the answer
    cached_tokens     positions whose keys and values were there when it began to run
    submitted_s, admitted_s   time.perf_counter() when it was made, and when it began to run
    deadline_s        time.monotonic() at which it fails if it has not ended; None: never
    """

    request: Request
    tokens: list[int]
    prompt_tokens: int
    max_total_tokens: int
    sampler: SamplerState
    text: TextStream
    stops: StopStrings
    eos_ids: frozenset[int]
    listener: TokenListener
    constraint: Constraint | ThoughtLimit | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    computed: int = 0
    prefill_tokens: int = field(init=False)
    whole: int = field(init=False)
    kv: int | None = None
    reserved_tokens: int = 0
    preemptions: int = 0
    prefix_leader: "Sequence | None" = None
    prompt_end: PromptEnd | None = None
    finish_reason: FinishReason | None = None
    scores: list[TokenLogprob] | None = None
    pool: EmbeddingPool | None = None
    unsettled: tuple[int, str, TokenLogprob | None] | None = None
    cached_tokens: int = 0
    submitted_s: float = field(default_factory=time.perf_counter)
    admitted_s: float | None = None
    deadline_s: float | None = None
    _others: torch.Tensor | None = None  # tokens that do not end the answer, int64 [n]

    def __post_init__(self) -> None:
        self.prefill_tokens = self.whole = self.prompt_tokens

    @property
    def finished(self) -> bool:
        """True once nothing more will be produced."""
        return self.finish_reason is not None

    @property
    def wants_tokens(self) -> bool:
        """False where only the prompt is computed."""
        return self.max_total_tokens > self.prompt_tokens

    @property
    def has_prompt_outputs(self) -> bool:
        """Whether something was asked of the prompt that is not told yet."""
        return self.scores is not None or self.pool is not None

    def prompt_output_rows(self, first: int, count: int) -> tuple[int, int]:
        """Of `count` tokens from position `first` on, rows that are scored, and pooled.

        Those that are scored are the first of them, those that are pooled the last.
        """
        left = self.prompt_tokens - first
        if left <= 0 or not self.has_prompt_outputs:
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
        found = ops.logit_stats(logits)
        if not found.finite:
            self.fail(not_finite(logits))
            return
        del self.scores[position:]  # where it is computed again
        most, token = self.request.prompt_logprobs or 0, self.tokens[position + 1]
        self.scores.append(logprob_of(logits, token, found.log_sum_exp, most))

    def read(self) -> None:
        """The prompt has been computed: tell what was asked of it, and end where that is all."""
        if self.finished or not self.has_prompt_outputs:
            return
        embedding = None if self.pool is None else self.pool.embedding()
        if embedding is not None and not embedding.isfinite().all():
            self.fail(NumericsError("the prompt's hidden states are not all numbers"))
            return
        reason = None if self.wants_tokens else FinishReason.LENGTH
        self.finish_reason = reason
        self.listener.put(PromptEvent(tuple(self.scores or ()), reason, embedding))
        self.scores = self.pool = None

    def advance(self, logits: torch.Tensor, known: LogitStats | None = None) -> None:
        """`accept`, where an error fails the sequence.  Does nothing where it has finished."""
        if self.finished:
            return  # its prompt's logits were none
        try:
            self.accept(logits, known)
        except Exception as error:
            self.fail(told(error))

    def accept(self, logits: torch.Tensor, known: LogitStats | None = None) -> None:
        """Choose the next token from f32 [vocab] logits and add its event.

        known   what `ops.survey` says of them, where somebody has looked already

        With a form that event waits for `settle`.  Raises NumericsError where the logits are not
        numbers, RequestError where the form that was asked for allows nothing more.
        """
        chosen = self.sampler.choose(logits, known, self._allowed(len(logits)))
        self.tokens.append(chosen.token_id)
        logprob = chosen if self.request.sampling.logprobs is not None else None
        if chosen.token_id in self.eos_ids:
            rest = self.text.flush()
            self._finish_text(chosen.token_id, logprob, FinishReason.STOP, rest, ends=True)
            return
        if self.constraint is not None:
            self.constraint.push(chosen.token_id)
        text = self.text.push(chosen.token_id)
        if self._answered >= self.request.min_tokens:
            text = self.stops.push(text)
        if self.stops.matched is not None:
            self._finish(chosen.token_id, text, logprob, FinishReason.STOP)
            return
        self.unsettled = chosen.token_id, text, logprob
        if self.constraint is None:
            self.settle()

    def settle(self) -> None:
        """Add the last token's event; its form, if any, is asked whether it ends the answer.

        Does nothing without one, and once finished.  Waits until the form is ready.  Raises
        RequestError where the form does.
        """
        if self.unsettled is None or self.finished:
            return
        (token_id, text, logprob), self.unsettled = self.unsettled, None
        complete = self.constraint is not None and self.constraint.complete
        if complete or len(self.tokens) == self.max_total_tokens:
            reason = FinishReason.STOP if complete else FinishReason.LENGTH
            self._finish_text(token_id, logprob, reason, self.text.flush(), text)
        else:
            self.listener.put(TokenEvent(token_id, text, logprob))

    @property
    def _answered(self) -> int:
        """Tokens of the answer until now."""
        return len(self.tokens) - self.prompt_tokens

    def _allowed(self, vocab_size: int) -> torch.Tensor | None:
        """Tokens that may come next, int64 [n]; None: any.

        None of those that end the answer while it is shorter than min_tokens, unless the form
        allows nothing else.
        """
        allowed = None if self.constraint is None else self.constraint.allowed()
        if self._answered >= self.request.min_tokens or not self.eos_ids:
            return allowed
        if self._others is None:
            mask = torch.ones(vocab_size, dtype=torch.bool)
            mask[[token for token in self.eos_ids if token < vocab_size]] = False
            self._others = mask.nonzero().flatten()
        if allowed is None:
            return self._others
        longer = allowed[torch.isin(allowed, self._others)]
        return longer if len(longer) else allowed

    def fail(self, error: HMTError) -> None:
        """End with an error, which whoever fetches events will see."""
        if not self.finished:
            self.finish_reason = FinishReason.ERROR
            self.listener.put(error)

    def cancel(self) -> None:
        """End without a word."""
        if not self.finished:
            self.finish_reason = FinishReason.CANCELLED
            self.listener.put(None)

    def _finish_text(
        self,
        token_id: int,
        logprob: TokenLogprob | None,
        reason: FinishReason,
        rest: str,
        before: str = "",
        *,
        ends: bool = False,
    ) -> None:
        """End after letting go of what the detokenizer and the stop strings still hold."""
        text = before + self.stops.push(rest)
        if self.stops.matched is not None:
            reason = FinishReason.STOP
        else:
            text += self.stops.flush()
        self._finish(token_id, text, logprob, reason, ends=ends)

    def _finish(
        self,
        token_id: int,
        text: str,
        logprob: TokenLogprob | None,
        reason: FinishReason,
        *,
        ends: bool = False,
    ) -> None:
        self.finish_reason = reason
        self.listener.put(TokenEvent(token_id, text, logprob, reason, self.stops.matched, ends))


def end_tokens(request: Request, eos_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end the answer to a request; `eos_ids` are the model's own."""
    return frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else eos_ids)


def check_least(request: Request, longest: int) -> None:
    """Raise RequestError unless an answer of `longest` tokens can have min_tokens."""
    least = request.min_tokens
    if type(least) is not int or not 0 <= least <= longest:
        raise RequestError(
            f"min_tokens is {least!r}; the answer has {longest} tokens at most: give an integer "
            f"from 0 to {longest}, or a larger max_new_tokens"
        )


def told(error: Exception) -> HMTError:
    """What the owner of a request is told.  An error of our own making is also logged."""
    if isinstance(error, HMTError):
        return error
    logger.error("a step failed for a reason that HMT does not know", exc_info=error)
    return HMTError(f"internal error, please report it: {error!r}")

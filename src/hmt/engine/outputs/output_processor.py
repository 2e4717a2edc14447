"""What becomes of one request's logits: a token, text, and an event for who listens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from hmt.base.errors import HMTError, NumericsError, RequestError
from hmt.base.log import logger
from hmt.contracts.request import FinishReason, PromptEvent, Request, TokenEvent, TokenLogprob
from hmt.contracts.step import SchedulerOutput
from hmt.engine.outputs.prompt_outputs import EmbeddingPool, PromptOutputSource
from hmt.engine.outputs.sampler import SamplerState, logprob_of, not_finite
from hmt.engine.scheduling.sequence import SequenceState
from hmt.kernels import ops
from hmt.kernels.ops import LogitStats
from hmt.text import Constraint, StopStrings, TextStream, ThoughtLimit


class TokenListener(Protocol):
    """Who is told what becomes of a request."""

    def put(self, event: TokenEvent | PromptEvent | HMTError | None, /) -> None:
        """A token, the last with a finish reason; or the error that ended it; None: cancelled.

        Before the first token what was asked of the prompt, if anything was.

        On the engine's thread: it must neither wait nor raise.
        """
        ...


@dataclass(eq=False, slots=True)
class OutputProcessor:
    """Sampler, detokeniser, stop strings, grammar and listener of one request.

    Appends the tokens that it chooses to `state`, and ends it.  Only for the engine's thread.

    eos_ids      tokens that end the answer
    constraint   what holds the answer to the form that was asked for, or its reasoning to a length
    listener     who is told of tokens and of the end
    scores       of the prompt's tokens from the second on, as far as computed; None: not wanted
    pool         of its hidden states, likewise
    unsettled    the last token's event, until `constraint` knows whether it ends the answer
    """

    state: SequenceState
    request: Request
    sampler: SamplerState
    text: TextStream
    stops: StopStrings
    eos_ids: frozenset[int]
    listener: TokenListener
    constraint: Constraint | ThoughtLimit | None = None
    scores: list[TokenLogprob] | None = None
    pool: EmbeddingPool | None = None
    unsettled: tuple[int, str, TokenLogprob | None] | None = None
    _other_ids: torch.Tensor | None = None  # tokens that do not end the answer, int64 [n]

    def score(self, position: int, logits: torch.Tensor) -> None:
        """Score the prompt token behind `position` by logits f32 [vocab].

        Fails the sequence where they are not numbers.
        """
        if self.state.finished or self.scores is None:
            return
        stats = ops.logit_stats(logits)
        if not stats.finite:
            self.state.fail(not_finite(logits))
            return
        del self.scores[position:]  # where it is computed again
        most, token = self.request.prompt_logprobs or 0, self.state.tokens[position + 1]
        self.scores.append(logprob_of(logits, token, stats.log_sum_exp, most))

    def prompt_computed(self) -> None:
        """Tell what was asked of the prompt, and end where that is all."""
        state = self.state
        if state.finished or not state.has_prompt_outputs:
            return
        embedding = None if self.pool is None else self.pool.embedding()
        if embedding is not None and not embedding.isfinite().all():
            state.fail(NumericsError("the prompt's hidden states are not all numbers"))
            return
        reason = None if state.wants_tokens else FinishReason.LENGTH
        state.finish_reason = reason
        self.listener.put(PromptEvent(tuple(self.scores or ()), reason, embedding))
        self.scores = self.pool = None
        state.scores_prompt, state.pooling = False, None

    def advance(self, logits: torch.Tensor, known: LogitStats | None = None) -> None:
        """`accept`, where an error fails the sequence.  Does nothing where it has finished."""
        if self.state.finished:
            return  # its prompt's logits were none
        try:
            self.accept(logits, known)
        except Exception as error:
            self.state.fail(reported(error))

    def accept(self, logits: torch.Tensor, known: LogitStats | None = None) -> None:
        """Choose the next token from f32 [vocab] logits and add its event.

        known   what `ops.logit_stats` says of them, where that is computed already

        With a form that event waits for `settle`.  Raises NumericsError where the logits are not
        numbers, RequestError where the form that was asked for allows nothing more.
        """
        chosen = self.sampler.choose(logits, known, self._allowed(len(logits)))
        self.state.tokens.append(chosen.token_id)
        logprob = chosen if self.request.sampling.logprobs is not None else None
        if chosen.token_id in self.eos_ids:
            rest = self.text.flush()
            self._finish_text(chosen.token_id, logprob, FinishReason.STOP, rest, ends=True)
            return
        if self.constraint is not None:
            self.constraint.push(chosen.token_id)
        text = self.text.push(chosen.token_id)
        if self.state.answered >= self.request.min_tokens:
            text = self.stops.push(text)
        if self.stops.matched is not None:
            self._finish(chosen.token_id, text, logprob, FinishReason.STOP)
            return
        self.unsettled, self.state.is_unsettled = (chosen.token_id, text, logprob), True
        if self.constraint is None:
            self.settle()

    def settle(self) -> None:
        """Add the last token's event; its form, if any, is asked whether it ends the answer.

        Does nothing without one, and once finished.  Waits until the form is ready.  Raises
        RequestError where the form does.
        """
        if self.unsettled is None or self.state.finished:
            return
        (token_id, text, logprob), self.unsettled = self.unsettled, None
        self.state.is_unsettled = False
        complete = self.constraint is not None and self.constraint.complete
        if complete or len(self.state.tokens) == self.state.max_total_tokens:
            reason = FinishReason.STOP if complete else FinishReason.LENGTH
            self._finish_text(token_id, logprob, reason, self.text.flush(), text)
        else:
            self.listener.put(TokenEvent(token_id, text, logprob))

    def ended(self) -> None:
        """The sequence has ended: tell of an error, or that it was cancelled."""
        if self.state.error is not None:
            self.listener.put(self.state.error)
        elif self.state.finish_reason is FinishReason.CANCELLED:
            self.listener.put(None)

    def _allowed(self, vocab_size: int) -> torch.Tensor | None:
        """Tokens that may come next, int64 [n]; None: any.

        None of those that end the answer while it is shorter than min_tokens, unless the form
        allows nothing else.
        """
        allowed = None if self.constraint is None else self.constraint.allowed()
        if self.state.answered >= self.request.min_tokens or not self.eos_ids:
            return allowed
        if self._other_ids is None:
            mask = torch.ones(vocab_size, dtype=torch.bool)
            mask[[token for token in self.eos_ids if token < vocab_size]] = False
            self._other_ids = mask.nonzero().flatten()
        if allowed is None:
            return self._other_ids
        longer = allowed[torch.isin(allowed, self._other_ids)]
        return longer if len(longer) else allowed

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
        """End after letting go of what the detokeniser and the stop strings still hold."""
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
        self.state.finish_reason = reason
        self.listener.put(TokenEvent(token_id, text, logprob, reason, self.stops.matched, ends))


class PromptOutputRows(PromptOutputSource):
    """Gives a step's rows to the requests that they are of."""

    def __init__(self, output: SchedulerOutput, processors: Mapping[int, OutputProcessor]) -> None:
        """`processors` by number of the request."""
        self._scored, self._pooled = output.scored, output.pooled
        self._processors = processors

    def logits(self, first: int, logits: torch.Tensor) -> None:
        """Score the prompt tokens behind the rows from `first` on."""
        rows = self._scored[first : first + len(logits)]
        for row, (request, position) in zip(logits, rows, strict=True):
            self._processors[request].score(position, row)

    def hidden(self, first: int, hidden: torch.Tensor) -> None:
        """Add the rows from `first` on to embeddings."""
        rows = self._pooled[first : first + len(hidden)]
        for row, (request, position) in zip(hidden, rows, strict=True):
            if (pool := self._processors[request].pool) is not None:
                pool.add(position, row)


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


def reported(error: Exception) -> HMTError:
    """What the owner of a request is told.  An error of our own making is also logged."""
    if isinstance(error, HMTError):
        return error
    logger.error("a step failed for a reason that HMT does not know", exc_info=error)
    return HMTError(f"internal error, please report it: {error!r}")

"""Beam search: of all answers to a prompt, some that are likely as a whole."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch

from hmt.base.errors import BudgetError
from hmt.contracts.model import PAGE_TOKENS, RotaryBorder
from hmt.contracts.request import Completion, FinishReason
from hmt.contracts.step import SegmentRequest
from hmt.engine.outputs.sampler import not_finite
from hmt.engine.scheduling.kv_operations import KVOperationLog
from hmt.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer: its tokens, the sum of their log-probabilities, and whether it ended by itself."""

    tokens: tuple[int, ...]
    sum: float
    ended: bool

    def score(self, length_penalty: float) -> float:
        """By which answers of different lengths are compared."""
        return self.sum / float(len(self.tokens) ** length_penalty)

    def completion(
        self, tokenizer: Tokenizer, prompt_tokens: int, length_penalty: float
    ) -> Completion:
        """The answer as text; its end token is none of it."""
        return Completion(
            text=tokenizer.decode(self.tokens[:-1] if self.ended else self.tokens),
            token_ids=self.tokens,
            finish_reason=FinishReason.STOP if self.ended else FinishReason.LENGTH,
            prompt_tokens=prompt_tokens,
            score=self.score(length_penalty),
        )


@dataclass(slots=True)
class _Beam:
    """The beginning of an answer, and where its keys and values are."""

    tokens: tuple[int, ...]
    sum: float
    kv: int


class BeamSearch:
    """Grows a number of beginnings by one token at a time and keeps the likeliest.

    Each step, the twice as many likeliest continuations of all beams are looked at, best first:
    those that end are answers if they are among the first `beams`, and the first others go on.  It
    is over when no beam can become better than all answers there are, were it to end now, or at the
    greatest length.  (transformers' generate with num_beams and early_stopping=False.)

    What beams have in common they share: a beam that goes on in two ways is forked, and whole pages
    stay where they are.  Only for the engine's thread.
    """

    def __init__(
        self,
        kv: KVOperationLog,
        run: Callable[[Many[SegmentRequest], bool], torch.Tensor],
        prompt: Many[int],
        *,
        beams: int,
        new_tokens: int,
        eos_ids: Iterable[int],
        length_penalty: float,
        chunk: int,
        border: RotaryBorder | None = None,
        token_window: int = 0,
        adapter: int = 0,
    ) -> None:
        """Reserves what all beams may take.

        run      logits of a step of these segments, on any device; told whether it is of the prompt
        border, token_window   of the model
        adapter  number of the low-rank adapter that all beams are computed with; 0: none

        Raises BudgetError where the cache has no room for all beams.
        """
        self._kv, self._run = kv, run
        self._prompt = tuple(prompt)
        self._count = beams
        self._most = new_tokens
        self._eos = torch.tensor(sorted(eos_ids), dtype=torch.int64)
        self._penalty = length_penalty
        self._chunk = chunk
        self._border, self._token_window = border, token_window
        self._adapter = adapter
        self._whole = len(self._prompt)
        self._positions = len(self._prompt) + new_tokens
        self._computed = 0
        self._found: list[Hypothesis] = []
        self._beams: list[_Beam] = []
        self._reserved: list[int] = []  # for the beams that fork once the prompt is computed
        self._reserve()

    def advance(self) -> bool:
        """One step; whether another is needed.  Raises what the step raises, and NumericsError."""
        if (left := len(self._prompt) - self._computed) > 0:
            logits = self._read_prompt(min(left, self._chunk))
        else:
            logits = self._decode()
        if self._computed < len(self._prompt):
            return True
        self._grow(self._likeliest(logits.float().cpu()))
        return not self._over()

    def results(self) -> list[Hypothesis]:
        """The answers, best first: as many as there were beams."""
        going = [Hypothesis(beam.tokens, beam.sum, ended=False) for beam in self._beams]
        every = [*self._found, *(going if self._length == self._most else ())]
        return sorted(every, key=self._score, reverse=True)[: self._count]

    def close(self) -> None:
        """Give all positions back."""
        self._give_up_reserve()
        while self._beams:
            self._kv.close(self._beams.pop().kv)

    @property
    def _length(self) -> int:
        """Of answers so far."""
        return len(self._beams[0].tokens) if self._beams else self._most

    def _reserve(self) -> None:
        own = self._positions - len(self._prompt) // PAGE_TOKENS * PAGE_TOKENS
        try:
            self._beams = [_Beam((), 0.0, self._kv.open(self._positions))]
            for _ in range(self._count - 1):
                self._reserved.append(self._kv.open(own))
        except BudgetError as error:
            self.close()
            raise BudgetError(
                f"{self._count} beams of {self._most} tokens after a prompt of "
                f"{len(self._prompt)} find no room: {error}; or ask for fewer beams"
            ) from error

    def _give_up_reserve(self) -> None:
        while self._reserved:
            self._kv.close(self._reserved.pop())

    def _read_prompt(self, count: int) -> torch.Tensor:
        first = self._computed
        tokens = list(self._prompt[first : first + count])
        last = first + count == len(self._prompt)
        logits = self._run([self._part(self._beams[0], first, tokens, last)], True)
        self._computed += count
        return logits

    def _decode(self) -> torch.Tensor:
        first = len(self._prompt) + self._length - 1
        border = self._border
        if border is not None and not border.gradual and self._whole <= border.positions <= first:
            return self._begin_again(first + 1)
        parts = [self._part(beam, first, [beam.tokens[-1]], last=True) for beam in self._beams]
        return self._run(parts, False)

    def _begin_again(self, whole: int) -> torch.Tensor:
        """Compute prompt and beams anew for so many positions, beyond the rotary border.

        Logits of the beams' last tokens.  Their pages are free meanwhile, and no other sequence
        takes any.
        """
        beams, count = self._beams, len(self._prompt)
        while self._beams:
            self._kv.close(self._beams[-1].kv)
            self._beams = self._beams[:-1]
        self._whole, self._computed = whole, 0
        self._beams = [replace(beams[0], kv=self._kv.open(self._positions))]
        while self._computed < count:
            self._read_prompt(min(count - self._computed, self._chunk))
        for beam in beams[1:]:
            kv = self._kv.fork(self._beams[0].kv, count, self._positions)
            self._beams = [*self._beams, replace(beam, kv=kv)]
        step = max(1, self._chunk // len(beams))
        for first in range(count, whole, step):
            last = first + step >= whole
            tokens = slice(first - count, first - count + step)
            parts = [self._part(b, first, list(b.tokens[tokens]), last) for b in self._beams]
            logits = self._run(parts, False)
        return logits

    def _part(self, beam: _Beam, first: int, tokens: list[int], last: bool) -> SegmentRequest:
        count = min(first, self._token_window)
        text = (*self._prompt, *beam.tokens)
        return SegmentRequest(
            beam.kv, first, tokens, int(last), self._positions, whole=self._whole,
            preceding=text[first - count : first], adapter=self._adapter,
        )  # fmt: skip

    def _likeliest(self, logits: torch.Tensor) -> list[tuple[int, int, float]]:
        """(beam, token, sum) of the best continuations, best first, by logits [beams, vocab]."""
        normal = logits.log_softmax(-1)
        if not bool(logits.isfinite().all()):
            raise not_finite(logits)
        sums = normal.double() + torch.tensor([[beam.sum] for beam in self._beams])
        best, places = sums.flatten().topk(min(2 * self._count, sums.numel()))
        vocab = logits.shape[-1]
        return [
            (place // vocab, place % vocab, total)
            for place, total in zip(places.tolist(), best.tolist(), strict=True)
        ]

    def _grow(self, likeliest: list[tuple[int, int, float]]) -> None:
        """Keep answers that end, and let the beams be the best of those that do not."""
        going: list[tuple[int, int, float]] = []
        for rank, (parent, token, total) in enumerate(likeliest):
            if not bool((self._eos == token).any()):
                going.append((parent, token, total))
            elif rank < self._count:
                tokens = (*self._beams[parent].tokens, token)
                self._found.append(Hypothesis(tokens, total, ended=True))
            if len(going) == self._count:
                break
        self._found = sorted(self._found, key=self._score, reverse=True)[: self._count]
        self._follow(going)

    def _follow(self, going: list[tuple[int, int, float]]) -> None:
        """Make the beams that `going` names: a parent's first child has its place, others fork."""
        parents, held = self._beams, len(self._prompt) + self._length
        self._give_up_reserve()
        wanted = {parent for parent, _, _ in going}
        self._beams = []
        for number, parent in enumerate(parents):
            if number in wanted:
                self._beams.append(parent)
            else:
                self._kv.close(parent.kv)
        kept, taken = list(self._beams), set[int]()
        children = []
        for number, token, total in going:
            parent = parents[number]
            kv = parent.kv
            if number in taken:
                kv = self._kv.fork(parent.kv, held, self._positions)
                # Until all are made, what is to be closed after an error is in `_beams`.
                kept.append(_Beam(parent.tokens, parent.sum, kv))
                self._beams = kept
            taken.add(number)
            children.append(_Beam((*parent.tokens, token), total, kv))
        self._beams = children

    def _over(self) -> bool:
        if not self._beams or self._length == self._most:
            return True
        if len(self._found) < self._count:
            return False
        best = max(self._beams, key=lambda beam: beam.sum)
        now = Hypothesis(best.tokens, best.sum, ended=False)
        return self._score(self._found[-1]) >= self._score(now)

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.score(self._penalty)

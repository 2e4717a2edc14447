"""Choosing the next token of one request: penalties, temperature, truncation, the draw.

The order is that of transformers: repetition penalty, then OpenAI's frequency and presence
penalties, temperature, top-k, top-p of what top-k left, min-p.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch

from hmt.base.errors import NumericsError, RequestError
from hmt.contracts.request import Sampling, TokenLogprob

MAX_LOGPROBS: Final = 20  # as OpenAI
NUCLEUS_GUESS: Final = 1024  # to sort these instead of 129k tokens takes 0.4 ms, not 9


class SamplerState:
    """What choosing tokens for one request needs to remember.

    Its random numbers are its own, so that neither its neighbours in the batch nor their order
    change its tokens.  Not for use by several threads at once.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        """Raises RequestError as `validate` does."""
        validate(sampling)
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._seen = set(prompt_ids)  # in the prompt or in the output
        self._counts: Counter[int] = Counter()  # times in the output

    def choose(self, logits: torch.Tensor) -> TokenLogprob:
        """The next token by `logits` f32 [vocab], which are not changed.

        Counts the token for later penalties and, where it draws, advances the random numbers by
        one.  Log-probabilities are those of the model itself: of the logits before any penalty,
        temperature or truncation (vLLM's raw_logprobs); `top` is empty unless the request asked
        for it.  Raises NumericsError where a logit is not finite.
        """
        logits = logits.cpu()
        _check_finite(logits)
        scores = self._penalised(logits)
        if self._sampling.temperature == 0:
            token_id = int(scores.argmax())  # the first of equal ones
        else:
            token_id = self._draw((scores - scores.max()) / self._sampling.temperature)
        self._seen.add(token_id)
        self._counts[token_id] += 1
        return _logprob(logits, token_id, self._sampling.logprobs or 0)

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after the three penalties: f32 [vocab]."""
        sampling, scores = self._sampling, logits
        if self._seen is not None:
            # Keskar et al., CTRL (2019), section 4.1, with transformers' treatment of the sign.
            penalty = sampling.repetition_penalty
            penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(self._seen, penalised, scores)
        if self._counts is not None:
            scores = scores - sampling.frequency_penalty * self._counts
            scores = scores - sampling.presence_penalty * (self._counts > 0)
        return scores

    def _draw(self, scores: torch.Tensor) -> int:
        """A token by scores f32 [vocab], of which the largest is 0, from one random number."""
        ids = _support(scores, self._sampling)
        cumulated = scores[ids].exp().cumsum(0, dtype=torch.float64)
        point = torch.rand((), dtype=torch.float64, generator=self._generator) * cumulated[-1]
        index = int(torch.searchsorted(cumulated, point, right=True))
        return int(ids[min(index, len(ids) - 1)])  # the product may round up to the last sum


def validate(sampling: Sampling) -> None:
    """Check the ranges of all fields.  Raises RequestError that names the first wrong one."""
    _check_number("temperature", sampling.temperature, sampling.temperature >= 0, "at least 0")
    _check_number("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1")
    _check_number("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 to 1")
    penalty = sampling.repetition_penalty
    _check_number("repetition_penalty", penalty, penalty > 0, "above 0")
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(sampling, name)
        _check_number(name, value, -2 <= value <= 2, "from -2 to 2")
    _check_integer("top_k", sampling.top_k, 0, (1 << 31) - 1)
    if sampling.seed is not None:
        _check_integer("seed", sampling.seed, -(1 << 63), (1 << 63) - 1)
    if sampling.logprobs is not None:
        _check_integer("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)


def _check_number(name: str, value: float, fits: bool, wanted: str) -> None:
    if not fits or not math.isfinite(value):
        raise RequestError(f"{name} is {value}; give a finite number {wanted}")


def _check_integer(name: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise RequestError(f"{name} is {value!r}; give an integer from {least} to {most}")


def _check_finite(logits: torch.Tensor) -> None:
    extremes = torch.stack(logits.aminmax())  # one pass; NaN and infinities show in them
    if not extremes.isfinite().all():
        nans, infinities = int(logits.isnan().sum()), int(logits.isinf().sum())
        raise NumericsError(
            f"of {logits.numel()} logits {nans} are NaN and {infinities} infinite: check that the "
            "checkpoint is undamaged, and run with bfloat16 or float32 activations (float16 "
            "overflows above 65504)"
        )


def _support(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Tokens that may be drawn, int64 [n], by scores f32 [vocab] of which the largest is 0."""
    ids = torch.arange(len(scores))
    if 0 < sampling.top_k < len(scores):
        ids = _largest(scores, sampling.top_k)
    if sampling.top_p < 1:
        ids = ids[_nucleus(scores[ids], sampling.top_p)]
    if sampling.min_p > 0:  # Nguyen et al., Min-p Sampling (2024): relative to the likeliest
        ids = ids[scores[ids] >= math.log(sampling.min_p)]
    return ids


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest and of those equal to the last, int64 [n].

    Largest first, equal ones by index: topk alone promises no order among these.
    """
    least = scores.topk(count).values[-1]
    ids = (scores >= least).nonzero().flatten()
    return ids[scores[ids].argsort(descending=True, stable=True)]


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices of the fewest largest that hold `top_p` of the probability.

    Holtzman et al., The Curious Case of Neural Text Degeneration (2019).
    """
    needed = top_p * scores.exp().sum(dtype=torch.float64)
    for count in (min(NUCLEUS_GUESS, len(scores)), len(scores)):
        ids = _largest(scores, count)
        weights = scores[ids].exp().double()
        inside = weights.cumsum(0) - weights < needed
        if not inside[-1]:
            break
    return ids[inside]


def _logprob(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprob:
    """Natural log-probabilities of the token and of the `count` likeliest, by raw logits."""
    total = torch.logsumexp(logits.double(), 0)
    ids = _largest(logits, min(count, len(logits)))[:count] if count else logits.new_empty(0)
    top = tuple((int(index), float(logits[index] - total)) for index in ids)
    return TokenLogprob(token_id, float(logits[token_id] - total), top)

"""Choosing the next token of one request: penalties, temperature, truncation, the draw.

The order is that of transformers: repetition penalty, then OpenAI's frequency and presence
penalties, temperature, top-k, top-p of what top-k left, min-p.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch

from hmt.base.errors import NumericsError, RequestError
from hmt.contracts.request import Sampling, TokenLogprob

MAX_LOGPROBS: Final = 20  # as OpenAI


class SamplerState:
    """What choosing tokens for one request needs to remember.

    Its random numbers are its own, so that neither its neighbours in the batch nor their order
    change its tokens.  Not for use by several threads at once.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        """`prompt_ids` are below the logits' width.  Raises RequestError as `validate` does."""
        validate(sampling)
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._prompt = torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64)
        self._output: Counter[int] = Counter()

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
        self._output[token_id] += 1
        return _logprob(logits, token_id, self._sampling.logprobs or 0)

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after the three penalties: f32 [vocab]."""
        sampling, scores = self._sampling, logits
        output = torch.tensor(list(self._output), dtype=torch.int64)
        if sampling.repetition_penalty != 1:
            # Keskar et al., CTRL (2019), section 4.1, with transformers' treatment of the sign.
            seen = torch.cat((self._prompt, output))
            values, penalty = scores[seen], sampling.repetition_penalty
            values = torch.where(values < 0, values * penalty, values / penalty)
            scores = scores.index_put((seen,), values)
        if sampling.frequency_penalty or sampling.presence_penalty:
            times = torch.tensor(list(self._output.values()), dtype=torch.float32)
            penalties = sampling.frequency_penalty * times + sampling.presence_penalty
            scores = scores.index_put((output,), -penalties, accumulate=True)
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
    _check_number("temperature", sampling.temperature, 0)
    _check_number("top_p", sampling.top_p, 0, 1, above=True)
    _check_number("min_p", sampling.min_p, 0, 1)
    _check_number("repetition_penalty", sampling.repetition_penalty, 0, above=True)
    _check_number("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _check_number("presence_penalty", sampling.presence_penalty, -2, 2)
    _check_integer("top_k", sampling.top_k, 0, (1 << 31) - 1)
    if sampling.seed is not None:
        _check_integer("seed", sampling.seed, -(1 << 63), (1 << 63) - 1)
    if sampling.logprobs is not None:
        _check_integer("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)


def _check_number(
    name: str, value: object, least: int, most: float = sys.float_info.max, *, above: bool = False
) -> None:
    """`value` must be from `least` to `most`; with `above`, not equal to `least`."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not least <= value <= most
        or (above and value == least)
    ):
        bounds = f"{'above' if above else 'of at least'} {least}"
        limit = f" and at most {most}" if most < sys.float_info.max else ""
        raise RequestError(f"{name} is {value!r}; give a finite number {bounds}{limit}")


def _check_integer(name: str, value: object, least: int, most: int) -> None:
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
    """Indices of the `count` largest and of those equal to the last, int64 [n], largest first."""
    if count >= len(scores):
        return _descending(scores, torch.arange(len(scores)))
    least = scores.topk(count).values[-1]
    return _descending(scores, (scores >= least).nonzero().flatten())


def _descending(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Ascending `ids` sorted by score, largest first, equal ones by id (topk promises no order)."""
    return ids[scores[ids].argsort(descending=True, stable=True)]


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices of the fewest largest that hold `top_p` of the probability.

    Holtzman et al., The Curious Case of Neural Text Degeneration (2019).
    """
    weights = scores.exp()
    total = float(weights.sum(dtype=torch.float64))
    # All below this bound together hold less than 1 - top_p, so only the others need sorting.
    bound = total * (1 - top_p) / len(weights)
    ids = _descending(weights, (weights >= bound).nonzero().flatten())
    held = weights[ids].double()
    return ids[held.cumsum(0) - held < top_p * total]


def _logprob(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprob:
    """Natural log-probabilities of the token and of the `count` likeliest, by raw logits."""
    total = torch.logsumexp(logits, 0)
    ids = _largest(logits, count)[:count].tolist() if count else []
    top = tuple((index, float(logits[index] - total)) for index in ids)
    return TokenLogprob(token_id, float(logits[token_id] - total), top)

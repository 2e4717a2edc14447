"""Choosing the next token of one request: biases, penalties, temperature, truncation, the draw.

The order is that of transformers: biases, repetition penalty, then OpenAI's frequency and presence
penalties, temperature, top-k, top-p of what top-k left, min-p.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch

from hmt.base.errors import NumericsError, RequestError
from hmt.contracts.request import Sampling, TokenLogprob
from hmt.kernels import ops

MAX_LOGPROBS: Final = 20  # as OpenAI
MAX_LOGIT_BIAS: Final = 100  # the same


class SamplerState:
    """What choosing tokens for one request needs to remember.

    Its random numbers are its own, so that neither its neighbours in the batch nor their order
    change its tokens.  Not for use by several threads at once.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        """`prompt_ids` are below the logits' width, biased ones too.  Raises as `validate` does."""
        validate(sampling)
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._prompt = torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64)
        self._output: Counter[int] = Counter()
        ids, biases = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
        self._biases = torch.tensor(ids, dtype=torch.int64), torch.tensor(biases)

    def choose(
        self,
        logits: torch.Tensor,
        known: ops.LogitStats | None = None,
        allowed: torch.Tensor | None = None,
    ) -> TokenLogprob:
        """The next token by `logits` f32 [vocab], which are not changed; `known` is their survey.

        allowed   ids of the tokens that it may be, int64 [n]; None: any

        Counts the token for later penalties and, where it draws, advances the random numbers by
        one.  Log-probabilities are those of the model itself: of the logits before any penalty,
        temperature or truncation (vLLM's raw_logprobs); `top` is empty unless the request asked
        for it.  Raises NumericsError where a logit is not finite.
        """
        logits = logits.cpu()
        found = known or ops.logit_stats(logits)
        if not found.finite:
            raise not_finite(logits)
        scores = self._penalised(logits)
        if allowed is not None:
            scores = scores[allowed]
            draws = self._sampling.temperature != 0
            token_id = int(allowed[self._draw(scores) if draws else int(scores.argmax())])
        elif self._sampling.temperature != 0:
            token_id = self._draw(scores)
        elif scores is logits:
            token_id = found.best
        else:
            token_id = int(scores.argmax())  # the first of equal ones
        self._output[token_id] += 1
        return logprob_of(logits, token_id, found.log_sum_exp, self._sampling.logprobs or 0)

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after biases and the three penalties: f32 [vocab]."""
        sampling, scores = self._sampling, logits
        if sampling.logit_bias:
            ids, biases = self._biases
            scores = scores.index_put((ids,), biases, accumulate=True)
        counts = sampling.frequency_penalty or sampling.presence_penalty
        if sampling.repetition_penalty == 1 and not counts:
            return scores
        output = torch.tensor(list(self._output), dtype=torch.int64)
        if sampling.repetition_penalty != 1:
            # Keskar et al., CTRL (2019), section 4.1, with transformers' treatment of the sign.
            seen = torch.cat((self._prompt, output))
            values, penalty = scores[seen], sampling.repetition_penalty
            values = torch.where(values < 0, values * penalty, values / penalty)
            scores = scores.index_put((seen,), values)
        if counts:
            times = torch.tensor(list(self._output.values()), dtype=torch.float32)
            penalties = sampling.frequency_penalty * times + sampling.presence_penalty
            scores = scores.index_put((output,), -penalties, accumulate=True)
        return scores

    def _draw(self, scores: torch.Tensor) -> int:
        """A token by scores f32 [vocab], from one random number."""
        sampling = self._sampling
        uniform = torch.rand((), dtype=torch.float64, generator=self._generator).item()
        return ops.draw(
            scores, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, uniform
        )


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
    for token, bias in sampling.logit_bias:
        _check_integer("a token of logit_bias", token, 0, (1 << 31) - 1)
        _check_number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if sampling.logprobs is not None:
        check_logprobs("logprobs", sampling.logprobs)


def check_logprobs(name: str, value: object) -> None:
    """Raise RequestError unless so many can be reported."""
    _check_integer(name, value, 0, MAX_LOGPROBS)


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


def not_finite(logits: torch.Tensor) -> NumericsError:
    """What to raise for logits that are not all numbers."""
    nans, infinities = int(logits.isnan().sum()), int(logits.isinf().sum())
    return NumericsError(
        f"of {logits.numel()} logits {nans} are NaN and {infinities} infinite: check that the "
        "checkpoint is undamaged, and run with bfloat16 or float32 activations (float16 "
        "overflows above 65504)"
    )


def logprob_of(logits: torch.Tensor, token_id: int, log_sum_exp: float, count: int) -> TokenLogprob:
    """Natural log-probabilities of a token and of the `count` likeliest, by raw logits [vocab]."""
    ids = ops.largest(logits, count).tolist() if count else []
    top = tuple((index, float(logits[index]) - log_sum_exp) for index in ids)
    return TokenLogprob(token_id, float(logits[token_id]) - log_sum_exp, top)

"""Choosing a token by its score: what may be drawn, and the draw."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class LogitStats(NamedTuple):
    """What is known of logits [vocab] after one look.

    finite        all of them are; otherwise nothing else is meant
    best          the first of the largest
    log_sum_exp   natural logarithm of the sum of their exponentials
    """

    finite: bool
    best: int
    log_sum_exp: float


def logit_stats(logits: Tensor) -> LogitStats:
    """Of logits f32 [vocab]."""
    finite = bool(torch.stack(logits.aminmax()).isfinite().all())  # NaN and infinities show
    return LogitStats(finite, int(logits.argmax()), float(torch.logsumexp(logits.double(), 0)))


def draw(
    scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """A token by scores f32 [vocab], with probability proportional to e^(score / temperature).

    Among those that `support` leaves.  `uniform`, in [0, 1), is a place in their cumulated weights
    (f64), in the order of `support`.
    """
    scores = (scores - scores.max()) / temperature
    ids = support(scores, top_k, top_p, min_p)
    cumulated = scores[ids].exp().cumsum(0, dtype=torch.float64)
    point = uniform * cumulated[-1]
    index = int(torch.searchsorted(cumulated, point, right=True))
    return int(ids[min(index, len(ids) - 1)])  # the product may round up to the last sum


def support(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Tokens that may be drawn, int64 [n], by scores f32 [vocab] of which the largest is 0.

    The top_k largest (0 for all) and those equal to the last of them; of these the fewest that
    hold top_p of the probability; of these the ones at least min_p times as likely as the
    likeliest.  Largest first and equal ones by id; by id alone without top_k and top_p.
    """
    ids = torch.arange(len(scores))
    if 0 < top_k < len(scores):
        least = scores.topk(top_k).values[-1]
        ids = _descending(scores, (scores >= least).nonzero().flatten())
    if top_p < 1:
        ids = ids[_nucleus(scores[ids], top_p)]
    if min_p > 0:  # Nguyen et al., Min-p Sampling (2024): relative to the likeliest
        ids = ids[scores[ids] >= math.log(min_p)]
    return ids


def largest(scores: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of scores [vocab], int64, largest first, equal ones by id."""
    count = min(count, len(scores))
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    least = scores.topk(count).values[-1]
    return _descending(scores, (scores >= least).nonzero().flatten())[:count]


def _descending(scores: Tensor, ids: Tensor) -> Tensor:
    """Ascending `ids` sorted by score, largest first, equal ones by id (topk promises no order)."""
    return ids[scores[ids].argsort(descending=True, stable=True)]


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
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

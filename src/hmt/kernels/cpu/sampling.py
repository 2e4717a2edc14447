"""Choosing a token through the compiled extension.

The weights of scores are exponentials rounded once from f64, which torch's are too in all but a
few: a draw differs from the reference's where its random number falls between the two sums, which
are some 1e-8 apart.
"""

from types import ModuleType

import torch
from torch import Tensor

from hmt.kernels import reference
from hmt.kernels.reference import LogitStats


def logit_stats(native: ModuleType, logits: Tensor) -> LogitStats:
    """`reference.survey` in one pass."""
    if not _is_plain(logits):
        return reference.logit_stats(logits)
    return LogitStats(*native.survey(logits.data_ptr(), len(logits)))


def draw(
    native: ModuleType,
    scores: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> int:
    """`reference.draw`, which sorts no more than it looks at."""
    if not _is_plain(scores):
        return reference.draw(scores, temperature, top_k, top_p, min_p, uniform)
    token: int = native.draw(
        scores.data_ptr(), len(scores), temperature, top_k, top_p, min_p, uniform
    )
    return token


def largest(native: ModuleType, scores: Tensor, count: int) -> Tensor:
    """`reference.largest` without sorting."""
    if not _is_plain(scores):
        return reference.largest(scores, count)
    ids = torch.empty(min(count, len(scores)), dtype=torch.int64)
    native.largest(scores.data_ptr(), len(scores), len(ids), ids.data_ptr())
    return ids


def _is_plain(scores: Tensor) -> bool:
    return (
        scores.dtype is torch.float32
        and scores.dim() == 1
        and scores.is_contiguous()
        and 0 < len(scores) < 1 << 32
    )

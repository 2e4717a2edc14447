"""What captured steps need besides the layers' operations, in plain torch.

Kernels of a device do it without waiting for the host.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hmt.kernels.reference.attention import merge_attention
from hmt.kernels.reference.kv_pages import AttentionMetadata, PageLayout


def fixed_runs(
    where: torch.device, count: int, tokens: int, context: int, sequences: int = 0
) -> AttentionMetadata | None:
    """Up to `count` runs of up to `tokens` tokens up to `context`, in tensors that stay there.

    sequences   that they are of, where several may be neighbouring tokens of one; else 0

    None: plain torch reads runs from Python's own objects.
    """
    return None


def single_tokens() -> AbstractContextManager[None]:
    """In the body, each token of a step is computed as if it were alone, to the bit.

    Plain torch does nothing about that.
    """
    return nullcontext()


def combine_parts(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, joined: Tensor
) -> None:
    """Write attention over the positions of two parts to `joined`, and let `lse` be of both.

    out, other_out   f32 [tokens, q_heads, value_dim], with lse and other_lse f32 [tokens, q_heads];
            the others may lie in host memory that was pinned
    joined  of any float dtype

    On the device's queue.
    """
    other = other_out.to(out.device), other_lse.to(lse.device)
    mixed, logs = merge_attention([(out, lse), other])
    joined.copy_(mixed)
    lse.copy_(logs)


def logit_stats_of(
    logits: Tensor, following: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """What `logit_stats` says of each row of logits [rows, vocab], without waiting: f64 [3, rows].

    1 where all are finite; the first of the largest; the logarithm of the sum of exponentials.

    following   of rows that are runs of one token: tokens int64, which become the best ones, and
                positions and starts of the runs, which go on by one; all [rows]
    """
    finite, best = logits.isfinite().all(-1), logits.argmax(-1)
    if following is not None:
        tokens, positions, starts = following
        tokens.copy_(best)
        positions.add_(1)
        starts.add_(1)
    return torch.stack((finite.double(), best.double(), logits.double().logsumexp(-1)))


def copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each source to its target, between a device and host memory that its kernels can read.

    One or two pairs, all contiguous, of one shape and dtype.  Put on the device's queue.
    """
    for source, target in pairs:
        target.copy_(source, non_blocking=True)


def can_copy_pages(device: PageLayout, host: PageLayout) -> bool:
    """Whether a kernel converts pages of `device` and pages in pinned host memory: none."""
    return False

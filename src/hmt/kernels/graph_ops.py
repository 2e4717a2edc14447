"""What captured steps need of a device besides operations: to be told tokens and runs in place."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hmt.contracts.encoding import Encoding, Packing, WeightTensor
from hmt.kernels import reference
from hmt.kernels.backend import gpu_kernels
from hmt.kernels.reference.kv_pages import AttentionMetadata, PagedSegment
from hmt.kernels.reference.sampling import LogitStats


def has_kernels(where: torch.device) -> bool:
    """False for a GPU for which there is plain torch only: without Triton, or by HMT_KERNELS."""
    return where.type != "cuda" or gpu_kernels() is not reference


def fixed_runs(where: torch.device, tokens: int, context: int) -> AttentionMetadata | None:
    """Runs of one token each, `tokens` of them up to `context`, in tensors that stay on a device.

    None where kernels read runs from Python's own objects.  See `fill_runs`.
    """
    if where.type != "cuda" or not has_kernels(where):
        return None
    runs: AttentionMetadata = gpu_kernels().fixed_runs(where, tokens, 1, context)
    return runs


def fill_runs(runs: AttentionMetadata, given: Sequence[PagedSegment]) -> None:
    """Let what `fixed_runs` made stand for `given` from now on, without waiting for the device."""
    gpu_kernels().update_runs(runs, given)


@dataclass(frozen=True, slots=True)
class RowTable:
    """A table whose rows a device looks up: where its parts lie, in memory that it can read.

    parts        addresses of the data, scales, and zeros or minima of each part of the table: int64
                 [parts] each, on the device; 0 for what there is not
    part_rows    rows of each part (the last has fewer)
    width        numbers of a row
    dtype        of the numbers of a table that holds numbers; rows of codes come in f32
    encoding, group_size, scale_dtype   as in WeightTensor
    extra        "zeros", "minima" or ""
    """

    parts: tuple[Tensor, Tensor, Tensor]
    part_rows: int
    width: int
    dtype: torch.dtype
    encoding: Encoding
    group_size: int = 0
    scale_dtype: torch.dtype | None = None
    extra: str = ""


def looks_up(w: WeightTensor) -> bool:
    """Whether `rows_at` takes tables of which w is a part."""
    if w.encoding.is_float or w.encoding.packing is Packing.BLOCKS:
        return True
    return w.encoding in (Encoding.INT4_GROUP, Encoding.MXFP4)


def rows_at(table: RowTable, ids: Tensor) -> Tensor:
    """Rows `ids` int64 [n] of a table: [n, width]."""
    kernels = gpu_kernels()
    if not table.encoding.is_float:
        codes: Tensor = kernels.code_rows_at(table, ids)
        return codes
    rows: Tensor = kernels.rows_at(table.parts[0], table.part_rows, table.width, table.dtype, ids)
    return rows


def combine_parts(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, joined: Tensor
) -> None:
    """Write attention over the positions of two parts to `joined`, and let `lse` be of both.

    out, other_out   f32 [tokens, q_heads, value_dim], with lse and other_lse f32 [tokens, q_heads];
            the others may lie in host memory that was pinned
    joined  of any float dtype

    On the device's queue.
    """
    if joined.is_cuda and has_kernels(joined.device):
        gpu_kernels().join(out, lse, other_out, other_lse, joined)
        return
    there = other_out.to(out.device), other_lse.to(lse.device)
    mixed, logs = reference.merge_attention([(out, lse), there])
    joined.copy_(mixed)
    lse.copy_(logs)


def logit_stats_of(logits: Tensor) -> Tensor:
    """What `ops.survey` says of each row of logits [rows, vocab], without waiting: f64 [3, rows].

    1 where all are finite; the first of the largest; the logarithm of the sum of exponentials.
    """
    if logits.is_cuda and has_kernels(logits.device):
        found: Tensor = gpu_kernels().survey_rows(logits)
        return found
    finite, best = logits.isfinite().all(-1), logits.argmax(-1)
    return torch.stack((finite.double(), best.double(), logits.double().logsumexp(-1)))


def logit_stats_and_next(
    logits: Tensor, token_ids: Tensor, positions: Tensor, runs: AttentionMetadata | None
) -> Tensor:
    """`logit_stats_of` of runs of one token, which become those of the likeliest next step.

    token_ids, positions   int64 [tokens], changed, with what `fixed_runs` made
    """
    if runs is not None:
        # In a launch that there is anyway.
        (held,) = runs.device
        found: Tensor = gpu_kernels().survey_rows(logits, (token_ids, positions, held.spans[2]))
        return found
    found = logit_stats_of(logits)
    token_ids.copy_(found[1])
    positions.add_(1)
    return found


def logit_stats_list(found: Tensor) -> tuple[LogitStats, ...]:
    """What `logit_stats_of` found, brought to host memory, by rows."""
    columns = zip(*found.tolist(), strict=True)
    return tuple(LogitStats(bool(finite), int(best), total) for finite, best, total in columns)

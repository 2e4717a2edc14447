"""Looking for the likeliest token on the GPU, in two launches that a CUDA graph can hold."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.kernels.reference.sampling import LogitStats
from hmt.kernels.triton.device_math import key_index, keys
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin

_PART = 4096  # logits that one program looks at
_NO_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def _survey_parts(
    logits, best, peaks, sums, vocab, row_stride, parts,
    PART: tl.constexpr, SURVEY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: parts; axis 1: rows.  Writes of each part the best key, the largest, the sum."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = part * PART + tl.arange(0, PART)
    exists = index < vocab
    value = tl.load(logits + row * row_stride + index, mask=exists, other=float("-inf"))
    value = value.to(tl.float32)
    key = tl.where(exists, keys(value, index), _NO_KEY)
    tl.store(best + row * parts + part, tl.max(key, axis=0))
    if SURVEY:
        bad = tl.sum((exists & ~(tl.abs(value) < float("inf"))).to(tl.int32), axis=0)
        peak = tl.max(value, axis=0)
        total = tl.sum(tl.where(exists, tl.exp(value - peak), 0.0).to(tl.float64), axis=0)
        tl.store(peaks + row * parts + part, peak)
        tl.store(sums + row * parts + part, tl.where(bad > 0, float("nan"), total))


@triton.jit
def _survey_rows(
    best, peaks, sums, ids, finite, log_sums, tokens, positions, starts, parts,
    LANES: tl.constexpr, SURVEY: tl.constexpr, NEXT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: rows.  With NEXT rows are runs of one token, which become the ones that follow."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, LANES)
    exists = part < parts
    key = tl.max(tl.load(best + row * parts + part, mask=exists, other=_NO_KEY), axis=0)
    tl.store(ids + row, key_index(key).to(ids.dtype.element_ty))
    if NEXT:
        tl.store(tokens + row, key_index(key).to(tokens.dtype.element_ty))
        tl.store(positions + row, tl.load(positions + row) + 1)
        tl.store(starts + row, tl.load(starts + row) + 1)
    if SURVEY:
        peak = tl.load(peaks + row * parts + part, mask=exists, other=float("-inf"))
        total = tl.load(sums + row * parts + part, mask=exists, other=0.0)
        largest = tl.max(peak, axis=0)
        scaled = tl.where(exists, total * tl.exp((peak - largest).to(tl.float64)), 0.0)
        everything = tl.sum(scaled, axis=0)
        tl.store(finite + row, (everything == everything).to(finite.dtype.element_ty))
        tl.store(log_sums + row, largest.to(tl.float64) + tl.log(everything))


def greedy(logits: Tensor) -> Tensor:
    """The first of the largest of each row of logits [rows, vocab]: int64 [rows]; NaN is larger."""
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _look(logits, ids, None, None)
    return ids


def survey_rows(logits: Tensor, following: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
    """What `LogitStats` says of each row of logits [rows, vocab], without waiting for the GPU.

    f64 [3, rows]: 1 where all are finite, the best, and the logarithm of the sum of exponentials.
    following   of rows that are runs of one token: tokens int64, which become the best ones, and
                positions and starts of the runs, which go on by one; all [rows]
    """
    found = torch.empty(3, len(logits), dtype=torch.float64, device=logits.device)
    _look(logits, found[1], found[0], found[2], following)
    return found


def logit_stats(logits: Tensor) -> LogitStats:
    """See `reference.survey`: what one look at logits [vocab] tells.  Waits for the GPU."""
    finite, best, log_sum_exp = survey_rows(logits[None]).flatten().tolist()
    return LogitStats(bool(finite), int(best), log_sum_exp)


def _look(
    logits: Tensor,
    ids: Tensor,
    finite: Tensor | None,
    log_sums: Tensor | None,
    following: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Write what is wanted, numbers in the dtype of where they go."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    parts = triton.cdiv(vocab, _PART)
    whole = finite is not None

    def empty(dtype: torch.dtype, wanted: bool) -> Tensor:
        return torch.empty((rows, parts) if wanted else 1, dtype=dtype, device=logits.device)

    best = empty(torch.int64, True)
    peaks, sums = empty(torch.float32, whole), empty(torch.float64, whole)
    _survey_parts[(parts, rows)](
        logits, best, peaks, sums, vocab, logits.stride(0), parts,
        PART=_PART, SURVEY=whole, num_warps=8, **dependent(logits.device),
    )  # fmt: skip
    _survey_rows[(rows,)](
        best, peaks, sums, ids, finite, log_sums, *(following or (ids, ids, ids)), parts,
        LANES=triton.next_power_of_2(parts), SURVEY=whole, NEXT=following is not None, num_warps=1,
        **dependent(logits.device),
    )  # fmt: skip

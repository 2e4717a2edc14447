"""What captured steps need of a device besides operations: to be told tokens and runs in place."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from hmt.contracts.store import StateRun
from hmt.kernels import reference
from hmt.kernels.backend_registry import backend_of, backend_on
from hmt.kernels.ops import by_device_of
from hmt.kernels.reference.kv_pages import AttentionMetadata, PagedSegment
from hmt.kernels.reference.recurrent import StateRuns
from hmt.kernels.reference.sampling import LogitStats
from hmt.kernels.row_table import RowTable

combine_parts = by_device_of("joined", reference.combine_parts)
logit_stats_of = by_device_of("logits", reference.logit_stats_of)


def has_kernels(where: torch.device) -> bool:
    """False for a GPU for which there is plain torch only: without Triton, or by HMT_KERNELS."""
    return backend_on(where).captures


def fixed_runs(
    where: torch.device, tokens: int, context: int, sequences: int = 0
) -> AttentionMetadata | None:
    """Runs of one token each, `tokens` of them up to `context`, in tensors that stay on a device.

    sequences   that they are of, where several may be neighbouring tokens of one; else 0

    None where kernels read runs from Python's own objects.  See `fill_runs`.
    """
    runs: AttentionMetadata | None = backend_on(where).fixed_runs(
        where, tokens, 1, context, sequences
    )
    return runs


def keeps_runs(where: torch.device) -> bool:
    """Whether kernels read runs from tensors that `fixed_runs` makes."""
    return backend_on(where).has("fixed_runs")


def single_tokens(where: torch.device) -> AbstractContextManager[None]:
    """In the body, each token of a step is computed there as if it were alone, to the bit."""
    found: AbstractContextManager[None] = backend_on(where).single_tokens()
    return found


def fill_runs(runs: AttentionMetadata, given: Sequence[PagedSegment]) -> None:
    """Let what `fixed_runs` made stand for `given` from now on, without waiting for the device."""
    (held,) = runs.device
    backend_of(held.spans).update_runs(runs, given)


def fixed_state_runs(where: torch.device, tokens: int) -> StateRuns | None:
    """The same of runs whose sequences have recurrent state.  See `fill_state_runs`."""
    runs: StateRuns | None = backend_on(where).fixed_state_runs(where, tokens)
    return runs


def fill_state_runs(runs: StateRuns, given: Sequence[StateRun]) -> None:
    """Let what `fixed_state_runs` made stand for `given`, without waiting for the device."""
    backend_of(runs.device.table).update_state_runs(runs, given)


def can_look_up_rows(where: torch.device) -> bool:
    """Whether a kernel of the device looks up rows of a table by address; see `rows_at`."""
    return backend_on(where).has("rows_at")


def rows_at(table: RowTable, ids: Tensor) -> Tensor:
    """Rows `ids` int64 [n] of a table: [n, width]."""
    backend = backend_of(ids)
    if not table.encoding.is_float:
        codes: Tensor = backend.code_rows_at(table, ids)
        return codes
    rows: Tensor = backend.rows_at(table.parts[0], table.part_rows, table.width, table.dtype, ids)
    return rows


def copy_pairs(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """`reference.copy_pairs`, by the device that one side of each pair is on."""
    first, second = pairs[0]
    backend = backend_of(first)
    (backend_of(second) if backend.on_host else backend).copy_pairs(pairs)


def logit_stats_and_next(
    logits: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    runs: AttentionMetadata | None,
    axes: Tensor | None = None,
) -> Tensor:
    """`logit_stats_of` of runs of one token, which become those of the likeliest next step.

    token_ids, positions   int64 [tokens], changed, with what `fixed_runs` made
    axes                   int64 [3, tokens], changed: positions on three axes
    """
    if axes is not None:
        axes.add_(1)  # as on each axis behind the last token of a prompt
    if runs is not None:
        # In a launch that there is anyway.
        (held,) = runs.device
        return logit_stats_of(logits, (token_ids, positions, held.spans[2]))
    found = logit_stats_of(logits)
    token_ids.copy_(found[1])
    positions.add_(1)
    return found


def move_on(positions: Tensor, runs: AttentionMetadata | None, axes: Tensor | None = None) -> None:
    """Change where the tokens of `logit_stats_and_next` lie as it does, without logits."""
    for moved in (positions, axes, None if runs is None else runs.device[0].spans[2]):
        if moved is not None:
            moved.add_(1)


def logit_stats_list(found: Tensor) -> tuple[LogitStats, ...]:
    """What `logit_stats_of` found, brought to host memory, by rows."""
    columns = zip(*found.tolist(), strict=True)
    return tuple(LogitStats(bool(finite), int(best), total) for finite, best, total in columns)

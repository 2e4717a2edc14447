"""Runs of a step as kernels read them: where tokens and pages are, in the device's memory.

A kernel's grid comes from maxima that the host knows; each program reads its run's true length and
context from the device and stops when it has nothing to do.  So a captured graph stays right when
`update_runs` writes other runs into the same tensors between replays.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels.reference.kv_pages import AttentionMetadata, PagedSegment

# Runs of up to this many tokens are attended together: their grids are as long as the longest, and
# a prompt among them would make thousands of programs that find nothing to do.
SHORT_TOKENS = 8
_LENGTHS = (1, SHORT_TOKENS, 32, 128, 512)  # the longest runs of groups

TABLE_MULTIPLE = 16  # pages; tables end at a multiple of the largest tile, which is 256 tokens


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRuns:
    """Runs of similar length, in tensors that do not move.

    spans     int32 [3, count]: offset, length and start of each run; length 0 for none
    tables    int32 [count, width]: page numbers, then zeros (a page that may be read)
    tokens    no run is longer
    fewest    no run is shorter, but for those of length 0
    context   no run ends at a later position
    known     the table that each row was filled from, so that it is not sent again
    begun     the runs, where all of them are long and begin their sequences; else none
    sequences   that the runs are of, where several may be neighbouring tokens of one; else 0.  All
              are appended before any attends, and contexts are cut as for so many runs
    """

    spans: Tensor
    tables: Tensor
    tokens: int
    context: int
    known: list[tuple[Tensor, int] | None] = field(repr=False)
    fewest: int = 1
    begun: tuple[PagedSegment, ...] = ()
    sequences: int = 0

    @property
    def count(self) -> int:
        """Runs that there is room for."""
        return self.spans.shape[1]

    @staticmethod
    def empty(
        device: torch.device, count: int, tokens: int, context: int, sequences: int = 0
    ) -> "DeviceRuns":
        """Room for `count` runs of up to `tokens` tokens, ending at up to `context`."""
        pages = -(-context // PAGE_TOKENS)
        width = -(-pages // TABLE_MULTIPLE) * TABLE_MULTIPLE
        return DeviceRuns(
            spans=torch.zeros(3, count, dtype=torch.int32, device=device),
            tables=torch.zeros(count, width, dtype=torch.int32, device=device),
            tokens=tokens,
            context=context,
            known=[None] * count,
            sequences=sequences,
        )

    def fill(self, runs: Sequence[PagedSegment]) -> None:
        """Hold `runs` instead, without waiting for the device.

        A table that a row already holds, the same tensor and unchanged, is not sent again.
        """
        assert len(runs) <= self.count
        columns = [[run.offset, run.length, run.start] for run in runs]
        columns += [[0, 0, 0]] * (self.count - len(runs))
        for run in runs:
            assert run.length <= self.tokens and run.start + run.length <= self.context
        changed = [row for row, run in enumerate(runs) if not self._holds(row, run.table)]
        if len(changed) == self.count and all(run.table.is_cpu for run in runs):
            whole = torch.zeros(self.tables.shape, dtype=torch.int32)  # sent in one piece
            for row, run in enumerate(runs):
                pages = min(len(run.table), whole.shape[1])
                whole[row, :pages] = run.table[:pages]
            _send(whole, self.tables)
        else:
            for row in changed:
                pages = min(len(runs[row].table), self.tables.shape[1])
                _send(runs[row].table[:pages], self.tables[row, :pages])
        for row in changed:
            table = runs[row].table
            # Those of inference mode do not tell whether they have changed.
            self.known[row] = None if table.is_inference() else (table, table._version)
        _send(torch.tensor(columns, dtype=torch.int32).T, self.spans)

    def _holds(self, row: int, table: Tensor) -> bool:
        known = self.known[row]
        return known is not None and known[0] is table and known[1] == table._version


def device_runs(runs: AttentionMetadata, device: torch.device) -> tuple[DeviceRuns, ...]:
    """The runs by length, made at the first call and kept in `runs.device`.

    Single tokens are together, up to 8, 32, 128, 512 and more, and long ones that begin a sequence.
    Grids and workspaces are for the longest of a group, and a run's bits are the same whoever else
    is in the step.
    """
    if runs.device is None:
        groups: dict[int, list[PagedSegment]] = {}
        for run in runs.runs:
            if run.length:
                groups.setdefault(_group_of(run), []).append(run)
        runs.device = tuple(_held(groups[kind], device) for kind in sorted(groups))
    held: tuple[DeviceRuns, ...] = runs.device
    return held


def fixed_runs(
    device: torch.device, count: int, tokens: int, context: int, sequences: int = 0
) -> AttentionMetadata:
    """Runs for a graph: up to `count` of up to `tokens` tokens, ending at up to `context`.

    Their tensors stay where they are; `update_runs` says what they hold, at first nothing.
    Kernels take `context` as a bucket: it fixes the grid, not the work.
    sequences   see DeviceRuns
    """
    runs = AttentionMetadata(())
    runs.device = (DeviceRuns.empty(device, count, tokens, context, sequences),)
    return runs


def update_runs(fixed: AttentionMetadata, runs: Sequence[PagedSegment]) -> None:
    """Let `fixed` hold `runs`, in place and in the order of the current stream."""
    (held,) = fixed.device
    held.fill(runs)


def _group_of(run: PagedSegment) -> int:
    if run.length > SHORT_TOKENS and run.start == 0:
        return len(_LENGTHS) + 1
    return bisect_left(_LENGTHS, run.length)


def _held(runs: list[PagedSegment], device: torch.device) -> DeviceRuns:
    tokens = max(run.length for run in runs)
    context = max(run.start + run.length for run in runs)
    held = DeviceRuns.empty(device, len(runs), tokens, context)
    held.fill(runs)
    held = replace(held, fewest=min(run.length for run in runs))
    if tokens > SHORT_TOKENS and not any(run.start for run in runs):
        held = replace(held, begun=tuple(runs))
    return held


def _send(source: Tensor, target: Tensor) -> None:
    """Copy int32 numbers, through pinned memory, which torch keeps until the copy is over."""
    if target.is_cuda and not source.is_cuda:
        staged = torch.empty(source.shape, dtype=torch.int32, pin_memory=True)
        target.copy_(staged.copy_(source), non_blocking=True)
    else:
        target.copy_(source)

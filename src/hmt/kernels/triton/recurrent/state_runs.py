"""Runs of a step whose sequences have recurrent state, as kernels read them.

They lie in the device's memory, so that a captured graph stays right when `update_state_runs`
writes other runs into the same tensor between replays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.store import StateRun
from hmt.kernels.reference import StateRuns

_FIELDS = 5


@dataclass(slots=True, eq=False)
class DeviceStateRuns:
    """Runs in a tensor that does not move.

    table    int32 [count, 5]: slot, offset, length, whether it begins, and how many of its tokens
             stay; length 0: none
    tokens   no run is longer
    """

    table: Tensor
    tokens: int
    _known: tuple[StateRun, ...] | None = field(default=None, repr=False)

    @property
    def count(self) -> int:
        """Runs that there is room for."""
        return self.table.shape[0]

    def fill(self, runs: Sequence[StateRun]) -> None:
        """Hold `runs` instead, without waiting for the device; what it holds is not sent again."""
        given = tuple(runs)
        if given == self._known:
            return
        assert len(given) <= self.count and all(run.length <= self.tokens for run in given)
        rows = [(r.slot, r.offset, r.length, int(r.begins), r.stays) for r in given]
        rows += [(0, 0, 0, 0, 0)] * (self.count - len(given))
        source = torch.tensor(rows, dtype=torch.int32)
        if self.table.is_cuda:  # through pinned memory, which torch keeps until the copy is over
            staged = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self.table.copy_(staged.copy_(source), non_blocking=True)
        else:
            self.table.copy_(source)
        self._known = given


def device_state_runs(runs: Sequence[StateRun], where: torch.device) -> DeviceStateRuns:
    """The runs on a device; made at the first call, and kept by a StateRuns."""
    held = runs.device if isinstance(runs, StateRuns) else None
    if held is None:
        tokens = max((run.length for run in runs), default=0)
        held = _empty(where, len(runs), tokens)
        held.fill(runs)
        if isinstance(runs, StateRuns):
            runs.device = held
    assert isinstance(held, DeviceStateRuns)
    return held


def fixed_state_runs(where: torch.device, count: int) -> StateRuns:
    """Up to `count` runs of one token each, in a tensor that stays where it is."""
    runs = StateRuns()
    runs.device = _empty(where, count, 1)
    return runs


def update_state_runs(fixed: StateRuns, runs: Sequence[StateRun]) -> None:
    """Let `fixed` hold `runs`, in place and in the order of the current stream."""
    fixed.device.fill(runs)


def _empty(where: torch.device, count: int, tokens: int) -> DeviceStateRuns:
    table = torch.zeros(count, _FIELDS, dtype=torch.int32, device=where)
    return DeviceStateRuns(table, tokens)


@triton.jit
def state_run(table, run):
    """Slot, offset, length, whether it begins (0 or 1), and tokens that stay, of a run."""
    at = table + run * 5
    slot, offset = tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64)
    return slot, offset, tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)

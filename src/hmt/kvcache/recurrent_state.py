"""Recurrent state of sequences: a slot of a fixed size for each, in the memory of its layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hmt.contracts.model import LayerState
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import RecurrentState, StateRun
from hmt.kernels import graph_ops, ops
from hmt.kvcache.page_store import Pool
from hmt.kvcache.page_table import Ints
from hmt.kvcache.sequence_slots import SequenceSlots
from hmt.kvcache.state_checkpoints import StateCheckpoints, checkpoint_interval


class StateStore:
    """The state of some layers.  A sequence's is one contiguous extent, so that one copy forks it.

    State cannot be computed again from where it is, as pages can: a step that fails between two
    layers leaves it between two positions.  So the store knows at which position each sequence's
    is, and refuses a step that begins anywhere else but at 0.

    slots         which one each sequence has; stores of other layers may share them
    checkpoints   copies at borders of pages; None: there are none
    """

    def __init__(
        self,
        layers: Mapping[int, LayerState],
        slots: SequenceSlots,
        pool: Pool[Any],
        *,
        checkpoints: bool = False,
        chunk: int = 0,
    ) -> None:
        """Room for all of `slots`, spare ones included.

        checkpoints   whether spare ones hold copies for sequences that begin alike
        chunk         tokens of a prompt in a step at most
        Raises BudgetError if it is not there.
        """
        self.slots = slots
        self.checkpoints = None
        if checkpoints:
            self.checkpoints = StateCheckpoints(slots, checkpoint_interval(chunk))
        count = slots.count + slots.spare
        self._pool = pool
        size = sum(tensor.nbytes for state in layers.values() for tensor in state)
        nbytes = count * size
        self._buffer = pool.allocate(nbytes) if nbytes else None
        memory = torch.empty(0) if self._buffer is None else self._buffer.tensor[:nbytes]
        self._memory = memory.view(torch.float32).view(count, size // 4)
        self._layers: dict[int, dict[str, torch.Tensor]] = {}
        first = 0
        for index, state in layers.items():
            self._layers[index] = {}
            for tensor in state:
                end = first + tensor.nbytes // 4
                own = self._memory[:, first:end].unflatten(1, tensor.shape)
                self._layers[index][tensor.name] = own
                first = end
        self._positions: dict[int, int] = {}  # by sequence; of those that are open
        self._segments: tuple[Segment, ...] | None = None  # of the step that has begun
        self._runs = ops.StateRuns()
        self._captured: Step | None = None  # that stands for it in a capture
        self._captured_runs = ops.StateRuns()

    def of(self, layer: int, step: Step) -> RecurrentState:
        """See KVCache.state."""
        if step is self._captured:
            return RecurrentState(self._layers[layer], self._captured_runs)
        self.begin(step)
        return RecurrentState(self._layers[layer], self._runs)

    def begin(self, step: Step) -> None:
        """Layers will advance the state by the tokens of `step`; once for all steps of its runs."""
        if self._segments is not step.segments:
            self._segments, self._runs = step.segments, self._begin(step)

    def hold(self, captured: Step, runs: ops.StateRuns | None, *, advances: bool = True) -> None:
        """Let `captured` stand for the step that has begun, until another one is named here.

        runs       what `graph_ops.fixed_state_runs` made, which is filled in the order of the
                   current stream; None: kernels read Python's own objects
        advances   Otherwise layers leave all state as it is, and compute the same: for calls before
                   those that count.
        """
        given = self._runs
        if not advances:
            given = ops.StateRuns(replace(run, advances=False) for run in given)
        if runs is not None:
            graph_ops.fill_state_runs(runs, given)
        self._captured, self._captured_runs = captured, given if runs is None else runs

    def copy(self, sequence: int, other: int) -> None:
        """Let the slot of `other`, which is new, hold what that of `sequence` holds."""
        self._memory[self.slot_of(other)] = self._memory[self.slot_of(sequence)]
        self._positions[other] = self._positions.get(sequence, 0)

    def keep(self, sequence: int, pages: Ints) -> None:
        """A sequence ends: let its checkpoints belong to `pages`, the first of it, for others.

        And its state itself, where that is at a border of a page.
        """
        if self.checkpoints is None:
            return
        if position := self._positions.get(sequence, 0):
            self._copy_out(Segment(sequence, position, 0, 0))
        self.checkpoints.keep(sequence, pages)

    def row(self, slot: int) -> torch.Tensor:
        """All bytes of a slot, uint8, as they lie."""
        return self._memory[slot].view(torch.uint8)

    def restore(self, sequence: int, slot: int, position: int) -> None:
        """Let a new sequence hold the state of a checkpoint, which is that of `position`."""
        self._memory[self.slot_of(sequence)] = self._memory[slot]
        self._positions[sequence] = position
        if self.checkpoints is not None:
            self.checkpoints.began_at(sequence, position)

    def slot_of(self, sequence: int) -> int:
        """Where a sequence's state is."""
        (slot,) = self.slots.of(sequence)
        return int(slot)

    def was_read(self, sequence: int, position: int) -> None:
        """The slot of a new sequence was filled from the disk with the state of `position`.

        That becomes a checkpoint.
        """
        self._positions[sequence] = position
        if self.checkpoints is not None:
            slot = self.checkpoints.take_read(sequence, position)
            if slot is not None:
                self._memory[slot] = self._memory[self.slot_of(sequence)]

    def release(self) -> None:
        """Give the memory back."""
        self._layers.clear()
        if self._buffer is not None:
            self._pool.free(self._buffer)

    def _begin(self, step: Step) -> ops.StateRuns:
        """The runs of a step, by whose tokens every layer will advance its state."""
        opened = self.slots.sequences
        for sequence in self._positions.keys() - opened:
            del self._positions[sequence]
        if self.checkpoints is not None:
            self.checkpoints.forget_all_but(opened)
        runs = []
        for run in step.segments:
            held = self._positions.get(run.sequence, 0)
            if run.start not in (0, held):
                raise AssertionError(
                    f"a step begins at position {run.start} of a sequence whose recurrent state "
                    f"is at {held}"
                )
            self._positions[run.sequence] = run.context
            self._copy_out(run)
            runs.append(
                StateRun(self.slot_of(run.sequence), run.offset, run.length, run.start == 0)
            )
        return ops.StateRuns(runs)

    def _copy_out(self, run: Segment) -> None:
        """Make a checkpoint of the state with which a run begins, if it is worth one."""
        slot = None if self.checkpoints is None else self.checkpoints.take(run)
        if slot is not None:
            self._memory[slot] = self._memory[self.slot_of(run.sequence)]

"""Recurrent state of sequences: a slot of a fixed size for each, in the memory of its layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hmt.contracts.model import PAGE_TOKENS, LayerState
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import RecurrentState, StateRun
from hmt.kernels import graph_ops, ops
from hmt.kvcache.page_store import Pool
from hmt.kvcache.page_table import Ints
from hmt.kvcache.sequence_slots import SequenceSlots
from hmt.kvcache.state_checkpoints import StateCheckpoints, checkpoint_interval
from hmt.kvcache.state_journal import JournaledRun, StateJournal, StepReplay


class StateStore:
    """The state of some layers.  A sequence's is one contiguous extent, so that one copy forks it.

    State cannot be computed again from where it is, as pages can: a step that fails between two
    layers leaves it between two positions.  So the store knows at which position each sequence's
    is, and refuses a step that begins anywhere else but at 0.

    A step may end with draft tokens.  Then the state is behind its sequence until the
    next step, and the sequence can go back as far as there: see `state_journal`.

    slots         which one each sequence has; stores of other layers may share them
    checkpoints   copies at borders of pages; None: there are none
    """

    def __init__(
        self,
        layers: Mapping[int, LayerState],
        slots: SequenceSlots,
        pool: Pool[Any],
        *,
        inputs: Mapping[int, int] | None = None,
        drafts: int = 0,
        checkpoints: bool = False,
        chunk: int = 0,
    ) -> None:
        """Room for all of `slots`, spare ones included.

        inputs        by layer: see `ModelSpec.state_inputs`
        drafts        draft tokens that a run of a step may end with
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
        size = sum(tensor.nbytes for state in layers.values() for tensor in state) // 4
        journal = StateJournal(inputs or {}, count, drafts)
        nbytes = 4 * (count * size + journal.numbers)
        self._buffer = pool.allocate(nbytes) if nbytes else None
        memory = torch.empty(0) if self._buffer is None else self._buffer.tensor[:nbytes]
        memory = memory.view(torch.float32)
        self._memory = memory[: count * size].view(count, size)
        self._journal = journal
        journal.lie_in(memory[count * size :])
        self._layers: dict[int, dict[str, torch.Tensor]] = {}
        first = 0
        for index, state in layers.items():
            self._layers[index] = {}
            for tensor in state:
                end = first + tensor.nbytes // 4
                own = self._memory[:, first:end].unflatten(1, tensor.shape)
                self._layers[index][tensor.name] = own
                first = end
            if journal.drafts:
                self._layers[index]["journal"] = journal.of(index)
        self._positions: dict[int, int] = {}  # by sequence; of those that are open
        self._pending: dict[int, int] = {}  # tokens of them that are in the journal only
        self._segments: tuple[Segment, ...] | None = None  # of the step that has begun
        self._runs = ops.StateRuns()
        self._replay: StepReplay | None = None
        self._copying: list[tuple[int, int]] = []  # checkpoints that its layers make
        self._ahead: dict[int, int] = {}  # by sequence: the slot that a step on a guess changes
        self._captured: Step | None = None  # that stands for it in a capture
        self._captured_runs = ops.StateRuns()

    def of(self, layer: int, step: Step) -> RecurrentState:
        """See KVCache.state."""
        if step is self._captured:
            return RecurrentState(self._layers[layer], self._captured_runs)
        self.begin(step)
        tensors, replay = self._layers[layer], None
        if self._replay is not None:
            replay = partial(self._replay, self._journal.of(layer), tensors)
        copies = self._replay is not None and self._replay.copies
        return RecurrentState(tensors, self._runs, replay, copies)

    def tensors(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Of all slots, as `RecurrentState` has them."""
        return self._layers[layer]

    def begin(self, step: Step) -> None:
        """Layers will advance the state by the tokens of `step`; once for all steps of its runs."""
        if self._segments is not step.segments:
            self._segments, self._runs = step.segments, self._begin(step)

    def lags(self, runs: Sequence[Segment]) -> bool:
        """Whether states of a step with `runs` are behind their sequences, or will be."""
        return any(run.drafts or (run.start and run.sequence in self._pending) for run in runs)

    def hold(self, captured: Step, runs: ops.StateRuns | None, *, advances: bool = True) -> None:
        """Let `captured` stand for the step that has begun, until another one is named here.

        runs       what `graph_ops.fixed_state_runs` made, which is filled in the order of the
                   current stream; None: kernels read Python's own objects
        advances   Otherwise layers leave all state as it is, and compute the same: for calls before
                   those that count.
        """
        given = self._runs
        if not advances:
            given = ops.StateRuns(replace(run, drafts=run.length) for run in given)
        self._captured, self._captured_runs = captured, self._filled(runs, given)

    def can_run_ahead(self, runs: Sequence[Segment]) -> bool:
        """Whether sequences have slots for what `run_ahead` changes; they are given them."""
        return all(self.slots.other(run.sequence) is not None for run in runs)

    def run_ahead(self, captured: Step, runs: ops.StateRuns | None) -> None:
        """Let `captured` stand for the step that may follow the one that has begun.

        Its state is changed in copies.  `confirm` makes them the sequences' own; otherwise they
        count for nothing.  `can_run_ahead`; see `hold`.
        """
        given, self._ahead = [], {}
        for run in self._segments or ():
            own, other = self.slot_of(run.sequence), self.slots.other(run.sequence)
            assert other is not None
            self._memory[other] = self._memory[own]
            self._ahead[run.sequence] = other
            given.append(StateRun(other, run.offset, run.length, False))
        self._captured, self._captured_runs = captured, self._filled(runs, given)

    def confirm(self, step: Step) -> bool:
        """Whether `run_ahead` was of `step`, and its copies are there: it has begun with that."""
        ahead, self._ahead = self._ahead, {}
        if any(
            not self.slots.has_other(run.sequence)
            or ahead.get(run.sequence) != self.slots.other(run.sequence)
            for run in step.segments
        ):
            return False
        self.begin(step)  # what it begins with is copied, where that is a checkpoint
        for run in step.segments:
            self.slots.exchange(run.sequence)
        self._runs = ops.StateRuns(
            replace(run, slot=ahead[segment.sequence])
            for run, segment in zip(self._runs, step.segments, strict=True)
        )
        return True

    def copy(self, sequence: int, other: int) -> None:
        """Let the slot of `other`, which is new, hold what that of `sequence` holds."""
        own, to = self.slot_of(sequence), self.slot_of(other)
        self._memory[to] = self._memory[own]
        self._positions[other] = self._positions.get(sequence, 0)
        if pending := self._pending.get(sequence, 0):
            self._pending[other] = pending
            self._journal.copy(own, to)

    def can_rollback(self, sequence: int, position: int) -> bool:
        """Whether `rollback` is possible: whether only draft tokens are behind `position`."""
        at = self._positions.get(sequence, 0)
        return at - self._pending.get(sequence, 0) <= position <= at

    def rollback(self, sequence: int, position: int) -> None:
        """Let a sequence hold no more than `position` tokens; the others were draft tokens.

        Nothing is computed or copied: the next step does that.
        """
        if not self.can_rollback(sequence, position):
            raise AssertionError(
                f"a sequence cannot go back from {self._positions.get(sequence, 0)} to {position}: "
                f"its recurrent state was written behind that"
            )
        if gone := self._positions.get(sequence, 0) - position:
            self._pending[sequence] -= gone
            self._positions[sequence] = position
            if not self._pending[sequence]:
                del self._pending[sequence]

    def keep(self, sequence: int, pages: Ints) -> None:
        """A sequence ends: let its checkpoints belong to `pages`, the first of it, for others.

        And its state itself, where that is at a border of a page.
        """
        if self.checkpoints is None:
            return
        self._end_copies()
        position = self._positions.get(sequence, 0) - self._pending.get(sequence, 0)
        if position:
            self._copy_out(Segment(sequence, position, 0, 0), 0)
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

    @staticmethod
    def _filled(runs: ops.StateRuns | None, given: Sequence[StateRun]) -> ops.StateRuns:
        """`given`, as a capture reads them."""
        if runs is None:
            return ops.StateRuns(given)
        graph_ops.fill_state_runs(runs, given)
        return runs

    def _begin(self, step: Step) -> ops.StateRuns:
        """The runs of a step, by whose tokens every layer will advance its state."""
        self._end_copies()
        opened = self.slots.sequences
        for sequence in self._positions.keys() - opened:
            del self._positions[sequence]
            self._pending.pop(sequence, None)
        if self.checkpoints is not None:
            self.checkpoints.forget_all_but(opened)
        runs = [self._begin_run(run) for run in step.segments]
        self._replay = None
        if any(run.lags for run in runs):
            self._replay = StepReplay(runs, self._journal.drafts, self._memory.device)
        return ops.StateRuns(run.run for run in runs)

    def _end_copies(self) -> None:
        """Checkpoints that layers were to make are there, unless the step failed before the end."""
        copying, self._copying = self._copying, []
        if self.checkpoints is None or self._replay is None:
            return
        if self._replay.layers < len(self._layers):
            for sequence, position in copying:
                self.checkpoints.take_back(sequence, position)

    def _begin_run(self, run: Segment) -> JournaledRun:
        held = self._positions.get(run.sequence, 0)
        if run.start not in (0, held):
            raise AssertionError(
                f"a step begins at position {run.start} of a sequence whose recurrent state "
                f"is at {held}"
            )
        if run.drafts > self._journal.drafts or run.drafts == run.context:
            raise AssertionError(
                f"a run of {run.length} tokens ends with {run.drafts} draft tokens; the journal of "
                f"recurrent state has room for {self._journal.drafts}"
            )
        pending = self._pending.pop(run.sequence, 0) if run.start else 0
        copy = self._copy_out(run, pending)
        self._positions[run.sequence] = run.context
        if run.drafts:
            self._pending[run.sequence] = run.drafts
        return JournaledRun(self.slot_of(run.sequence), run, pending, copy)

    def _copy_out(self, run: Segment, pending: int) -> tuple[int, int] | None:
        """Make a checkpoint of the state with which a run begins, if it is worth one.

        pending   tokens before the run that the state lacks: where the last border of a page is
                  among them, the copy is still to be made, as `JournaledRun.copy`
        """
        border = run.start if not pending else run.start // PAGE_TOKENS * PAGE_TOKENS
        behind = run.start - pending
        if self.checkpoints is None or border < behind:
            return None
        slot = self.checkpoints.take(replace(run, start=border))
        if slot is None:
            return None
        if border > behind:
            self._copying.append((run.sequence, border))
            return border - behind, slot
        self._memory[slot] = self._memory[self.slot_of(run.sequence)]
        return None

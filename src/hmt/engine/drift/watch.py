"""Watches activations of requests, and says from where on one is computed in higher precision.

What is found depends on a request's tokens alone: rows are those of fixed positions, blocks and
windows begin at fixed positions, and precision is raised behind the prompt, or so many positions
behind a window that no step with draft tokens has begun them.  So it does not depend on chunks, on
draft tokens or on who else is in a step.  Tokens whose KV came from the prefix cache are not
computed, and not seen.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.model import MOST_DRAFTS
from hmt.contracts.step import SchedulerOutput, Step
from hmt.engine.drift.account import DriftAccount
from hmt.engine.drift.statistics import (
    BLOCK_ROWS,
    BLOCK_TOKENS,
    EVERY,
    WINDOW,
    ActivationStatistics,
    BlockSums,
    Floats,
    distance,
)
from hmt.engine.scheduling.sequence import PromptEnd, SequenceState

_LAST: Final = EVERY - 1
# Of steps with so many tokens all hidden states are held, until enough rows are there: what is done
# seldom takes ten times as long as what is done in every step, and so one row as long as many.
_FEW: Final = 32
_ENOUGH: Final = 8 * BLOCK_ROWS


@dataclass(frozen=True, slots=True)
class SeenRows:
    """Rows of a sequence, of each `EVERY` positions from `first` on the last.

    first    position of the first row
    hidden   of a step [tokens, ...], or of what was copied of it
    places   of the rows in it
    """

    sequence: int
    first: int
    hidden: Tensor
    places: range

    def __len__(self) -> int:
        return len(self.places)

    @property
    def rows(self) -> Tensor:
        """[rows, ...], of a step's hidden states."""
        places = self.places
        return self.hidden[places.start : places.stop : places.step]

    def part(self, rows: slice) -> "SeenRows":
        """Some of them."""
        at = range(len(self.places))[rows].start
        return SeenRows(self.sequence, self.first + at * EVERY, self.hidden, self.places[rows])


@dataclass(slots=True)
class _Record:
    """What was seen of a request.

    behind   the position behind the last row
    rows     that were not looked at yet; they begin with a block
    window   the last complete blocks, and behind which position they end
    """

    behind: int = 0
    rows: list[SeenRows] = field(default_factory=list)
    window: deque[BlockSums] = field(default_factory=lambda: deque(maxlen=WINDOW))
    window_end: int = 0

    def copied(self) -> "_Record":
        """The same for another request."""
        return replace(self, rows=list(self.rows), window=self.window.copy())


class RowSampler:
    """Keeps some rows of a step: of each `EVERY` positions of a sequence the last."""

    def __init__(self) -> None:
        self.seen: list[SeenRows] = []

    def see(self, step: Step, hidden: Tensor, *, stays: bool = True) -> None:
        """Hidden states [tokens, ...] of a step behind the last layer.

        stays   whether they are what they are as long as they are referenced
        """
        runs = [run for run in step.segments if run.start | _LAST < run.start + run.length]
        self.seen = []
        if not runs:
            return
        of_images = set() if step.image_rows is None else set(step.image_rows.tolist())
        for run in runs:
            first = run.start | _LAST
            places = range(run.offset + first - run.start, run.offset + run.length, EVERY)
            if not of_images.intersection(places):  # calibration is text
                self.seen.append(SeenRows(run.sequence, first, hidden, places))
        if not stays or len(hidden) > _FEW:
            self.seen = [
                replace(seen, hidden=seen.rows.clone(), places=range(len(seen)))
                for seen in self.seen
            ]


class RowRecorder(RowSampler):
    """Keeps them of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[SeenRows] = []

    @override
    def see(self, step: Step, hidden: Tensor, *, stays: bool = True) -> None:
        super().see(step, hidden, stays=stays)
        self._recorded += [replace(one, hidden=one.hidden.clone()) for one in self.seen]

    def recorded(self) -> Floats:
        """Rows in the order of steps: f32 [rows, channels]."""
        return _floats(self._recorded) if self._recorded else np.zeros((0, 1), np.float32)


def _floats(seen: Sequence[SeenRows]) -> Floats:
    """All rows: f32 [rows, channels]."""
    rows: Floats = torch.cat([one.rows for one in seen]).flatten(1).float().cpu().numpy()
    return rows


class ActivationWatch(RowSampler):
    """Judges requests by rows of their steps.  For the engine's thread only.

    account   since the last reset
    """

    def __init__(self, statistics: ActivationStatistics) -> None:
        super().__init__()
        self._statistics = statistics
        self._records: dict[int, _Record] = {}  # by number of the request
        self._unread: set[int] = set()  # of these, those with rows of prompts that go on
        # Of prompts with which others begin later.
        self._prompts: WeakKeyDictionary[PromptEnd, tuple[int | None, _Record]]
        self._prompts = WeakKeyDictionary()
        self.account = DriftAccount()

    def computed(self, output: SchedulerOutput, state: Callable[[int], SequenceState]) -> None:
        """Look at rows of the step that was seen last, of tokens that count as computed by now.

        Those of draft tokens stay until a later call, or the next step.  Changes `raised_at` of
        states.
        """
        if self.seen:
            self._add(output, state)
        for number in list(self._unread):  # the end of a prompt may have no row
            sequence = state(number)
            if sequence.computed >= sequence.prompt_tokens and sequence.raised_at is None:
                self._unread.discard(number)
                self._compare(self._records[number], sequence)

    def _add(self, output: SchedulerOutput, state: Callable[[int], SequenceState]) -> None:
        """Take rows of the step that was seen last."""
        requests = {segment.sequence: segment.request for segment in output.segments}
        later = []
        for seen in self.seen:
            sequence = state(requests[seen.sequence]) if seen.sequence in requests else None
            if sequence is None or sequence.finished or sequence.raised_at is not None:
                continue
            count = 0
            if seen.sequence == sequence.kv:
                count = max(0, (sequence.computed - seen.first + _LAST) // EVERY)
                record = self._records.setdefault(sequence.number, _Record())
                self._look(record, seen.part(slice(count)), sequence)
            if count < len(seen):
                later.append(seen.part(slice(count, None)))
        self.seen = later

    def keep_prompt(self, end: PromptEnd, leader: SequenceState) -> None:
        """`leader` has just computed a prompt with which others begin, as long as `end` lives."""
        record = self._records.get(leader.number, _Record())
        self._prompts[end] = leader.raised_at, record.copied()

    def begins_with(self, end: PromptEnd, sequence: SequenceState) -> None:
        """A sequence begins with a prompt that was kept."""
        self._begin(sequence, *self._prompts[end])

    def shares_prompt(self, leader: SequenceState, sequence: SequenceState) -> None:
        """A sequence begins with the prompt that `leader` has just computed."""
        self._begin(sequence, leader.raised_at, self._records.get(leader.number, _Record()))

    def _begin(self, sequence: SequenceState, raised_at: int | None, record: _Record) -> None:
        sequence.raised_at = raised_at
        if raised_at is None:
            self._records[sequence.number] = record.copied()
        else:
            self.account.requests += 1

    def ended(self, number: int) -> None:
        """A request has ended."""
        self._records.pop(number, None)
        self._unread.discard(number)

    def _look(self, record: _Record, seen: SeenRows, sequence: SequenceState) -> None:
        again = (record.behind - seen.first + _LAST) // EVERY  # rows that are computed again
        seen = seen.part(slice(max(0, again), None))
        if seen.first != record.behind + _LAST:  # some of the block came from elsewhere
            self._compare(record, sequence)
            record.rows = []
        if not record.rows:  # which begin with a block
            seen = seen.part(slice(-(seen.first // EVERY) % BLOCK_ROWS, None))
        if len(seen):
            record.rows.append(seen)
            record.behind = seen.first - _LAST + len(seen) * EVERY
        # Precision is raised behind the prompt, which is compared at its end.
        is_read = sequence.computed >= sequence.prompt_tokens
        if sum(map(len, record.rows)) >= (BLOCK_ROWS if is_read else _ENOUGH):
            self._compare(record, sequence)
        elif not is_read:
            self._unread.add(sequence.number)

    def _compare(self, record: _Record, sequence: SequenceState) -> None:
        """Look at the blocks of a record that are complete."""
        count = sum(map(len, record.rows))
        whole = count // BLOCK_ROWS * BLOCK_ROWS
        if not whole:
            return
        rows = _floats(record.rows)
        last = record.rows[-1]
        record.rows = [last.part(slice(len(last) - count + whole, None))] if count > whole else []
        end = record.behind - count * EVERY
        for sums in self._statistics.sums(rows[:whole]):
            if record.window_end != end:
                record.window.clear()
            record.window.append(sums)
            record.window_end = end = end + BLOCK_TOKENS
            if self._is_beyond(record):
                self._raise(sequence, end)
                return

    def _is_beyond(self, record: _Record) -> bool:
        found = distance(record.window)
        self.account.windows += 1
        self.account.largest_kl = max(self.account.largest_kl, found.kl)
        return self._statistics.is_beyond(found, len(record.window))

    def _raise(self, sequence: SequenceState, end: int) -> None:
        """Positions up to `end` tell that a sequence drifts."""
        prompt = sequence.prompt_tokens
        sequence.raised_at = prompt if end <= prompt else end + MOST_DRAFTS
        self.account.requests += 1
        self.ended(sequence.number)

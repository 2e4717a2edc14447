"""Watches activations of requests, and says from where on one is computed in higher precision.

What is found depends on a request's tokens alone: rows are those of fixed positions, blocks and
windows begin at fixed positions, and precision is raised behind the prompt, or so many positions
behind a window that no step with draft tokens has begun them.  So it does not depend on chunks, on
draft tokens or on who else is in a step.  Tokens whose KV came from the prefix cache are not
computed, and not seen.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.model import MOST_DRAFTS
from hmt.contracts.step import SchedulerOutput, Step
from hmt.engine.drift.account import DriftAccount
from hmt.engine.drift.statistics import (
    BLOCK_TOKENS,
    EVERY,
    WINDOW,
    ActivationStatistics,
    BlockSums,
    distance,
)
from hmt.engine.scheduling.sequence import PromptEnd, SequenceState


class _Row(NamedTuple):
    sequence: int
    position: int
    numbers: Tensor


@dataclass(slots=True)
class _Record:
    """What was seen of a request.

    behind   the position behind the last row
    rows     of the block that is not complete
    window   the last complete blocks, and behind which position they end
    """

    behind: int = 0
    rows: list[Tensor] = field(default_factory=list)
    window: deque[BlockSums] = field(default_factory=lambda: deque(maxlen=WINDOW))
    window_end: int = 0

    def copied(self) -> "_Record":
        """The same for another request."""
        return _Record(self.behind, list(self.rows), self.window.copy(), self.window_end)


class RowSampler:
    """Keeps some rows of a step: of each `EVERY` positions of a sequence the last."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []

    def see(self, step: Step, hidden: Tensor) -> None:
        """Hidden states [tokens, ...] of a step behind the last layer; they may change later."""
        places, found = list[int](), list[tuple[int, int]]()
        of_images = set() if step.image_rows is None else set(step.image_rows.tolist())
        for run in step.segments:
            for position in range(run.start | (EVERY - 1), run.context, EVERY):
                place = run.offset + position - run.start
                if place not in of_images:  # calibration is text
                    places.append(place)
                    found.append((run.sequence, position))
        self.rows = []
        if places:
            rows = hidden[places].flatten(1).float().cpu()
            self.rows = [_Row(*one, row) for one, row in zip(found, rows, strict=True)]


class RowRecorder(RowSampler):
    """Keeps them of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []

    @override
    def see(self, step: Step, hidden: Tensor) -> None:
        super().see(step, hidden)
        self._seen += [row.numbers for row in self.rows]

    def recorded(self) -> Tensor:
        """Rows in the order of steps: f32 [rows, channels]."""
        return torch.stack(self._seen) if self._seen else torch.empty(0, 0)


class ActivationWatch(RowSampler):
    """Judges requests by rows of their steps.  For the engine's thread only.

    account   since the last reset
    """

    def __init__(self, statistics: ActivationStatistics) -> None:
        super().__init__()
        self._statistics = statistics
        self._records: dict[int, _Record] = {}  # by number of the request
        # Of prompts with which others begin later.
        self._prompts: WeakKeyDictionary[PromptEnd, tuple[int | None, _Record]]
        self._prompts = WeakKeyDictionary()
        self.account = DriftAccount()

    def computed(self, output: SchedulerOutput, state: Callable[[int], SequenceState]) -> None:
        """Look at rows of the step that was seen last, of tokens that count as computed by now.

        Those of draft tokens stay until a later call, or the next step.  Changes `raised_at` of
        states.
        """
        if not self.rows:
            return
        requests = {segment.sequence: segment.request for segment in output.segments}
        later = []
        for row in self.rows:
            sequence = state(requests[row.sequence]) if row.sequence in requests else None
            if sequence is None or sequence.finished or sequence.raised_at is not None:
                continue
            if row.sequence != sequence.kv or row.position >= sequence.computed:
                later.append(row)
                continue
            self._look(self._records.setdefault(sequence.number, _Record()), row, sequence)
        self.rows = later

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

    def _look(self, record: _Record, row: _Row, sequence: SequenceState) -> None:
        if row.position < record.behind:
            return  # computed again
        if row.position != record.behind + EVERY - 1:  # some of its block came from elsewhere
            record.rows = []
        record.behind = end = row.position + 1
        begins = end % BLOCK_TOKENS == EVERY
        if begins or record.rows:
            record.rows.append(row.numbers)
        if len(record.rows) * EVERY < BLOCK_TOKENS:
            return
        if record.window_end != end - BLOCK_TOKENS:
            record.window.clear()
        record.window.append(self._statistics.sums(torch.stack(record.rows)))
        record.rows, record.window_end = [], end
        self._judge(record, sequence)

    def _judge(self, record: _Record, sequence: SequenceState) -> None:
        found, end = distance(list(record.window)), record.window_end
        self.account.windows += 1
        self.account.largest_kl = max(self.account.largest_kl, found.kl)
        if self._statistics.is_beyond(found, len(record.window)):
            prompt = sequence.prompt_tokens
            sequence.raised_at = prompt if end <= prompt else end + MOST_DRAFTS
            self.account.requests += 1
            self.ended(sequence.number)

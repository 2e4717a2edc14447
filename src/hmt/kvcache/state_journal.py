"""Recurrent state that can go back by some tokens: a journal of what these would have changed.

A step does not write the state behind its drafts, which may be taken back.  It leaves their inputs
in the journal, and the next step advances the state by those that have stayed before it computes
its own.  Layers that the CPU computes in one call do both there (csrc/sublayers/mixers.cpp); for
others `StepReplay` has the kernels compute what is pending in front of a step's tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hmt.contracts.step import Segment
from hmt.contracts.store import StateRun, StateUpdate
from hmt.kernels import ops


class StateJournal:
    """Inputs of tokens that may be taken back, of the last ones of each slot's sequence.

    drafts    tokens that there is room for, of each slot
    numbers   f32, of all slots and layers
    """

    def __init__(self, inputs: Mapping[int, int], slots: int, drafts: int) -> None:
        """`inputs`: numbers of a token, by layer; none: no token is ever taken back."""
        self.drafts = drafts if inputs else 0
        self._inputs = dict(inputs)
        self._slots = slots
        self._layers: dict[int, Tensor] = {}
        self.numbers = slots * self.drafts * sum(inputs.values())

    def lie_in(self, memory: Tensor) -> None:
        """Have this memory, f32 [numbers]."""
        shape = self._slots, self.drafts
        parts = memory.split([self._slots * self.drafts * n for n in self._inputs.values()])
        for layer, part in zip(self._inputs, parts, strict=True):
            self._layers[layer] = part.view(*shape, self._inputs[layer])

    def of(self, layer: int) -> Tensor:
        """[slots, drafts, numbers] of a layer."""
        return self._layers[layer]

    def copy(self, slot: int, to: int) -> None:
        """Let a slot have what another one has."""
        for entries in self._layers.values():
            entries[to] = entries[slot]


@dataclass(frozen=True, slots=True)
class JournaledRun:
    """A run of a step, whose state is in `slot`.

    pending   tokens in the journal that come before the run, and that the state lacks
    copy      (pending tokens, slot): behind so many of these, the state is copied to another slot
    """

    slot: int
    segment: Segment
    pending: int = 0
    copy: tuple[int, int] | None = None

    @property
    def lags(self) -> bool:
        """Whether the state is behind its sequence, or will be."""
        return self.pending > 0 or self.segment.drafts > 0

    @property
    def run(self) -> StateRun:
        """As kernels have it."""
        part = self.segment
        return StateRun(
            self.slot, part.offset, part.length, part.start == 0, part.drafts, self.pending
        )


@dataclass(slots=True)
class _Part:
    """Tokens by which states are advanced in one call, some of each run.

    entries   of the journal, of which the call has some: numbers of the flat [slots * drafts]
    tokens    of the step, the same
    order     of what the call has, in turn: whether it is of the journal, and which of these
    results   indices of what belongs to `tokens`
    copies    slots that are copied afterwards, and to which
    """

    runs: list[StateRun] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    order: list[tuple[bool, int]] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, run: StateRun, entries: range) -> None:
        """Tokens of the journal, and then the run's own, if it has any."""
        offset, own = len(self.order), range(run.offset, run.offset + run.length)
        self.order += ((True, len(self.entries) + n) for n in range(len(entries)))
        self.order += ((False, len(self.tokens) + n) for n in range(len(own)))
        self.entries += entries
        self.tokens += own
        self.results += range(offset + len(entries), len(self.order))
        length = len(entries) + run.length
        self.runs.append(StateRun(run.slot, offset, length, run.begins, run.drafts))

    def indices(self, where: torch.device) -> tuple[Tensor, ...]:
        """`entries`, `tokens`, `order` and `results`, int64 on a device."""
        order = [len(self.tokens) * of_journal + index for of_journal, index in self.order]
        lists = self.entries, self.tokens, order, self.results
        return tuple(torch.tensor(numbers, dtype=torch.int64).to(where) for numbers in lists)


class StepReplay:
    """What a step does to states of which some are behind their sequences, for all layers.

    copies   whether states are copied on the way
    layers   that have done it
    """

    def __init__(self, runs: Sequence[JournaledRun], drafts: int, where: torch.device) -> None:
        """`drafts`: tokens that a journal has room for, of each slot."""
        self.copies = any(run.copy is not None for run in runs)
        self.layers = 0
        self._runs = list(runs)
        self._current = ops.StateRuns(run.run for run in runs if not run.pending)
        self._drafts = drafts
        self._where = where
        # Made when the first layer asks: those of one compiled call do not.
        self._parts: list[tuple[_Part, ops.StateRuns, tuple[Tensor, ...]]] | None = None
        self._left: tuple[Tensor, Tensor] | None = None  # drafts' tokens, and their entries

    def __call__(
        self,
        journal: Tensor,
        tensors: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        compute: StateUpdate,
    ) -> Tensor:
        """As `RecurrentState.advance`, with a layer's journal [slots, drafts, numbers] f32."""
        flat = journal.flatten(0, 1)
        if self._parts is None:
            parts = list(self._divided())
            made = [(part, ops.StateRuns(part.runs), part.indices(self._where)) for part in parts]
            self._parts, self._left = made, self._drafts_left()
        widths = [numbers[0].numel() for numbers in inputs]
        # Where nothing is pending, as in prompts, nothing is copied.
        out = compute(inputs, self._current) if self._current else None
        for part, runs, (entries, tokens, order, results) in self._parts:
            known = flat[entries].split(widths, dim=1)
            given = [
                torch.cat((new[tokens], old.to(new.dtype).view(-1, *new.shape[1:])))[order]
                for old, new in zip(known, inputs, strict=True)
            ]
            found = compute(given, runs)
            if out is None:
                out = found.new_empty((len(inputs[0]), *found.shape[1:]))
            out[tokens] = found[results]
            for slot, to in part.copies:
                for tensor in tensors.values():
                    tensor[to] = tensor[slot]
        assert self._left is not None and out is not None, "a step without a run"
        drafts, places = self._left
        if len(drafts):
            left = [numbers[drafts].flatten(1).float() for numbers in inputs]
            flat[places] = torch.cat(left, dim=1)
        self.layers += 1
        return out

    def _divided(self) -> Iterator[_Part]:
        """What is pending, as far as copies are made of it; then the rest, and the runs' tokens."""
        early, rest = _Part(), _Part()
        for run in self._runs:
            if not run.pending:
                continue
            first, done = run.slot * self._drafts, 0
            if run.copy is not None:
                done, to = run.copy
                early.add(StateRun(run.slot, 0, 0, False), range(first, first + done))
                early.copies.append((run.slot, to))
            rest.add(run.run, range(first + done, first + run.pending))
        yield from (part for part in (early, rest) if part.runs)

    def _drafts_left(self) -> tuple[Tensor, Tensor]:
        """Tokens of the step that are drafts, and entries of the journal that they are left in."""
        pairs = [
            (run.run.offset + run.run.stays + number, run.slot * self._drafts + number)
            for run in self._runs
            for number in range(run.segment.drafts)
        ]
        numbers = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(self._where)
        return numbers[:, 0], numbers[:, 1]

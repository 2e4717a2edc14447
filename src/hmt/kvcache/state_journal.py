"""Recurrent state that can go back by some tokens: a journal of what these would have changed.

A step does not write the state behind tokens that may be taken back.  It leaves their inputs in the
journal, and the next step advances the state by those that have stayed before it computes its own.
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
        """[slots * drafts, numbers] of a layer."""
        return self._layers[layer].flatten(0, 1)

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
    def usual(self) -> StateRun:
        """The run where it does not lag."""
        segment = self.segment
        return StateRun(self.slot, segment.offset, segment.length, segment.start == 0)

    @property
    def guesses(self) -> Iterator[tuple[int, int]]:
        """The run's guesses from 0 on, each with its index in the step's flat arrays."""
        end = self.segment.offset + self.segment.length
        return enumerate(range(end - self.segment.drafts, end))


@dataclass(slots=True)
class _Part:
    """Tokens by which states are advanced in one call, some of each run.

    entries   of the journal, of which the call has some: numbers of the flat [slots * drafts]
    tokens    of the step, the same
    order     indices of these, and behind them of those, as the call has them
    results   indices of what belongs to `tokens`
    copies    slots that are copied afterwards, and to which
    """

    runs: list[StateRun] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    order: list[tuple[bool, int]] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self, slot: int, entries: range, tokens: range, *, begins: bool, advances: bool = True
    ) -> None:
        """A run of tokens of the journal, and then of the step."""
        offset, length = len(self.order), len(entries) + len(tokens)
        if not length:
            return
        self.order += [(False, len(self.entries) + n) for n in range(len(entries))]
        self.order += [(True, len(self.tokens) + n) for n in range(len(tokens))]
        self.entries += entries
        self.tokens += tokens
        self.results += range(offset + len(entries), offset + length)
        self.runs.append(StateRun(slot, offset, length, begins, advances))

    def indices(self, where: torch.device) -> tuple[Tensor, ...]:
        """`entries`, `tokens`, `order` and `results`, int64 on a device."""
        count = len(self.entries)
        order = [count * of_step + index for of_step, index in self.order]
        lists = self.entries, self.tokens, order, self.results
        return tuple(torch.tensor(numbers, dtype=torch.int64).to(where) for numbers in lists)


class StepReplay:
    """What a step does to states of which some are behind their sequences, for all layers.

    layers   that have done it
    """

    def __init__(self, runs: Sequence[JournaledRun], drafts: int, where: torch.device) -> None:
        """`drafts`: tokens that a journal has room for, of each slot."""
        self.layers = 0
        self._usual = ops.StateRuns(run.usual for run in runs if not run.lags)
        late = [run for run in runs if run.lags]
        self._parts = [
            (part.copies, ops.StateRuns(part.runs), part.indices(where))
            for part in _parts(late, drafts)
            if part.runs
        ]
        pairs = [(token, run.slot * drafts + n) for run in late for n, token in run.guesses]
        numbers = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(where)
        self._guesses, self._entries = numbers[:, 0], numbers[:, 1]

    def __call__(
        self,
        journal: Tensor,
        tensors: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        compute: StateUpdate,
    ) -> Tensor:
        """As `RecurrentState.advance`, with a layer's journal [slots * drafts, numbers] f32."""
        out = compute(inputs, self._usual) if self._usual else None
        widths = [numbers[0].numel() for numbers in inputs]
        for copies, runs, (entries, tokens, order, results) in self._parts:
            known = journal[entries].split(widths, dim=1)
            given = [
                torch.cat((old.to(new.dtype).view(-1, *new.shape[1:]), new[tokens]))[order]
                for old, new in zip(known, inputs, strict=True)
            ]
            found = compute(given, runs)
            if out is None:
                out = found.new_empty((len(inputs[0]), *found.shape[1:]))
            out[tokens] = found[results]
            for slot, to in copies:
                for tensor in tensors.values():
                    tensor[to] = tensor[slot]
        guesses = [numbers[self._guesses].flatten(1).float() for numbers in inputs]
        journal[self._entries] = torch.cat(guesses, dim=1)
        self.layers += 1
        assert out is not None, "a step without a run"
        return out


def _parts(runs: Sequence[JournaledRun], drafts: int) -> Iterator[_Part]:
    """First what is behind, as far as copies are made of it; then what stays; then guesses."""
    early, stays, guesses = _Part(), _Part(), _Part()
    for run in runs:
        slot, segment, done = run.slot, run.segment, 0
        entries = range(slot * drafts, slot * drafts + run.pending)
        if run.copy is not None:
            done, to = run.copy
            early.add(slot, entries[:done], range(0), begins=False)
            early.copies.append((slot, to))
        end = segment.offset + segment.length
        tokens = range(segment.offset, end - segment.drafts)
        stays.add(slot, entries[done:], tokens, begins=segment.start == 0)
        tokens = range(end - segment.drafts, end)
        guesses.add(slot, range(0), tokens, begins=False, advances=False)
    yield from (early, stays, guesses)

"""Recurrent state against plain lists of states: drafts, forks, parking, prefixes, in any order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, repeat, takewhile
from random import Random
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from hmt.contracts.model import PAGE_TOKENS, StateTensor
from hmt.contracts.step import SegmentRequest, Step
from hmt.contracts.store import RecurrentState, StateRun
from hmt.kvcache.recurrent_state import StateStore
from hmt.kvcache.sequence_slots import SequenceSlots

DRAFTS, SLOTS, SPARE = 3, 3, 4
PRIME = 8191  # numbers below it times 31 are exact in f32
LAYERS = (0, 5)


def next_state(layer: int, state: int, token: int) -> int:
    """What a token makes of a layer's state."""
    return (state * 31 + token + layer) % PRIME


def states_of(layer: int, tokens: list[int]) -> list[int]:
    """Behind each token."""
    found, state = [], 0
    for token in tokens:
        state = next_state(layer, state, token)
        found.append(state)
    return found


def advanced(layer: int, tokens: Tensor, state: Tensor, runs: tuple[StateRun, ...]) -> Tensor:
    """As kernels do: results are the states behind tokens [n, 1], slots those before drafts."""
    out = torch.empty_like(tokens)
    for run in runs:
        held = 0 if run.begins else int(state[run.slot, 0])
        for at in range(run.length):
            held = next_state(layer, held, int(tokens[run.offset + at, 0]))
            out[run.offset + at, 0] = held
            if at + 1 == run.stays:
                state[run.slot, 0] = held
    return out


def in_one_call(layer: int, tokens: Tensor, state: RecurrentState) -> Tensor:
    """As kernels do that know the journal."""
    journal, out = state.tensors["journal"], torch.empty_like(tokens)
    for run in state.runs:
        known = journal[run.slot, : run.pending].clone()
        own = tokens[run.tokens]
        if run.drafts:
            journal[run.slot, : run.drafts] = own[run.stays :]
        whole = StateRun(run.slot, 0, run.pending + run.length, run.begins, run.drafts)
        found = advanced(layer, torch.cat((known, own)), state.tensors["number"], (whole,))
        out[run.tokens] = found[run.pending :]
    return out


class Memory:
    """A Pool whose memory holds numbers that no state is."""

    def allocate(self, nbytes: int) -> SimpleNamespace:
        return SimpleNamespace(tensor=torch.full((nbytes,), 0x47, dtype=torch.uint8))

    def free(self, buffer: SimpleNamespace) -> None:
        """Nothing is kept."""


@dataclass
class CachedSequence:
    """A sequence: the tokens whose states the store has, of which `prompt` are the prompt's."""

    sequence: int
    prompt: int
    tokens: list[int] = field(default_factory=list)
    waits: bool = False


RNG = st.integers(0, 1 << 16).map(Random)


def tokens_of(rng: Random, number: int) -> list[int]:
    """Few kinds, so that sequences may begin alike."""
    return [rng.randrange(2) for _ in range(number)]


class Machine(RuleBasedStateMachine):
    """Steps, rollbacks, forks, parking, ends and beginnings of sequences, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SequenceSlots(SLOTS, 1, SPARE)
        states = {layer: (StateTensor("number", (1,), inputs=1),) for layer in LAYERS}
        self.store = StateStore(
            states, self.slots, Memory(), inputs=dict.fromkeys(LAYERS, 1), drafts=DRAFTS,
            checkpoints=True, chunk=PAGE_TOKENS,
        )  # fmt: skip
        assert self.store.checkpoints is not None
        self.checkpoints = self.store.checkpoints
        self.numbers = count(1)  # handles, and pages
        self.sequences: list[CachedSequence] = []
        self.pages: dict[tuple[int, ...], int] = {}  # by all tokens up to a page's end

    def known(self, tokens: Sequence[int]) -> np.ndarray:
        """Pages of the longest beginning that others left."""
        borders = range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS)
        found = takewhile(lambda page: page is not None, map(self.page, repeat(tokens), borders))
        return np.array(list(found), dtype=np.int64)

    def page(self, tokens: Sequence[int], border: int) -> int | None:
        return self.pages.get(tuple(tokens[:border]))

    def run(self, parts: list[tuple[CachedSequence, list[int], int]], *, one_call: bool) -> None:
        """Tokens behind those of each cached, the last ones of which are drafts."""
        step = Step.build(
            [
                SegmentRequest(
                    cached.sequence, len(cached.tokens), tokens, 1, drafts=drafts,
                    whole=max(cached.prompt, 1),
                )
                for cached, tokens, drafts in parts
            ]
        )  # fmt: skip
        numbers = torch.tensor([[float(n)] for _, tokens, _ in parts for n in tokens])
        for layer in LAYERS:
            state = self.store.of(layer, step)
            if one_call and not state.copies:
                found = in_one_call(layer, numbers, state)
            else:
                found = state.advance(
                    (numbers,),
                    lambda given, runs, layer=layer, state=state: advanced(
                        layer, given[0], state.tensors["number"], tuple(runs)
                    ),
                )
            wanted = [
                states_of(layer, cached.tokens + tokens)[len(cached.tokens) :]
                for cached, tokens, _ in parts
            ]
            assert found[:, 0].tolist() == [float(n) for row in wanted for n in row]
        for cached, tokens, _ in parts:
            cached.tokens += tokens

    @rule(rng=RNG)
    def open(self, rng: Random) -> None:
        if not self.slots.can_open(1):
            return
        prompt = list(rng.choice([(), *sorted(self.pages)])) + tokens_of(rng, rng.randint(1, 20))
        ids = self.known(prompt[:-1])
        ids = ids[: self.checkpoints.longest(ids)]
        slot = self.checkpoints.slot_behind(int(ids[-1])) if len(ids) else None
        cached = CachedSequence(next(self.numbers), len(prompt), prompt[: len(ids) * PAGE_TOKENS])
        self.slots.open(cached.sequence, 1)
        if slot is not None:
            self.store.restore(cached.sequence, slot, len(cached.tokens))
        self.sequences.append(cached)
        rest = prompt[len(cached.tokens) :]
        for first in range(0, len(rest), PAGE_TOKENS):
            self.run([(cached, rest[first : first + PAGE_TOKENS], 0)], one_call=bool(first))

    @precondition(lambda self: any(not cached.waits for cached in self.sequences))
    @rule(rng=RNG, times=st.integers(1, 12))
    def decode(self, rng: Random, times: int) -> None:
        """A token of each and drafts behind it, of which any number stays."""
        for _ in range(times):
            parts = []
            for cached in self.sequences:
                if not cached.waits and rng.random() < 0.7:
                    drafts = rng.randint(0, DRAFTS)
                    parts.append((cached, tokens_of(rng, 1 + drafts), drafts))
            if not parts:
                continue
            self.run(parts, one_call=rng.random() < 0.5)
            for cached, _, drafts in parts:
                self.take_back(cached, rng.randint(0, drafts))

    @precondition(lambda self: self.sequences)
    @rule(rng=RNG)
    def take_back_more(self, rng: Random) -> None:
        """Of what stayed, as long as no step has followed."""
        cached = rng.choice(self.sequences)
        if len(cached.tokens) > 1 and self.store.can_rollback(
            cached.sequence, len(cached.tokens) - 1
        ):
            self.take_back(cached, 1)

    def take_back(self, cached: CachedSequence, wrong: int) -> None:
        del cached.tokens[len(cached.tokens) - wrong :]
        self.store.rollback(cached.sequence, len(cached.tokens))

    @precondition(lambda self: self.sequences)
    @rule(rng=RNG)
    def fork(self, rng: Random) -> None:
        if self.slots.can_open(1):
            cached = rng.choice(self.sequences)
            other = CachedSequence(next(self.numbers), cached.prompt, list(cached.tokens))
            self.slots.open(other.sequence, 1)
            self.store.copy(cached.sequence, other.sequence)
            self.sequences.append(other)

    @precondition(lambda self: self.sequences)
    @rule(rng=RNG)
    def wait_or_go_on(self, rng: Random) -> None:
        cached = rng.choice(self.sequences)
        if not cached.waits:
            cached.waits = True
            self.slots.park(cached.sequence)
        elif self.slots.can_resume(cached.sequence):
            cached.waits = False
            self.slots.resume(cached.sequence)

    @precondition(lambda self: self.sequences)
    @rule(rng=RNG, keeps=st.booleans())
    def end(self, rng: Random, keeps: bool) -> None:
        cached = rng.choice(self.sequences)
        self.sequences.remove(cached)
        if keeps:
            for border in range(PAGE_TOKENS, len(cached.tokens) + 1, PAGE_TOKENS):
                self.pages.setdefault(tuple(cached.tokens[:border]), next(self.numbers))
            self.store.keep(cached.sequence, self.known(cached.tokens))
        self.slots.close(cached.sequence)

    @precondition(lambda self: self.pages)
    @rule(rng=RNG)
    def forget(self, rng: Random) -> None:
        """A page, and those behind it."""
        gone = rng.choice(sorted(self.pages))
        for key in [key for key in self.pages if key[: len(gone)] == gone]:
            self.checkpoints.forget_pages(np.array([self.pages.pop(key)]))

    @invariant()
    def what_stayed_cannot_be_lost(self) -> None:
        for cached in self.sequences:
            assert self.store.can_rollback(cached.sequence, len(cached.tokens))
            assert not self.store.can_rollback(cached.sequence, len(cached.tokens) + 1)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)

"""A proposer for tests: it knows how sequences go on, and is wrong as often as it is told to be."""

import random
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from hmt.engine import LoadedModel
from hmt.engine.speculation.draft import Draft, Proposer, Worth
from hmt_bench.open_gate import OpenGate


class Oracle:
    """A Proposer that knows some sequences, and guesses wrong with a probability."""

    needs_hidden = is_slow = False

    def __init__(self, sequences: Sequence[Sequence[int]], seed: int, wrong: float = 0.2) -> None:
        self.sequences = [list(one) for one in sequences]
        self._random, self._wrong = random.Random(seed), wrong

    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        """A random number of tokens."""
        known = next((one for one in self.sequences if one[: len(tokens)] == list(tokens)), [])
        right = known[len(tokens) : len(tokens) + self._random.randint(0, most)]
        guesses = [16 + t % 200 if self._random.random() < self._wrong else t for t in right]
        if not right and self._random.random() < 0.3:
            guesses = [self._random.randrange(16, 250) for _ in range(min(3, most))]
        # Others, of which one is right where the first is wrong, and may begin as the first does.
        some = [self._random.randrange(16, 250)], right[: self._random.randint(0, 3)]
        others = tuple(_draft(one) for one in self._random.sample(some, 2) if one and guesses)
        return replace(_draft(guesses), alternatives=others)

    def observe(self, number: int, tokens: Sequence[int], start: int, hidden: Tensor) -> None:
        """See Proposer."""

    def ended(self, number: int) -> None:
        """See Proposer."""


def _draft(tokens: Sequence[int]) -> Draft:
    return Draft(tuple(tokens), ("oracle",) * len(tokens))


def always_guess(model: LoadedModel, proposer: Proposer) -> None:
    """Let a model verify all that `proposer` guesses."""
    model._core.speculator._proposer = proposer
    model._core.speculator._gate = OpenGate()

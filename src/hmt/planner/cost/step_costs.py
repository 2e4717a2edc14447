"""Costs of many steps that differ little, such as a simulation asks for.

A step's cost is looked up by its tokens and by contexts on a grid; between two points of it the
cost is a straight line, as it is but where another part begins to bound the step.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from hmt.base.errors import ConfigError
from hmt.planner.cost.cost_model import CostModel

PARTS = ("GPU", "CPU", "link", "disk", "overhead")
MEMORIES = ("GPU", "CPU", "link", "disk")

_FIRST = 64  # positions: below, the grid has one distance
_PER_DOUBLING = 8  # points of the grid from there on
_TEXTS = 8  # above, they are counted in eights
_FEW_TOKENS = 32  # below, each number has a point


class StepCosts:
    """Seconds, busy seconds by part and bytes by memory, as one array."""

    def __init__(self, model: CostModel) -> None:
        """Raises ConfigError at the first step whose time the machine's rates do not tell."""
        self._point = cache(self._uncached)
        self._model = model

    def decode(self, users: int, context: float) -> tuple[NDArray[np.float64], str]:
        """A step of one token for each of `users`, who have `context` positions on average."""
        low, high, share = _around(context)
        before, after = self._point(users, users, low, None), self._point(users, users, high, None)
        return _between(before, after, share)

    def mixed(
        self, tokens: int, sequences: int, context: float, seen: float
    ) -> tuple[NDArray[np.float64], str]:
        """A step with pieces of prompts; see CostModel.mixed."""
        if sequences > _TEXTS:  # what they read together is the same
            fewer = sequences // _TEXTS * _TEXTS
            sequences, context = fewer, context * sequences / fewer
        first, last, share = _around_tokens(tokens)
        low, high, along = _around(context)
        attended = _nearest(seen)
        found = []
        for count in dict.fromkeys((max(sequences, first), max(sequences, last))):
            before = self._point(count, sequences, low, attended)
            found.append(_between(before, self._point(count, sequences, high, attended), along))
        return _between(found[0], found[-1], share)

    def _uncached(
        self, tokens: int, sequences: int, context: float, seen: float | None
    ) -> tuple[NDArray[np.float64], str]:
        if seen is None:
            cost = self._model.decode(sequences, context)
        else:
            cost = self._model.mixed(tokens, sequences, context, seen)
        if not cost.seconds:
            raise ConfigError(
                "nothing can be simulated: rates of memory, of the disk or of arithmetic are not "
                "known of this machine (hmt probe)"
            )
        parts = [cost.busy_s.get(part, 0.0) for part in PARTS]
        nbytes = [cost.nbytes.get(memory, 0.0) for memory in MEMORIES]
        return np.array([cost.seconds, *parts, *nbytes]), cost.limit


def _between(
    before: tuple[NDArray[np.float64], str], after: tuple[NDArray[np.float64], str], share: float
) -> tuple[NDArray[np.float64], str]:
    limit = before[1] if share < 0.5 else after[1]
    return before[0] + share * (after[0] - before[0]), limit


def _around_tokens(tokens: int) -> tuple[int, int, float]:
    """The same for a step's tokens: a grid of whole pages, of few points where there are many."""
    if tokens < _FEW_TOKENS:
        return tokens, tokens, 0.0
    unit = 1 << max(4, tokens.bit_length() - 4)
    low = tokens // unit * unit
    return low, low + unit, (tokens - low) / unit


def _around(context: float) -> tuple[float, float, float]:
    """The points of the grid below and above, and how far it is between them, 0 to 1."""
    if context < _FIRST:
        return 0.0, float(_FIRST), context / _FIRST
    place = _place(context)
    low, high = _at(place), _at(place + 1)
    return low, high, (context - low) / (high - low)


def _nearest(positions: float) -> float:
    low, high, share = _around(positions)
    return low if share < 0.5 else high


def _place(context: float) -> int:
    place = int(np.log2(context / _FIRST) * _PER_DOUBLING)
    return place + (_at(place + 1) <= context) - (_at(place) > context)


def _at(place: int) -> float:
    return float(_FIRST * 2.0 ** (place / _PER_DOUBLING))

"""Bits for each kind of linear layer in each layer of a model, by measured loss per byte.

Every choice begins with the fewest bytes.  What lowers the loss most for each byte more is bought
first (the convex hull of each choice's options, which is what a Lagrange multiplier finds); what
is left in the end buys whatever still fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

PUBLISHED: Final = 16  # stands for a weight that stays as it is


@dataclass(frozen=True, slots=True)
class Option:
    """One width for a group of weights: what it takes in a file, and what it loses."""

    bits: int
    nbytes: int
    loss: float


def choose(groups: Sequence[Sequence[Option]], budget: int) -> list[Option] | None:
    """One option of each group, together within `budget` bytes; None where the least do not fit.

    Equal arguments give equal choices.
    """
    ladders = [_hull(options) for options in groups]
    chosen = [0] * len(ladders)
    left = budget - sum(ladder[0].nbytes for ladder in ladders)
    if left < 0:
        return None
    steps: list[tuple[float, int]] = []
    for number, ladder in enumerate(ladders):
        _offer(steps, ladder, number, 0)
    while steps:
        _, number = heappop(steps)
        ladder, at = ladders[number], chosen[number]
        cost = ladder[at + 1].nbytes - ladder[at].nbytes
        if cost > left:
            continue
        left -= cost
        chosen[number] = at + 1
        _offer(steps, ladder, number, at + 1)
    found = [ladder[at] for ladder, at in zip(ladders, chosen, strict=True)]
    _fill(found, groups, left)
    return found


def _hull(options: Sequence[Option]) -> list[Option]:
    """Options by rising bytes, each step of which lowers the loss less for a byte."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.nbytes, option.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(one: Option, other: Option) -> float:
    """Loss that is saved for a byte more."""
    return (one.loss - other.loss) / (other.nbytes - one.nbytes)


def _offer(steps: list[tuple[float, int]], ladder: list[Option], number: int, at: int) -> None:
    if at + 1 < len(ladder):
        heappush(steps, (-_slope(ladder[at], ladder[at + 1]), number))


def _fill(found: list[Option], groups: Sequence[Sequence[Option]], left: int) -> None:
    """Exchange options for better ones as long as one fits in what is left, in place."""
    while True:
        best: tuple[float, int, Option] | None = None
        for number, options in enumerate(groups):
            now = found[number]
            for option in options:
                gain = now.loss - option.loss
                if option.nbytes - now.nbytes <= left and gain > (best[0] if best else 0):
                    best = gain, number, option
        if best is None:
            return
        _, number, option = best
        left -= option.nbytes - found[number].nbytes
        found[number] = option

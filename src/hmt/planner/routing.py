"""How many experts a step needs, and how many of them a cache has."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_MANY = 64  # experts of a layer: from here on choices are as uneven as the published ones


@dataclass(frozen=True, slots=True)
class HitCurve:
    """The share of chosen experts that a cache of a share of them has.

    points   (residency, hits), both ascending from (0, 0) to (1, 1); between them it is straight
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        assert self.points[0] == (0.0, 0.0) and self.points[-1] == (1.0, 1.0)
        assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.points))

    def hits(self, residency: float) -> float:
        """At a residency of 0 to 1."""
        for (left, low), (right, high) in pairwise(self.points):
            if residency < right:
                return low + (high - low) * max(0.0, residency - left) / (right - left)
        return 1.0


UNIFORM = HitCurve(((0.0, 0.0), (1.0, 1.0)))
# Published for models of many small experts: see design.md, decision 2.
PUBLISHED = HitCurve(((0.0, 0.0), (0.06, 0.37), (0.25, 0.81), (0.64, 0.96), (1.0, 1.0)))
# Of 32 experts, four chosen: `hmt bench cache` on four kinds of text, the policy "heat".
FEW = HitCurve(
    ((0.0, 0.0), (0.0625, 0.09), (0.125, 0.29), (0.25, 0.53), (0.5, 0.79), (0.75, 0.93), (1.0, 1.0))
)


def usual_curve(experts: int) -> HitCurve:
    """For a layer of so many experts, where no trace tells."""
    return PUBLISHED if experts >= _MANY else FEW


def measured_curve(residencies: Sequence[float], rates: Sequence[float]) -> HitCurve:
    """Through measured points, ascending; chance never makes it fall."""
    points, best = [(0.0, 0.0)], 0.0
    for residency, rate in zip(residencies, rates, strict=True):
        best = min(1.0, max(best, rate))
        if points[-1][0] < residency < 1:
            points.append((residency, best))
    return HitCurve((*points, (1.0, 1.0)))


@dataclass(frozen=True, slots=True)
class Needed:
    """Experts of one layer that a step reads, on average: those in a cache, and the others."""

    cached: float
    absent: float


def needed_experts(
    experts: int, chosen: int, tokens: float, cached: float, curve: HitCurve
) -> Needed:
    """For `tokens` that choose `chosen` of `experts` each, and a cache of `cached` of them.

    Experts in the cache are chosen as often as the curve says, each of them equally; and so are
    the others.  Several tokens choose the same ones: a step reads their union.
    """
    if not experts or not chosen:
        return Needed(0.0, 0.0)
    # No token chooses an expert twice: a cache of one never has two of its choices.
    hits = min(curve.hits(cached / experts), cached / chosen)
    return Needed(
        _union(cached, hits * chosen, tokens), _union(experts - cached, (1 - hits) * chosen, tokens)
    )


def _union(count: float, chosen: float, tokens: float) -> float:
    """How many of `count` are chosen at least once, when each token takes `chosen` of them."""
    if count <= 0:
        return 0.0
    return count * float(1 - (1 - min(1.0, chosen / count)) ** tokens)

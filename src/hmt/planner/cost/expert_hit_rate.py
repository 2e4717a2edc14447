"""How many experts a step needs, and how many of them a cache has."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hmt.base.errors import ConfigError

# Of 2 to 8 sequences through one cache of a third of the experts or less, on recorded and on
# synthetic traces: misses are predicted 26% too few to 24% too many, 5% off in the middle.  As if
# all sequences had one working set (0) it was a tenth to all of them, 30% too few in the middle.
USUAL_INDEPENDENCE = 0.95
# Of a layer's experts, those that steps of a size have used: from here on the engine asks for all
# of them ahead.  With less the disk reads too much: 64 tokens of a small trained model used 70% of
# 32, which took 30% more bytes, and 512 of one with random weights a half.
REQUESTED_AHEAD = 0.9
_MANY = 64  # experts of a layer: from here on choices are as uneven as the published ones


@dataclass(frozen=True, slots=True)
class HitCurve:
    """The share of chosen experts that a cache of a share of them has.

    points        (residency, hits), both ascending from (0, 0) to (1, 1); between them it is
                  straight
    origin        where it comes from, for people
    independence  how independently several sequences choose: 1: as chance has it; 0: all the same
                  experts
    """

    points: tuple[tuple[float, float], ...]
    origin: str = ""
    independence: float = USUAL_INDEPENDENCE

    def __post_init__(self) -> None:
        ascend = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.points))
        if not ascend or (self.points[0], self.points[-1]) != ((0.0, 0.0), (1.0, 1.0)):
            raise ConfigError(
                f"hit rates {self.points} of a cache must ascend from (0, 0) to (1, 1): measure "
                "them again"
            )

    def hits(self, residency: float) -> float:
        """At a residency of 0 to 1."""
        for (left, low), (right, high) in pairwise(self.points):
            if residency < right:
                return low + (high - low) * max(0.0, residency - left) / (right - left)
        return 1.0


UNIFORM = HitCurve(((0.0, 0.0), (1.0, 1.0)))
# Published for models of many small experts: see design.md, decision 2.
PUBLISHED = HitCurve(
    ((0.0, 0.0), (0.06, 0.37), (0.25, 0.81), (0.64, 0.96), (1.0, 1.0)),
    "published figures of models with many small experts",
)
# Of 32 experts, four chosen: `python -m hmt_bench cache` on four kinds of text, the policy "heat".
FEW = HitCurve(
    (
        *((0.0, 0.0), (0.0625, 0.09), (0.125, 0.29), (0.25, 0.53), (0.5, 0.79), (0.75, 0.93)),
        (1.0, 1.0),
    ),
    "a small model of 32 experts",
)


def usual_curve(experts: int) -> HitCurve:
    """For a layer of so many experts, where no trace tells."""
    return PUBLISHED if experts >= _MANY else FEW


def measured_curve(
    residencies: Sequence[float], rates: Sequence[float], origin: str = "a measurement"
) -> HitCurve:
    """Through measured points, ascending; chance never makes it fall."""
    points, best = [(0.0, 0.0)], 0.0
    for residency, rate in zip(residencies, rates, strict=True):
        best = min(1.0, max(best, rate))
        if points[-1][0] < residency < 1:
            points.append((residency, best))
    return HitCurve((*points, (1.0, 1.0)), origin)


def shared_hits(curve: HitCurve, residency: float, sequences: float = 1.0) -> float:
    """The share of chosen experts in a cache that `sequences` share; the curve is that of one.

    A cache holds what was chosen lately, and sequences choose independently: where each has chosen
    a share s of all experts lately, all together have 1 - (1 - s) ** sequences, which is what fits.
    A sequence finds what it has chosen itself (the curve at s), and of the rest what others have.
    That some experts are popular with all of them makes `sequences` count for a little less.
    """
    if residency >= 1.0 or sequences <= 1.0:
        return curve.hits(residency)
    own = own_share(residency, sequences, curve.independence)
    others = (1.0 - residency) / (1.0 - own)  # what no other text has chosen lately
    return 1.0 - (1.0 - curve.hits(own)) * others


def own_share(
    residency: float, sequences: float, independence: float = USUAL_INDEPENDENCE
) -> float:
    """The share of all experts that each of `sequences` has chosen lately, where a cache holds all.

    See HitCurve for `independence`.
    """
    return float(1.0 - (1.0 - residency) ** (max(1.0, sequences) ** -independence))


@dataclass(frozen=True, slots=True)
class Needed:
    """Experts of one layer that a step reads, on average: those in a cache, and the others."""

    cached: float
    absent: float


def needed_experts(
    experts: int,
    chosen: int,
    tokens: float,
    cached: float,
    curve: HitCurve,
    sequences: float = 1.0,
) -> Needed:
    """For `tokens` that choose `chosen` of `experts` each, and a cache of `cached` of them.

    Experts that are not in the cache are chosen as often as `shared_hits` leaves them, each of them
    equally.  Several tokens choose the same ones, those of one text more often: a step reads their
    union.  One text's tokens come one after the other, see `newly_used`.
    """
    if not experts or not chosen:
        return Needed(0.0, 0.0)
    # All that each sequence's tokens need, and then what independent sequences do.
    own = own_share(min(1.0, cached / experts), sequences, curve.independence) * experts
    own_hits = min(curve.hits(own / experts), own / chosen)
    first = _union(own, own_hits * chosen, 1.0) + _union(
        experts - own, (1 - own_hits) * chosen, 1.0
    )
    of_one = _grown(curve, experts, chosen, first, tokens / max(1.0, sequences) - 1.0)
    needed = _union(experts, of_one, max(1.0, sequences))
    if sequences > 1.0:
        # No token chooses an expert twice: a cache of one never has two of its choices.
        hits = min(shared_hits(curve, cached / experts, sequences), cached / chosen)
        absent = min(needed, _union(experts - cached, (1 - hits) * chosen, tokens))
    else:
        absent = newly_used(curve, experts, chosen, cached, tokens)
    return Needed(min(cached, max(0.0, needed - absent)), absent)


def newly_used(curve: HitCurve, experts: int, chosen: int, used: float, tokens: float) -> float:
    """How many experts beyond the `used` ones, a text's last, its next `tokens` choose.

    A text's working set grows by what a cache that holds just it would miss: ds/dt = chosen (1 -
    hits(s / experts)), which the curve's straight lines make exponentials (P. Denning, S. Schwartz,
    "Properties of the working-set model", CACM 15(3), 1972).  The first token's choices all differ.
    """
    hits = min(curve.hits(used / experts), used / chosen)
    first = used + min(1.0, tokens) * (1.0 - hits) * chosen
    return _grown(curve, experts, chosen, first, tokens - 1.0) - used


def _grown(curve: HitCurve, experts: int, chosen: int, size: float, left: float) -> float:
    """A working set of `size` experts, after the `left` tokens that come."""
    for (begin, low), (end, high) in pairwise(curve.points):
        if left <= 0 or size >= end * experts:
            continue
        slope = (high - low) / ((end - begin) * experts)  # of hits, per expert
        missed = 1.0 - low - slope * (size - begin * experts)
        last = 1.0 - high
        if slope <= 0:
            grown = min(end * experts - size, left * chosen * missed)
            left -= grown / (chosen * missed) if missed > 0 else left
        else:
            to_end = math.log(missed / last) / (chosen * slope) if last > 0 else math.inf
            grown = missed / slope * -math.expm1(-chosen * slope * min(left, to_end))
            left -= to_end
        size += grown
    return min(float(experts), size)


def _union(count: float, chosen: float, tokens: float) -> float:
    """How many of `count` are chosen at least once, when each token takes `chosen` of them."""
    if count <= 0:
        return 0.0
    return count * float(1 - (1 - min(1.0, chosen / count)) ** tokens)

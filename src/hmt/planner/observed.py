"""Hits of caches of experts as runs have had them: what one tells, and a curve through several."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from hmt.planner.routing import HitCurve, needed_experts, own_share

_GRID = 32  # points of a curve, evenly apart, beside those that were seen
_HALVINGS = 30  # of the room in which hits are looked for
_SURE = 1e-3  # hits closer to none or all than this are taken for this


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a run's cache of experts did while answers were decoded.

    experts, chosen   of a layer, and of a token in it
    residency         the share of all experts that the cache held, 0 to 1
    texts             that decoded at once, on average
    needed, missed    experts, once per layer and step; and of them, those that were not there
    """

    experts: int
    chosen: int
    residency: float
    texts: float
    needed: int
    missed: int

    def point(self) -> "SeenPoint | None":
        """The same of one text alone, as `shared_hits` has it; None where it tells nothing."""
        if not self.needed or not 0.0 < self.residency < 1.0 or not 0 < self.chosen <= self.experts:
            return None
        share = own_share(self.residency, self.texts)
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._missed(share, middle) * self.needed > self.missed:
                low = middle
            else:
                high = middle
        return SeenPoint(share, (low + high) / 2, float(self.needed))

    def _missed(self, share: float, hits: float) -> float:
        """Of what a step needs, the share that is not there where one text has `hits`."""
        texts, curve = max(1.0, self.texts), HitCurve(((0.0, 0.0), (share, hits), (1.0, 1.0)))
        cached = self.residency * self.experts
        found = needed_experts(self.experts, self.chosen, texts, cached, curve, texts)
        return found.absent / (found.absent + found.cached)


@dataclass(frozen=True, slots=True)
class SeenPoint:
    """Hits of one text with a cache of a share of all experts, 0 to 1 both.

    weight   what it counts beside others
    """

    share: float
    hits: float
    weight: float


def seen_curve(usual: HitCurve, points: Sequence[SeenPoint], origin: str = "runs") -> HitCurve:
    """Through all points, in the shape of the usual curve between and beyond them.

    Where larger caches were seen to have fewer hits, which is chance, they count together.
    """
    seen = _ascending(sorted(points, key=lambda point: point.share))
    if not seen:
        return usual
    shares = [share for share, _ in seen]
    moved = [_odds(hits) - _odds(usual.hits(share)) for share, hits in seen]
    found: list[tuple[float, float]] = [(0.0, 0.0)]
    known = {share for share, _ in usual.points} | {n / _GRID for n in range(1, _GRID)}
    for share in sorted((known | set(shares)) - {0.0, 1.0}):
        at = bisect_left(shares, share)
        if at < len(shares) and shares[at] == share:
            found.append(seen[at])
            continue
        low = seen[at - 1][1] if at else 0.0
        high = seen[at][1] if at < len(seen) else 1.0
        hits = _chance(_odds(usual.hits(share)) + _between(shares, moved, at, share))
        found.append((share, min(high, max(low, found[-1][1], hits))))
    return HitCurve((*found, (1.0, 1.0)), origin)


def _ascending(points: Sequence[SeenPoint]) -> list[tuple[float, float]]:
    """Pools neighbours until hits ascend with shares, and points of one share."""
    pools: list[list[SeenPoint]] = []
    for point in points:
        pools.append([point])
        while len(pools) > 1 and (
            _mean(pools[-2]) > _mean(pools[-1]) or pools[-2][-1].share == pools[-1][0].share
        ):
            last = pools.pop()
            pools[-1] += last
    found: dict[float, float] = {}
    for pool in pools:
        found |= {point.share: _mean(pool) for point in pool}
    return list(found.items())


def _mean(points: Sequence[SeenPoint]) -> float:
    total = sum(point.weight for point in points)
    return sum(point.hits * point.weight for point in points) / total


def _between(shares: Sequence[float], moved: Sequence[float], at: int, share: float) -> float:
    """How far the curve is moved at `share`, which comes before point `at`."""
    if at == 0 or at == len(shares):
        return moved[min(at, len(shares) - 1)]
    along = (share - shares[at - 1]) / (shares[at] - shares[at - 1])
    return moved[at - 1] + along * (moved[at] - moved[at - 1])


def _odds(chance: float) -> float:
    sure = min(1.0 - _SURE, max(_SURE, chance))
    return log(sure / (1.0 - sure))


def _chance(odds: float) -> float:
    return 1.0 / (1.0 + exp(-odds))

"""Policies over arrays: one number or two for each page."""

import numpy as np
from typing_extensions import override

from hmt.kvcache.eviction.interface import Floats, Ids, PageEvictionPolicy

_DECAY = 0.05  # per second
_THRESHOLD = (0.2, 0.6)  # without pressure, and what full pressure adds
_BLEND = 0.3  # of a new measurement, in the average over layers and steps


class LeastRecentlyUsed(PageEvictionPolicy):
    """A page is used when it gets at least its equal share of attention."""

    def __init__(self, pages: int) -> None:
        self._used_s = np.zeros(pages)

    @override
    def added(self, ids: Ids, now_s: float) -> None:
        self._used_s[ids] = now_s

    @override
    def weighed(self, ids: Ids, attention: Floats, now_s: float) -> None:
        self._used_s[ids[attention >= 1]] = now_s

    @override
    def worth(self, ids: Ids, now_s: float, pressure: float) -> Floats:
        return self._used_s[ids]


class LeastFrequentlyUsed(PageEvictionPolicy):
    """Counts how often a page got at least its equal share; of equals the older goes."""

    def __init__(self, pages: int) -> None:
        self._uses = np.zeros(pages)
        self._made_s = np.zeros(pages)

    @override
    def added(self, ids: Ids, now_s: float) -> None:
        self._uses[ids] = 0
        self._made_s[ids] = now_s

    @override
    def weighed(self, ids: Ids, attention: Floats, now_s: float) -> None:
        self._uses[ids[attention >= 1]] += 1

    @override
    def worth(self, ids: Ids, now_s: float, pressure: float) -> Floats:
        age = np.clip(now_s - self._made_s[ids], 0, None)
        return self._uses[ids] + 1 / (2 + age)


class AttentionDecayed(PageEvictionPolicy):
    """A2CR: score = attention x exp(-0.05 t), t in seconds since it was measured.

    Attention is averaged over measurements, and more than 1 counts as 1.  Pages whose score is
    below 0.2 + 0.6 x pressure go first, the oldest measurement of these first; then the others, the
    lowest score first.  New pages count as attended to until they are weighed.
    """

    def __init__(self, pages: int) -> None:
        self._attention = np.zeros(pages)
        self._at_s = np.zeros(pages)
        self._used_s = np.zeros(pages)

    @override
    def added(self, ids: Ids, now_s: float) -> None:
        self._attention[ids] = 1
        self._at_s[ids] = self._used_s[ids] = now_s

    @override
    def weighed(self, ids: Ids, attention: Floats, now_s: float) -> None:
        old = self.scores(ids, now_s)
        self._attention[ids] = (1 - _BLEND) * old + _BLEND * np.minimum(attention, 1)
        self._at_s[ids] = now_s
        self._used_s[ids[attention >= 1]] = now_s

    def scores(self, ids: Ids, now_s: float) -> Floats:
        """Attention as it has decayed until now."""
        decay: Floats = np.exp(_DECAY * np.minimum(self._at_s[ids] - now_s, 0))
        return self._attention[ids] * decay

    @override
    def worth(self, ids: Ids, now_s: float, pressure: float) -> Floats:
        least, more = _THRESHOLD
        scores = self.scores(ids, now_s)
        # Those below the threshold are ranked by last use, all of them below the others.
        below = 1 / (1 + np.clip(now_s - self._used_s[ids], 0, None)) - 2
        worth: Floats = np.where(scores < least + more * pressure, below, scores)
        return worth

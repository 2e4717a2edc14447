"""What the cache asks of a policy: which pages are worth being near."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class PageEvictionPolicy(Protocol):
    """Ranks pages by id.  Pages come, are weighed now and then, and go; ids are used again.

    A page's attention is its share of what tokens attended to, times the number of pages that they
    saw: 1 is what it would have if all pages mattered alike.
    """

    def added(self, ids: Ids, now_s: float) -> None:
        """Pages were made; nothing is known of them."""
        ...

    def weighed(self, ids: Ids, attention: Floats, now_s: float) -> None:
        """So much attention was given to pages."""
        ...

    def worth(self, ids: Ids, now_s: float, pressure: float) -> Floats:
        """What it is worth to have each of `ids` near; the least go first.

        pressure   share of the level's places that are in use
        """
        ...

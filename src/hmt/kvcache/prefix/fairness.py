"""How owners of prefixes share a cache that is full: max-min fairness, counted in pages or bytes.

The level is the one at which all demands, each cut to it, fill the cache (Bertsekas and Gallager,
Data Networks, 6.5.2).  An owner that holds more than the level evicts its own pages; one that holds
less loses none to others.
"""

from collections.abc import Mapping


def allowance(held: Mapping[str, int], owner: str, wanted: int, capacity: int) -> int:
    """The most that `owner`, who wants `wanted` in all, may hold of `capacity`.

    held   by owner; what `owner` holds now makes no difference
    """
    left = capacity
    demands = sorted([wanted, *(size for other, size in held.items() if other != owner)])
    for count, demand in zip(range(len(demands), 0, -1), demands, strict=True):
        if demand * count >= left:
            return min(wanted, left // count)
        left -= demand
    return wanted

"""Making sizes that are nearly equal equal, so that one's place serves the other."""

from collections.abc import Iterable

_WIDTH = 64  # a class is 1/64 wide: the most of a slot that is given away


def size_classes(sizes: Iterable[int]) -> dict[int, int]:
    """For each size, the largest that is at most 1/64 larger; classes do not overlap.

    Experts that are read as published differ by a page or two, as their tensors straddle pages.
    """
    classes: dict[int, int] = {}
    largest = 0
    for size in sorted(set(sizes), reverse=True):
        if largest - size > size // _WIDTH:
            largest = size
        largest = largest or size
        classes[size] = largest
    return classes

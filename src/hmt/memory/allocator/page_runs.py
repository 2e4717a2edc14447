"""A set of whole numbers that come in runs."""

from bisect import bisect_left, bisect_right


class PageRuns:
    """Disjoint runs [first, end), by number; neighbours are one.  Not thread-safe."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def add(self, first: int, end: int) -> None:
        """Put [first, end) in, which may partly be in already."""
        low, high = bisect_left(self._ends, first), bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high], self._ends[low:high] = [first], [end]

    def remove(self, first: int, end: int) -> None:
        """Take [first, end) out, of which parts may be missing."""
        low, high = self._touched(first, end)
        if low < high:
            rest = [(self._firsts[low], first), (end, self._ends[high - 1])]
            rest = [(a, b) for a, b in rest if a < b]
            self._firsts[low:high] = [a for a, _ in rest]
            self._ends[low:high] = [b for _, b in rest]

    def within(self, first: int, end: int) -> list[tuple[int, int]]:
        """The parts of [first, end) that are in."""
        low, high = self._touched(first, end)
        runs = zip(self._firsts[low:high], self._ends[low:high], strict=True)
        return [(max(a, first), min(b, end)) for a, b in runs]

    def _touched(self, first: int, end: int) -> tuple[int, int]:
        """Indices of the runs that share a number with [first, end)."""
        return bisect_right(self._ends, first), bisect_left(self._firsts, end)

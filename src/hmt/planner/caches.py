"""What the CPU's caches do to steps.

Weights that they keep are read faster; and what is called between products takes longer when steps
read so much that caches keep nothing of it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import log

from hmt.base.units import parse_bytes
from hmt.contracts.machine import Machine

_BEYOND = 2  # times the caches' size: nothing is left of what was read before


class Caches:
    """Of one machine; without their figures they change nothing."""

    def __init__(self, machine: Machine) -> None:
        calls = {parse_bytes(size): times for size, times in machine.cold_calls.items()}
        self._calls = sorted(calls.items())
        self._memory_rate = machine.ram_read_rate
        sizes = {parse_bytes(size): rate for size, rate in machine.cached_rates.items() if rate}
        self._points = sorted(sizes.items())
        if self._points:
            end = _BEYOND * max(machine.cache_bytes, self._points[-1][0])
            self._points.append((end, machine.ram_read_rate))

    def faster(self, nbytes: float) -> float:
        """How much faster than memory's rate so much is read again and again, 1 or more.

        Between sizes that were measured, on straight lines over the size's logarithm.
        """
        points = self._points
        if not points or not self._memory_rate or nbytes >= points[-1][0]:
            return 1.0
        return max(1.0, _between(points, nbytes) / self._memory_rate)

    def from_memory(self, faster: float) -> float:
        """The share of a step's time for weights that they come from memory, 0 to 1.

        faster   how much faster they are read than memory is, see above
        """
        most = max((rate for _, rate in self._points), default=0.0) / (self._memory_rate or 1.0)
        return max(0.0, (1 / faster - 1 / most) / (1 - 1 / most)) if most > 1 else 1.0

    def slower(self, nbytes: float) -> float:
        """How many times as long calls take in steps that read so much, 1 or more."""
        return _between(self._calls, nbytes) if self._calls else 1.0


def _between(points: Sequence[tuple[int, float]], nbytes: float) -> float:
    """On straight lines over the size's logarithm, level beyond both ends."""
    above = bisect_left(points, (nbytes, 0.0))
    if above == 0 or above == len(points):
        return points[min(above, len(points) - 1)][1]
    (low, before), (high, after) = points[above - 1 : above + 1]
    return before + (after - before) * log(nbytes / low) / log(high / low)

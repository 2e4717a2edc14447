"""What the CPU's caches do to steps.

Weights that they keep are read faster; and what is called between products takes longer when steps
read so much that caches keep nothing of it.
"""

from math import log

from hmt.base.units import parse_bytes
from hmt.contracts.machine import Machine

_BEYOND = 2  # times the caches' size: nothing is left of what was read before


class Caches:
    """Of one machine; without their figures they change nothing."""

    def __init__(self, machine: Machine) -> None:
        self._cold_times, self._nbytes = max(1.0, machine.cold_times), machine.cache_bytes
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
        above = next(number for number, (size, _) in enumerate(points) if size >= nbytes)
        rate = points[above][1]
        if above:
            (low, before), (high, after) = points[above - 1], points[above]
            rate = before + (after - before) * log(nbytes / low) / log(high / low)
        return max(1.0, rate / self._memory_rate)

    def slower(self, nbytes: float) -> float:
        """How many times as long calls take in steps that read so much, 1 or more."""
        share = min(1.0, nbytes / self._nbytes) if self._nbytes else 1.0
        return 1.0 + (self._cold_times - 1.0) * share

"""What the CPU's caches do to steps.

Weights that they keep are read faster; and what is called between products takes longer when steps
read so much that caches keep nothing of it.
"""

from math import log

from hmt.base.units import MIB, parse_bytes
from hmt.contracts.machine import Machine

WARM_BYTES, COLD_BYTES = 14 * MIB, 256 * MIB
_BEYOND = 2  # times the caches' size: nothing is left of what was read before


class Caches:
    """Of one machine; without their figures they change nothing."""

    def __init__(self, machine: Machine) -> None:
        self._cold_times = max(1.0, machine.cold_times)
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

    def from_memory(self, faster: float) -> float:
        """The share of a step's time for weights that they come from memory, 0 to 1.

        faster   how much faster they are read than memory is, see above
        """
        most = max((rate for _, rate in self._points), default=0.0) / (self._memory_rate or 1.0)
        return max(0.0, (1 / faster - 1 / most) / (1 - 1 / most)) if most > 1 else 1.0

    def slower(self, nbytes: float) -> float:
        """How many times as long calls take in steps that read so much, 1 or more."""
        return 1.0 + (self._cold_times - 1.0) * coldness(nbytes)


def coldness(nbytes: float) -> float:
    """How little caches keep of what is called between the kernels of a step: 0 to 1.

    On two Zen 4 cores beside 32 MiB of a cache calls took 0.34 ms in steps of 5 MB, 0.37 of 15,
    0.7 of 40 and 1.3 of 260: a straight line over the logarithm.
    """
    return min(1.0, max(0.0, log(max(nbytes, 1.0) / WARM_BYTES) / log(COLD_BYTES / WARM_BYTES)))

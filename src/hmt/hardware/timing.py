"""Timing several things interleaved, so that what else goes on in the machine changes all alike.

Hosts are shared: on one, memory gave 33 GB/s in most seconds and 50 in others, and Python took 0.27
or 0.5 ms for the same.  What is timed one after the other is timed at different paces then, and
what two times differ by is mostly that.
"""

import time
from collections.abc import Callable, Sequence
from statistics import fmean

_SLICE_S = 4e-3


def interleaved(
    calls: Sequence[Callable[[int], object]], seconds: float, turn_s: float = _SLICE_S
) -> list[float]:
    """Seconds of each `call(number)`, of turns made within about `seconds` in all.

    A turn is one call, or as many as take `turn_s`.  The first calls, which set things up, are not
    counted.
    """
    numbers, times = [0] * len(calls), [list[float]() for _ in calls]
    for call in calls:
        call(-1)
    end = time.perf_counter() + seconds
    while calls and (not times[0] or time.perf_counter() < end):
        for place, call in enumerate(calls):
            first, begin = numbers[place], time.perf_counter()
            now = begin
            while numbers[place] == first or now - begin < turn_s:
                call(numbers[place])
                numbers[place] += 1
                now = time.perf_counter()
            times[place].append((now - begin) / (numbers[place] - first))
    return [iq_mean(each) for each in times]


def iq_mean(times: Sequence[float]) -> float:
    """The mean without the shortest quarter and the longest."""
    left = len(times) // 4
    return fmean(sorted(times)[left : len(times) - left])

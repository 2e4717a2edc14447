"""What attention gives, timed in several short windows of a probe instead of a long one.

On two Zen 4 cores of a shared host, keys and values of small heads met 265 G operations/s in most
seconds and 210 in others, up to fifteen of them in a row; from caches 45 and 32 GB/s were read in
the same ones, while products and Python were as fast or faster: no yardstick tells them apart.
"""

from dataclasses import fields

from hmt.engine.attention_rates import AttentionRates, attention_rates
from hmt.engine.by_turns import middle_half
from hmt.engine.cpu_pace import CpuPace, Yardstick


class AttentionWindows:
    """Times attention whenever it is asked to `look`; the middle of all looks is what it gives."""

    def __init__(self, yardstick: Yardstick, seconds: float, most: int) -> None:
        """At `most` so many looks, of `seconds` each."""
        self._yardstick, self._seconds, self._most = yardstick, seconds, most
        self._found: list[tuple[AttentionRates, CpuPace]] = []

    def look(self) -> None:
        """Time it now, unless it has been looked at often enough."""
        if len(self._found) == self._most:
            return
        rates, beside_s = attention_rates(self._seconds, self._yardstick.calls())
        self._found.append((rates, self._yardstick.pace(beside_s)))

    def rates(self, pace: CpuPace) -> AttentionRates:
        """Of the middle of all looks, as they would be at this `pace`."""
        found = []
        for rates, then in self._found:
            times = then.over(pace)
            found.append(rates.faster(times.reading_s, times.arithmetic_s))
        found = [rates for rates in found if rates.bytes_per_s] or [AttentionRates()]
        return AttentionRates(
            *(middle_half([getattr(rates, each.name) for rates in found])
              for each in fields(AttentionRates))
        )  # fmt: skip

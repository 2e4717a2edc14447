"""How long products with weights take, from rates measured at a few numbers of tokens.

A product with one token is bound by reading the weights, one with hundreds by arithmetic.  Between
the numbers of tokens that were measured, the time of a weight is on the straight line; where none
was measured between, the longer of both counts.
"""

from bisect import bisect_left
from collections.abc import Mapping
from functools import cached_property

_FLOATS = "bf16"
_AT = "@"  # "w4a8@16": with 16 tokens
_MOST_SKINNY = 64  # tokens of kernels between those of one token and those of hundreds


class GemmCost:
    """Times of products on one processor.

    rates       see ComputeRates.gemm
    read_rate   bytes per second, for encodings that were not measured
    """

    def __init__(self, rates: Mapping[str, float], read_rate: float) -> None:
        self._rates, self._read_rate = rates, read_rate

    @cached_property
    def knows_prefill(self) -> bool:
        """Whether anything is known of arithmetic."""
        return any(not name.endswith(f"{_AT}1") for name, rate in self._rates.items() if rate)

    def read_rate(self, encoding: str) -> float:
        """Bytes of weights per second with one token; 0: not known."""
        measured = self._rates.get(f"{encoding}{_AT}1", 0.0)
        return measured or self._read_rate

    def reading_s(self, nbytes: float, encoding: str) -> float:
        """Of weights, with one token."""
        rate = self.read_rate(encoding)
        return nbytes / rate if rate else 0.0

    def seconds(self, nbytes: float, numbers: float, encoding: str, tokens: float) -> float:
        """Of `tokens` with `numbers` weights of `nbytes`; never less than with fewer tokens."""
        one_s = self.reading_s(nbytes, encoding)
        if tokens <= 1:
            return one_s
        points = [(1, one_s), *((count, numbers * s) for count, s in self._curve(encoding))]
        above = bisect_left(points, tokens, key=lambda point: point[0])
        if above == len(points):  # beyond what was measured, arithmetic goes by the tokens
            last, last_s = points[-1]
            return max(one_s, last_s * tokens / last if last > 1 else one_s)
        (few, few_s), (many, many_s) = points[above - 1], points[above]
        if few == 1 and many > _MOST_SKINNY:  # nothing is known between: a roofline
            return max(one_s, many_s * tokens / many)
        share = (tokens - few) / (many - few)
        return max(one_s, few_s + (many_s - few_s) * share)

    def _curve(self, encoding: str) -> list[tuple[int, float]]:
        """Seconds of each weight by numbers of tokens above 1, both ascending."""
        curve, longest = [], 0.0
        for tokens, rate in _arithmetic(self._rates, encoding):
            longest = max(longest, 2 * tokens / rate)
            curve.append((tokens, longest))
        return curve


def arithmetic_rate(rates: Mapping[str, float]) -> float:
    """Operations per second of bf16, or what is `nearest`, at the most tokens; 0: not known."""
    measured = _arithmetic(rates, _FLOATS)
    return measured[-1][1] if measured else 0.0


def _arithmetic(rates: Mapping[str, float], encoding: str) -> list[tuple[int, float]]:
    """Numbers of tokens above 1, ascending, and operations per second with so many."""
    name = nearest(rates, encoding)
    return sorted(
        (int(tokens), rate)
        for key, rate in rates.items()
        for kind, _, tokens in (key.partition(_AT),)
        if kind == name and tokens != "1" and rate
    )


def nearest(rates: Mapping[str, float], encoding: str) -> str:
    """The encoding itself, or one whose kernels are like its own, of those with arithmetic rates.

    "" where there are none.
    """
    kinds = {
        kind: rate
        for key, rate in rates.items()
        for kind, _, tokens in (key.partition(_AT),)
        if tokens != "1" and rate
    }
    for name in (encoding, "w8a8" if encoding.endswith("a8") else _FLOATS):
        if name in kinds:
            return name
    return max(kinds, key=lambda kind: kinds[kind], default="")

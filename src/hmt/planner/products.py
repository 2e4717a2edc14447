"""How long products with weights take, by the number of tokens, from rates that were measured.

One token's product is bound by reading, and one of hundreds by arithmetic.  Between them other
kernels take over, and neither rate says how long they take: there the product itself was measured,
with some numbers of tokens, and what lies between two of them is on the straight line.  What each
row of a matrix takes beyond its weights (a sum over lanes, scales, writing the result) counts where
rows are short, as those of small models and of experts are.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

_FLOATS = "bf16"
_AT = "@"  # "w4a8@8": with 8 tokens
_NOTHING: Mapping[str, float] = {}


class _Point(NamedTuple):
    """With so many tokens: seconds of each weight, and of each row."""

    tokens: int
    weight_s: float
    row_s: float


class Products:
    """Times of products on one device.

    rates       bytes of weights per second with one token, by encoding; `otherwise` for others
    operations  per second, by encoding, and with fewer tokens by ENCODING@TOKENS
    row_s       seconds of a row for each token, named as `operations`, and ENCODING@1
    faster      how much faster memory is read than those rates say, since caches hold it
    most        bytes per second then, by encoding
    most_row_s  seconds of a row then, with one token, by encoding
    """

    def __init__(
        self,
        rates: Mapping[str, float],
        otherwise: float,
        operations: Mapping[str, float],
        row_s: Mapping[str, float] = _NOTHING,
        faster: float = 1.0,
        most: Mapping[str, float] = _NOTHING,
        most_row_s: Mapping[str, float] = _NOTHING,
    ) -> None:
        self._most_row_s = most_row_s
        self._rates, self._otherwise, self._operations = rates, otherwise, operations
        self._row_s, self._faster, self._most = row_s, faster, most
        self._curves: dict[str, list[_Point]] = {}

    @property
    def known(self) -> bool:
        """Whether anything is known of arithmetic."""
        return bool(self._operations)

    def rate(self, encoding: str) -> float:
        """Bytes per second with one token; 0: not known."""
        rate = self._rates.get(encoding) or self._otherwise
        most = self._most.get(encoding, 0.0)
        return max(rate, min(rate * self._faster, most)) if most else rate * self._faster

    def reading_s(self, nbytes: float, encoding: str) -> float:
        """Of weights, with one token."""
        rate = self.rate(encoding)
        return nbytes / rate if rate else 0.0

    def seconds(
        self, nbytes: float, numbers: float, encoding: str, tokens: float, rows: float = 0.0
    ) -> float:
        """With `numbers` weights of `nbytes` in `rows`; never less than with fewer tokens."""
        reading = self.reading_s(nbytes, encoding)
        name = _nearest(self._operations, encoding)
        share, row_s = self._rows_share(encoding), self._row_s.get(f"{name}{_AT}1", 0.0)
        one = reading + rows * (share * row_s + (1 - share) * self._most_row_s.get(encoding, 0.0))
        rate = self._operations.get(name, 0.0)
        computing = 2 * numbers * tokens / rate if rate else 0.0
        many = computing + rows * tokens * self._row_s.get(name, 0.0)
        curve = self._curve(encoding)
        if not curve or tokens <= 1:
            return max(one, many)
        # What caches hold shortens what is read, not what is computed with it.
        slowly = nbytes / (self._rates.get(encoding) or self._otherwise or 1.0)
        saved = slowly - reading if reading else 0.0

        def at(point: _Point) -> float:
            return max(one, numbers * point.weight_s - saved + rows * point.row_s)

        above = bisect_left(curve, (tokens, 0.0, 0.0))
        if above == len(curve):
            return max(many, at(curve[-1]))
        point = curve[above]
        count, low = (1, one) if above == 0 else (curve[above - 1].tokens, at(curve[above - 1]))
        share = (tokens - count) / (point.tokens - count)
        return low + (at(point) - low) * share

    def _rows_share(self, encoding: str) -> float:
        """Of the time of rows that are read from memory; the others' is theirs that caches hold."""
        rate, most = self._rates.get(encoding), self._most.get(encoding)
        if not rate or not most or most <= rate:
            return 1.0
        return (1 / self.rate(encoding) - 1 / most) / (1 / rate - 1 / most)

    def _curve(self, encoding: str) -> list[_Point]:
        """Ascending in all."""
        if encoding not in self._curves:
            self._curves[encoding] = self._measured(_nearest(self._operations, encoding))
        return self._curves[encoding]

    def _measured(self, encoding: str) -> list[_Point]:
        begin, points = encoding + _AT, []
        longest = slowest = 0.0
        found = [
            (int(name.removeprefix(begin)), rate)
            for name, rate in self._operations.items()
            if name.startswith(begin) and rate
        ]
        for tokens, rate in sorted(found):
            longest = max(longest, 2 * tokens / rate)
            slowest = max(slowest, tokens * self._row_s.get(f"{begin}{tokens}", 0.0))
            points.append(_Point(tokens, longest, slowest))
        return points


class Times:
    """Seconds by encoding, and for several users under ENCODING@USERS.

    kind   what names have behind the encoding: "w4a16 experts@8"
    """

    def __init__(self, times: Mapping[str, float], kind: str = "") -> None:
        self._times, self._kind = times, kind

    def seconds(self, encoding: str, users: float) -> float:
        """On the straight line between what was measured; beyond it, along the last one."""
        points: list[tuple[int, float]] = []
        alike = (encoding, "w8a8" if encoding.endswith("a8") else "w4a16", _FLOATS, "w4a16")
        for kind in dict.fromkeys((self._kind, "")):
            for name in alike:
                points = points or self._points(name + kind)
        if not points:
            return 0.0
        if len(points) == 1 or users <= points[0][0]:
            return points[0][1]
        above = min(max(1, bisect_left(points, (users, 0.0))), len(points) - 1)
        (few, low), (many, high) = points[above - 1 : above + 1]
        return max(low, low + (high - low) * (users - few) / (many - few))

    def _points(self, name: str) -> list[tuple[int, float]]:
        found = [(1, self._times[name])] if name in self._times else []
        for key, each in self._times.items():
            begin, at, users = key.rpartition(_AT)
            if at and begin == name:
                found.append((int(users), each))
        return sorted(found)


def times_in_layers(times: Mapping[str, float], encoding: str, tokens: float) -> float:
    """See Machine.cpu_in_layers: on straight lines between numbers of tokens, level beyond them."""
    name = _nearest(times, encoding)
    points = [(1, times.get(name, 1.0))]
    points += sorted(
        (int(key.removeprefix(name + _AT)), each)
        for key, each in times.items()
        if key.startswith(name + _AT)
    )
    above = bisect_left(points, (tokens, 0.0))
    if above == 0 or above == len(points):
        return points[min(above, len(points) - 1)][1]
    (few, low), (many, high) = points[above - 1 : above + 1]
    return low + (high - low) * (tokens - few) / (many - few)


def operations_rate(rates: Mapping[str, float], encoding: str) -> float:
    """Operations per second with many tokens, of what is nearest to an encoding; 0: not known."""
    return rates.get(_nearest(rates, encoding), 0.0)


def _nearest(rates: Mapping[str, float], encoding: str) -> str:
    """The encoding itself, or one whose kernels are like its own."""
    nearest = "w8a8" if encoding.endswith("a8") else _FLOATS
    for name in (encoding, nearest):
        if rates.get(name):
            return name
    whole = {name: rate for name, rate in rates.items() if _AT not in name}
    return max(whole, key=lambda name: whole[name], default="")

"""Whether something makes steps faster: measured on the steps themselves, with and without."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median, variance

_TURN = 8  # steps with, then as many without
_UNSETTLED = 2  # of a turn: they still feel the last one
_PAIRS = (3, 8)  # turns of each sort: before the first verdict, and at most
_REST = (512, 8192)  # steps between trials: after a new verdict, and at most
_NEW_SIZE = 4  # steps of another number of tokens in a row: from now on these are the steps
_OUTLIER = 3.0  # times the median: somebody else had the machine, or nobody asked for anything


@dataclass(frozen=True, slots=True)
class ABResult:
    """What a trial found: the mean seconds of steps, and the standard error of the difference.

    faster   whether steps are faster with it, beyond that error
    """

    faster: bool
    with_s: float
    without_s: float
    error_s: float


class ABGate:
    """Turns something on and off, and leaves it on while steps are faster with it.

    `on` says what to do in this step.  The verdict is for it where the mean step is shorter by more
    than twice its standard error, or by more than once when the longest trial has ended.  A verdict
    that repeats itself is asked for half as often.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self.on = True
        self.saved_s = 0.0
        self.verdict: ABResult | None = None
        self._clock = clock
        self._tokens = 1  # of the steps that are compared
        self._others = 0  # steps of another size, in a row
        self._began: float | None = None  # when the last of those that are compared began
        self._rest_steps = 0
        self._rest = _REST[0]
        self._begin_trial()

    def step(self, tokens: int) -> None:
        """A step of so many tokens begins, and the one before it has ended."""
        now = self._clock()
        began, self._began = self._began, now
        if tokens == self._tokens:
            self._others = 0
        else:
            self._began = None
            self._others += 1
            if self._others == _NEW_SIZE:
                self._tokens, self._rest_steps = tokens, 0
                self._begin_trial()
        if self._rest_steps:
            if self.on and self.verdict is not None:
                self.saved_s += self.verdict.without_s - self.verdict.with_s
            self._rest_steps -= 1
            if not self._rest_steps:
                self._begin_trial()
        elif began is not None:
            self._count(now - began)

    def _begin_trial(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._in_turn = 0
        self.on = True

    def _count(self, seconds: float) -> None:
        self._in_turn += 1
        if self._in_turn > _UNSETTLED:
            self._seconds[self.on].append(seconds)
        if self._in_turn < _TURN:
            return
        self._in_turn = 0
        self.on = not self.on
        if self.on:
            self._judge()

    def _judge(self) -> None:
        """After a pair of turns."""
        pairs = len(self._seconds[False]) // (_TURN - _UNSETTLED)
        if pairs < _PAIRS[0]:
            return
        mean, error = {}, 0.0
        for on, taken in self._seconds.items():
            usual = _OUTLIER * median(taken)
            kept = [seconds for seconds in taken if seconds <= usual]
            mean[on] = fmean(kept)
            error += variance(kept) / len(kept)
        gain, error = mean[False] - mean[True], error**0.5
        last = pairs >= _PAIRS[1]
        if not last and abs(gain) <= 2 * error:
            return
        faster = gain > error
        again = self.verdict is not None and self.verdict.faster is faster
        self.verdict = ABResult(faster, mean[True], mean[False], error)
        self.on = faster
        self._rest = min(2 * self._rest, _REST[1]) if again else _REST[0]
        self._rest_steps = self._rest

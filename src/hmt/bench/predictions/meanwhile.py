"""The CPU's pace while something is measured: the computation stands still now and then for it.

A neighbour on the same host comes and goes within a second: what memory gives changes by half, and
either core of two may take twice as long for the same Python.  A pace before a run and one behind
it say little of the run then.  So predictions are compared with what the machine did at the pace
that it had.  Work that has nothing to do with the model tells it, between steps, on the thread that
computes them; the time it takes is no time of the run's.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from hmt.engine import LoadedModel
from hmt.engine.cpu_pace import CpuPace, usual_pace
from hmt.engine.pace import pace_s


class Meanwhile:
    """Looks at the pace at the beginning, at the end, and every so often between them."""

    def __init__(
        self, model: LoadedModel, measure: Callable[[], CpuPace], every_s: float | None
    ) -> None:
        """Every `every_s` seconds; None: not between, as what is read ahead would have more time.

        measure   tells the pace, but Python's, which is looked at where steps are computed
        """
        self._model, self._measure, self._every_s = model, measure, every_s
        self._paces: list[CpuPace] = []
        self._spent_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hmt-pace")

    def __enter__(self) -> Self:
        self.begin()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.look()

    def begin(self) -> None:
        """What was seen so far does not count: what is measured begins here."""
        self._model._loop.call(self._begin)

    def look(self) -> None:
        """Between two that are measured."""
        self._model._loop.call(self._sample)

    def clock(self) -> float:
        """Seconds, without those that looking took."""
        return time.perf_counter() - self._spent_s

    @property
    def pace(self) -> CpuPace:
        """What it was, in the middle."""
        return usual_pace(self._paces)

    @property
    def changed(self) -> float:
        """How many times as slow Python was in the slower half of looks as in the faster one."""
        times = sorted(pace.calls_s for pace in self._paces)
        left = len(times) // 4
        return times[-1 - left] / times[left]

    def _look(self) -> None:
        while self._every_s is not None and not self._ended.wait(self._every_s):
            self._model._loop.call(self._sample)

    def _begin(self) -> None:
        self._paces.clear()
        self._sample()

    def _sample(self) -> None:
        """On the thread of steps."""
        begin = time.perf_counter()
        calls_s = pace_s()  # first: threads that have measured the rest are awake for a while
        self._paces.append(replace(self._measure(), calls_s=calls_s))
        self._spent_s += time.perf_counter() - begin

"""The pace is looked at where steps are computed, and looking takes no time of the run's."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hmt.engine.cpu_pace import CpuPace

from hmt.bench.predictions import meanwhile, process
from hmt.bench.predictions.meanwhile import Meanwhile

LOOKING_S = 0.02


class Loop:
    """Runs what is asked at once, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self, function: Callable[[], Any]) -> Any:
        self.calls += 1
        return function()


def looking(every_s: float | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Loop, Meanwhile]:
    loop = Loop()
    paces = iter(float(number) for number in range(1, 1000))
    monkeypatch.setattr(meanwhile, "pace_s", lambda: 7.0)

    def measure() -> CpuPace:
        time.sleep(LOOKING_S)
        return CpuPace(0.5, next(paces), 3.0)

    return loop, Meanwhile(SimpleNamespace(_loop=loop), measure, every_s)  # type: ignore[arg-type]


def test_it_is_looked_at_before_and_behind_and_nothing_before_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, seen = looking(None, monkeypatch)
    with seen:
        assert seen.pace == CpuPace(7.0, 1.0, 3.0), "Python's is that of the steps' own thread"
        seen.begin()
        begin, really = seen.clock(), time.perf_counter()
        seen.begin()
        assert time.perf_counter() - really >= LOOKING_S > seen.clock() - begin
    assert loop.calls == 4
    assert seen.pace == CpuPace(7.0, 3.5, 3.0), "of the last beginning and the end"


def test_it_is_looked_at_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, seen = looking(0.001, monkeypatch)
    with seen:
        end = time.perf_counter() + 30
        while loop.calls < 4 and time.perf_counter() < end:
            time.sleep(0.001)
    assert loop.calls >= 5
    calls = loop.calls
    time.sleep(0.01)
    assert loop.calls == calls, "not any more"
    assert seen.changed == 1.0


def test_a_pace_that_changes_in_more_than_a_quarter_of_the_looks_has_changed() -> None:
    seen = Meanwhile(SimpleNamespace(), CpuPace, None)  # type: ignore[arg-type]
    for slow, changed in ((2, 1.0), (3, 2.0), (5, 2.0), (7, 1.0)):
        seen._paces = [CpuPace(2.0 if number < slow else 1.0) for number in range(9)]
        assert seen.changed == changed


def test_users_have_texts_of_their_own() -> None:
    texts = [process._text(64, user) for user in range(4)]
    assert len({tuple(text) for text in texts}) == 4
    assert process._text(64, 1) == texts[1]

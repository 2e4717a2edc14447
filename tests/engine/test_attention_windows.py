"""Attention is looked at several times: one that is off does not count, and its pace is seen to."""

from collections.abc import Sequence
from dataclasses import astuple

import pytest
from hmt.engine.attention_windows import AttentionWindows
from hmt.engine.cpu_pace import CpuPace, Yardstick

from hmt.engine import attention_windows
from hmt.engine.attention_rates import AttentionRates

PACE = CpuPace(3e-4, 1e-3, 1e-2)
AS_EVER = [3e-4, 5e-4, 5e-4, 1e-2]  # of Python, two products that read, and one that computes
RATES = AttentionRates(25e9, 350e9, 45e9, 0.0, 24e9, 40e9, 265e9, 1e-4)


def looked(
    monkeypatch: pytest.MonkeyPatch, most: int, looks: Sequence[tuple[AttentionRates, list[float]]]
) -> AttentionRates:
    """What comes of these looks."""
    to_come = iter(looks)
    monkeypatch.setattr(attention_windows, "attention_rates", lambda *given: next(to_come))
    with Yardstick() as yardstick:
        windows = AttentionWindows(yardstick, 0.1, most)
        for _ in looks:
            windows.look()
        return windows.rates(PACE)


def near(rates: AttentionRates) -> object:
    return pytest.approx(astuple(rates))


def test_what_is_off_in_one_look_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    off = AttentionRates(5e9, 900e9, 32e9, 0.0, 60e9, 30e9, 210e9, 9e-4)
    looks = [(RATES, AS_EVER)] * 2 + [(off, AS_EVER)] + [(RATES, AS_EVER)] * 2
    assert astuple(looked(monkeypatch, 5, looks)) == near(RATES)


def test_looks_beyond_the_most_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(RATES, AS_EVER), (AttentionRates(1.0, 1.0), AS_EVER)]
    assert astuple(looked(monkeypatch, 1, looks)) == near(RATES)


def test_each_look_counts_at_the_pace_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly = [each * 2 for each in AS_EVER]
    looks = [(RATES.faster(0.5, 0.5), slowly), (RATES, AS_EVER), (RATES.faster(0.5, 0.5), slowly)]
    assert astuple(looked(monkeypatch, 3, looks)) == near(RATES)


def test_looks_without_memory_for_them_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: tuple[AttentionRates, list[float]] = (AttentionRates(), [])
    looks = [nothing, (RATES, AS_EVER), nothing]
    assert astuple(looked(monkeypatch, 3, looks)) == near(RATES)
    assert looked(monkeypatch, 2, [nothing] * 2) == AttentionRates()

"""What is timed by turns shares the machine's pace; rates that were measured follow it."""

from dataclasses import astuple, fields, replace

import pytest
from hmt.engine.cpu_pace import CpuPace, PaceProcess, Yardstick, at_cpu_pace, usual_pace
from hmt.engine.product_rates import ProductRates

from hmt.contracts.machine import Machine
from hmt.engine import by_turns as turns
from hmt.engine import cpu_pace
from hmt.engine.by_turns import by_turns, middle_half

MACHINE = Machine(
    "m", 2, 1 << 34, 30e9, 3e9,
    cpu_rates={"bf16": 25e9, "w4a8": 24e9}, cpu_cached_rates={"bf16": 80e9},
    cpu_ops={"w4a8": 4e11, "w4a8@8": 1e11, "w4a8@64": 3e11},
    cpu_row_s={"w4a8@1": 1e-8, "w4a8": 1e-9}, cpu_attention_rate=2e10, cpu_attention_ops=3e11,
    cpu_attention_cold_s=1e-4,
    cache_bytes=32 << 20, cached_rates={"4MiB": 9e10, "16MiB": 8e10, "64MiB": 4e10},
    step_s=1e-4, layer_s=2e-5, number_s=1e-9, pace=1.0, reading_pace=2.0, arithmetic_pace=4.0,
    cached_pace=1.0,
)  # fmt: skip


def test_calls_take_turns_and_outliers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls are made as often as a turn takes, long ones once; all in every round."""
    now, made = [0.0], list[tuple[str, int]]()
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])

    def short(number: int) -> None:
        made.append(("short", number))
        now[0] += 1.0 if number == 0 else 0.25  # the first one is disturbed

    def long(number: int) -> None:
        made.append(("long", number))
        now[0] += 3.0

    short_s, long_s = by_turns([short, long], 20.0, turn_s=1.0)
    assert (short_s, long_s) == (0.25, 3.0)
    assert made[:2] == [("short", -1), ("long", -1)]
    assert made[2:9] == [
        ("short", 0),
        ("long", 0),
        *(("short", n) for n in range(1, 5)),
        ("long", 1),
    ]
    assert by_turns([], 1.0) == []
    assert middle_half([5.0, 1.0, 2.0, 100.0]) == 3.5
    assert middle_half([7.0]) == 7.0


def test_rates_follow_the_pace_of_what_they_are_of() -> None:
    found = at_cpu_pace(MACHINE, CpuPace(3.0, 4.0, 16.0, 1.5))
    near = pytest.approx
    assert (found.step_s, found.layer_s, found.pace) == (near(3e-4), near(6e-5), near(3.0))
    assert found.ram_read_rate == near(15e9)
    assert found.cpu_rates == {"bf16": near(12.5e9), "w4a8": near(12e9)}
    assert found.cpu_attention_rate == near(1e10)
    assert found.cpu_attention_cold_s == near(2e-4)
    # Products with half of the caches' size take so much longer, whatever memory gives: others
    # have taken so much.  Of less they take less, and more is hardly held anyway.
    held, times = found.cached_rates, {}
    for size, rate in MACHINE.cached_rates.items():
        times[size] = (rate / 30e9 * 25e9) / (held[size] / 15e9 * 12.5e9)
    assert times["16MiB"] == near(1.5)
    assert 1 < times["4MiB"] < 1.5 < times["64MiB"] < 2
    slow = at_cpu_pace(MACHINE, CpuPace(1.0, 2.0, 4.0, 100.0))
    assert all(rate >= 30e9 for rate in slow.cached_rates.values()), "memory has it at least"
    few, several = found.cpu_ops["w4a8@8"] / 1e11, found.cpu_ops["w4a8@64"] / 3e11
    assert found.cpu_ops["w4a8"] == near(1e11) and 1 / 4 < several < few < 1 / 2
    assert found.cpu_row_s == {"w4a8@1": near(2e-8), "w4a8": near(4e-9)}
    assert (found.cpu_attention_ops, found.number_s) == (near(7.5e10), near(4e-9))
    assert found.disk_read_rate == MACHINE.disk_read_rate
    back = at_cpu_pace(found, cpu_pace.pace_at(MACHINE))
    for field in fields(Machine):
        assert getattr(back, field.name) == near(getattr(MACHINE, field.name))


def test_a_pace_that_is_not_known_changes_nothing() -> None:
    assert at_cpu_pace(MACHINE, CpuPace()) == MACHINE
    unknown = replace(MACHINE, pace=0.0, reading_pace=0.0, arithmetic_pace=0.0, cached_pace=0.0)
    assert at_cpu_pace(unknown, CpuPace(1.0, 1.0, 1.0, 1.0)) == unknown
    assert CpuPace(1.0, 2.0, 3.0).over(CpuPace(2.0, 1.0, 0.0)) == CpuPace(0.5, 2.0, 1.0, 1.0)
    paces = [CpuPace(float(n), 1.0, 2.0, 3.0) for n in (9, 2, 4, 1)]
    assert usual_pace(paces) == CpuPace(3.0, 1.0, 2.0, 3.0)
    assert usual_pace(paces[:3]).calls_s == 4.0, "one of three may be off"


def test_a_pace_is_measured_for_real_here_and_in_another_process() -> None:
    with Yardstick() as yardstick, PaceProcess() as process:
        here, there = yardstick.measured(0.02), process.measured(0.02)
        assert all(1e-6 < each < 10 for each in (*astuple(here), *astuple(there)))
        assert process.measured(0.01) != there
        whole, part = yardstick.held(), yardstick.held(0.25)
        assert whole.nbytes > 4 * part.nbytes > 0 and whole.rows > part.rows


def test_without_memory_there_is_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_pace, "available_host_bytes", lambda: 1 << 20)
    with Yardstick() as yardstick:
        assert yardstick.calls() == [] and yardstick.measured(0.01) == CpuPace()
        assert yardstick.held().seconds == 0


def test_a_process_that_is_gone_is_named() -> None:
    with PaceProcess() as process:
        process._process.kill()
        process._process.wait()
        with pytest.raises(OSError):
            process.measured(0.01)
            process.measured(0.01)


def test_reading_is_between_what_was_timed_and_what_rates_say() -> None:
    with Yardstick() as yardstick:
        (bf16, *_), (w4a8, *_) = yardstick._weights
        rates = {"bf16": bf16.nbytes / 1e-3, "w4a8": w4a8.nbytes / 4e-4}
        products = ProductRates(rates, row_s={"bf16@1": 1e-4 / bf16.shape[0]})
        pace = CpuPace(1.0, 2.5e-3, 3.0)
        found = yardstick.with_rates(pace, products)
        assert found == replace(pace, reading_s=pytest.approx(2e-3))
        assert yardstick.with_rates(pace, ProductRates({"bf16": 1e9})) == pace, "not all are known"

"""Factors are found again that runs were made with, and machines are changed by them."""

import random
from dataclasses import MISSING, fields, replace

import pytest
from hmt.planner.calibration import PARTS, StepRun, beyond, calibrated, errors, fitted
from models import machine_with, outlook, setting, small_model

from hmt.contracts.machine import Machine
from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of


def runs_with(factors: dict[str, float], count: int = 24, spread: float = 0.0) -> list[StepRun]:
    """Runs that are bound by one part or another, and took as long as `factors` say."""
    chance, found = random.Random(3), []
    for _ in range(count):
        parts = {part: chance.uniform(0.001, 0.02) for part in PARTS}
        parts["fixed"] *= 0.3
        parts |= {"GPU": 0.0, "link": 0.0}
        if chance.random() < 0.5:
            parts["disk"] = 0.0
        run = StepRun(parts, 0.0, 1.0)
        found.append(replace(run, actual_s=run.seconds(factors) * chance.uniform(1, 1 + spread)))
    return found


def test_factors_are_found_again() -> None:
    made_with = {"CPU": 1.3, "disk": 0.8, "fixed": 2.0}
    runs = runs_with(made_with)
    found = fitted(runs)
    for part, factor in made_with.items():
        assert found[part] == pytest.approx(factor, rel=0.03)
    assert found["GPU"] == found["link"] == 1.0, "no run depends on them"
    assert errors(runs, found)[2] < 0.03 < errors(runs, {})[0]
    assert fitted(runs) == found


def history(seed: int) -> tuple[dict[str, float], list[StepRun]]:
    """Factors, and runs of all kinds that took as long as these say, but for 1% of chance."""
    chance, found = random.Random(seed), []
    made_with = {part: chance.uniform(0.6, 1.7) for part in PARTS}
    for number in range(24):
        parts = dict.fromkeys(PARTS, 0.0)
        parts |= {"CPU": chance.uniform(0.002, 0.02), "fixed": chance.uniform(0.001, 0.01)}
        at_once = 0.0
        if number % 2:
            parts |= {"GPU": chance.uniform(0.002, 0.02), "link": chance.uniform(0, 0.01)}
            at_once = min(parts["CPU"], parts["GPU"]) * chance.uniform(0, 0.8)
        if number % 4 == 1:
            parts["link"] = chance.uniform(0.06, 0.15)
        elif number % 3 == 0:
            parts["disk"] = chance.uniform(0.02, 0.15)
        run = StepRun(parts, at_once, 1.0)
        found.append(replace(run, actual_s=run.seconds(made_with) * chance.uniform(0.99, 1.01)))
    return made_with, found


def test_all_factors_of_twenty_histories_are_found_again() -> None:
    wrong = []
    for seed in range(20):
        made_with, runs = history(seed)
        found = fitted(runs)
        wrong += [abs(found[part] / made_with[part] - 1) for part in PARTS]
        assert errors(runs, found)[0] < 0.02
    assert max(wrong) < 0.05 and len(wrong) == 100


def test_a_factor_reaches_every_time_and_rate_of_a_machine() -> None:
    given = {
        field.name: 3.0 if field.default_factory is MISSING else {"w4a8": 3.0}
        for field in fields(Machine)
        if field.name.endswith(("_s", "_rate", "_rates", "_ops"))
    }
    machine = Machine(**{"name": "m", "cores": 1, "ram_bytes": 1} | given)  # type: ignore[arg-type]
    slower = calibrated(machine, dict.fromkeys(PARTS, 2.0))
    for name, before in given.items():
        expected = 6.0 if name.endswith("_s") else 1.5
        assert getattr(slower, name) == (expected if before == 3.0 else {"w4a8": expected}), name


def test_one_run_that_was_disturbed_moves_nothing() -> None:
    runs = runs_with({}, spread=0.02)
    runs.append(replace(runs[0], actual_s=20 * runs[0].actual_s))
    assert all(abs(factor - 1) < 0.05 for factor in fitted(runs).values())
    assert set(fitted([]).values()) == {1.0} and errors([], {}) == (0, 0, 0)
    slow = fitted([replace(run, actual_s=50 * run.actual_s) for run in runs[:-1]])
    assert beyond(slow) and not beyond(fitted(runs)), "no factor is 50, which is said"


def test_a_calibrated_machine_predicts_what_the_factors_say() -> None:
    demand = small_model()
    machine = replace(machine_with(demand), step_s=1e-3, row_s=1e-4, layer_s=1e-4, number_s=1e-9)
    loads = loads_of(demand, outlook(demand).plan(setting(machine, context=16)).plan)
    factors = {"CPU": 1.5, "fixed": 2.0, "disk": 0.5}
    before = CostModel(loads, machine).decode(3, 40)
    after = CostModel(loads, calibrated(machine, factors)).decode(3, 40)
    assert after.seconds == pytest.approx(StepRun.of(before, 1.0, {}).seconds(factors))
    # What was recorded under factors is the same without them.
    again, first = StepRun.of(after, 1.0, factors), StepRun.of(before, 1.0, {})
    assert again.parts == pytest.approx(first.parts)
    assert calibrated(machine, {}) == calibrated(machine, dict.fromkeys(PARTS, 1.0)) == machine

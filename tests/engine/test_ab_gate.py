"""The trial: what makes steps faster stays on, what does not goes off, and both are asked again."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.engine.experts.ab_gate import ABGate


class Machine:
    """Steps of a model on a clock of their own."""

    def __init__(self, with_s: float, without_s: float, noise: float = 0.0, seed: int = 0) -> None:
        self.now = 0.0
        self.with_s, self.without_s, self.noise = with_s, without_s, noise
        self.random = random.Random(seed)
        self.trial = ABGate(lambda: self.now)
        self.on: list[bool] = []

    def run(self, steps: int, tokens: int = 1) -> None:
        for _ in range(steps):
            self.trial.step(tokens)
            self.on.append(self.trial.on)
            seconds = self.with_s if self.trial.on else self.without_s
            self.now += seconds * (1 + self.noise * self.random.random()) * tokens**0.5


@given(
    with_s=st.floats(0.01, 1),
    ratio=st.floats(1.2, 3) | st.floats(0.3, 0.8),
    noise=st.floats(0.001, 0.2),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_the_faster_way_wins(with_s: float, ratio: float, noise: float, seed: int) -> None:
    machine = Machine(with_s, with_s * ratio, noise, seed)
    machine.run(2000)
    verdict = machine.trial.verdict
    assert verdict is not None and verdict.faster == (ratio > 1)
    assert (verdict.with_s < verdict.without_s) == (ratio > 1)
    share = sum(machine.on[200:]) / len(machine.on[200:])
    assert share > 0.85 if ratio > 1 else share < 0.15
    if ratio > 1:
        gained = with_s * (ratio - 1) * sum(machine.on)
        assert 0.3 * gained < machine.trial.saved_s < 1.4 * gained
    else:
        assert machine.trial.saved_s == 0.0


def test_no_difference_is_no_gain() -> None:
    machine = Machine(0.1, 0.1)
    machine.run(3000)
    assert sum(machine.on[200:]) < 0.15 * len(machine.on)


def test_a_change_of_the_machine_is_noticed() -> None:
    machine = Machine(0.1, 0.2, 0.1)
    machine.run(400)
    assert machine.trial.on
    machine.with_s = 0.3
    machine.run(3000)
    assert not any(machine.on[-100:])


def test_prompts_and_idle_hours_do_not_count() -> None:
    machine = Machine(0.1, 0.2, 0.1)
    for _ in range(100):
        machine.run(20)
        machine.now += 3600
        machine.run(2, tokens=512)
    assert sum(machine.on[600:]) > 0.8 * len(machine.on[600:])


def test_another_size_of_the_batch_is_another_trial() -> None:
    machine = Machine(0.1, 0.2, 0.1)
    machine.run(200)
    assert machine.trial.on
    machine.with_s = 0.4
    machine.run(400, tokens=8)
    assert not any(machine.on[-100:])

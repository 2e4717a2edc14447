"""Rates of weights that caches hold are those that steps have, where steps were timed."""

from typing import Any

import pytest

from hmt.base.units import MIB
from hmt.contracts.machine import Machine
from hmt.engine import cached_rates
from hmt.engine.cpu_step_rates import Decoded
from hmt.engine.probe_models import MANY
from hmt.planner.caches import Caches


def test_what_steps_keep_is_told_from_what_loops_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is 30 MiB; steps lose what caches hold sooner than loops do."""
    gains = {1: 1.5, 2: 1.6, 4: 1.1, MANY: 1.0}

    def decoded(machine: Machine, cases: list[Any], seconds: float) -> list[Decoded]:
        found = [(case.model * 30.0 * MIB, gains[case.model]) for case in cases]
        return [Decoded(0.0, 0.0, size, kernels_s=size / (20e9 * gain)) for size, gain in found]

    monkeypatch.setattr(cached_rates, "decoded", decoded)
    monkeypatch.setattr(cached_rates, "wide_model", lambda layers: layers)
    machine = Machine(
        "m", 2, 1 << 34, 30e9, 3e9, cache_bytes=480 * MIB,
        cached_rates={"15MiB": 50e9, "60MiB": 50e9, "480MiB": 30e9},
    )  # fmt: skip
    slowest = 30e9 * Caches(machine).faster(240 * MIB)
    found = cached_rates.cached_rates(machine, 0.0)
    expected = {30: 1.6, 60: 1.6, 120: 1.1}
    steps = {f"{size}MiB": pytest.approx(slowest * gain) for size, gain in expected.items()}
    assert found == steps | {"480MiB": 30e9, "15MiB": pytest.approx(slowest * 1.6)}
    monkeypatch.setattr(cached_rates, "decoded", lambda *given: [Decoded(0.0, 0.0, 1e8)] * 4)
    assert cached_rates.cached_rates(machine, 0.0) == machine.cached_rates

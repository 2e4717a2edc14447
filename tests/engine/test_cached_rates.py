"""Rates of weights that caches hold are those that steps have, where steps were timed."""

import pytest

from hmt.base.units import MIB
from hmt.contracts.machine import Machine
from hmt.engine import cached_rates
from hmt.engine.probe_models import MANY
from hmt.planner.caches import Caches


def test_what_steps_keep_is_told_from_what_loops_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is 30 MiB; steps lose what caches hold sooner than loops do."""
    gains = {1: 1.8, 2: 1.5, 3: 1.6, 4: 1.1, 6: 1.0, MANY: 1.0}

    def kernels_s(machine: Machine, layers: int, seconds: float) -> tuple[float, float]:
        nbytes = layers * 30.0 * MIB
        return nbytes, nbytes / (20e9 * gains[layers])

    monkeypatch.setattr(cached_rates, "kernels_s", kernels_s)
    monkeypatch.setattr(cached_rates.models, "wide_model", lambda layers: layers)
    machine = Machine(
        "m", 2, 1 << 34, 30e9, 3e9, cache_bytes=480 * MIB,
        cached_rates={"15MiB": 50e9, "60MiB": 50e9, "480MiB": 30e9},
    )  # fmt: skip
    slowest = 30e9 * Caches(machine).faster(240 * MIB)
    found = cached_rates.cached_rates(machine, 0.0)
    expected = {30: 1.8, 60: 1.6, 90: 1.6, 120: 1.1, 180: 1.0}
    steps = {f"{size}MiB": pytest.approx(slowest * gain) for size, gain in expected.items()}
    assert found == steps | {"480MiB": 30e9, "15MiB": pytest.approx(slowest * 1.8)}
    monkeypatch.setattr(cached_rates, "kernels_s", lambda *given: (1e8, 0.0))
    assert cached_rates.cached_rates(machine, 0.0) == machine.cached_rates

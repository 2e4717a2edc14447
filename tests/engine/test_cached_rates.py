"""Rates of weights that caches hold are those that steps have, where steps were timed."""

from collections.abc import Callable
from typing import Any

import pytest
from hmt.engine.cached_rates import InSteps, held_rates
from hmt.engine.cpu_pace import CpuPace, Held
from hmt.engine.cpu_step_rates import Decoded
from hmt.engine.product_rates import ProductRates
from hmt.planner.caches import Caches
from hmt.planner.products import Products
from hypothesis import given
from hypothesis import strategies as st

from hmt.base.units import MIB
from hmt.contracts.machine import Machine
from hmt.engine import cached_rates
from hmt.engine.probe_models import FEW, MANY, NARROW

PRODUCTS = ProductRates(
    {"bf16": 30e9}, {"bf16": 4e11}, {"bf16@1": 3e-8, "bf16": 1e-10}, {"bf16": 90e9}, {"bf16": 1e-8}
)
MEMORY = 33e9


def test_what_steps_keep_is_told_from_what_loops_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is 30 MiB; steps lose what caches hold sooner than loops do."""
    gains = {0.5: 1.7, 1: 1.5, 2: 1.6, 4: 1.1, MANY: 1.0}

    def decoded(
        machine: Machine, cases: list[Any], seconds: float, pace: Callable[[], CpuPace]
    ) -> list[Decoded]:
        assert machine.step_s == 0, "steps are what is measured"
        found = [Decoded(1e-4, 0.0, size * MIB) for size in (5, 14)]
        for case in cases[len(found) :]:
            size = case.model * 30.0 * MIB
            found.append(Decoded(2e-4, 0.0, size, kernels_s=size / (20e9 * gains[case.model])))
        return found

    def wide_model(layers: int, network: int = 0) -> float:
        return layers / 2 if network == NARROW else layers

    monkeypatch.setattr(cached_rates, "decoded", decoded)
    monkeypatch.setattr(cached_rates, "small_model", lambda layers: {FEW: 5, MANY: 14}[layers])
    monkeypatch.setattr(cached_rates, "wide_model", wide_model)
    machine = Machine(
        "m", 2, 1 << 34, 30e9, 3e9, cache_bytes=480 * MIB, step_s=1.0,
        cached_rates={"7MiB": 50e9, "60MiB": 50e9, "480MiB": 30e9},
    )  # fmt: skip
    slowest = 30e9 * Caches(machine).faster(240 * MIB)
    found = cached_rates.cached_rates(machine, 0.0)
    expected = {15: 1.7, 30: 1.6, 60: 1.6, 120: 1.1}
    steps = {f"{size}MiB": pytest.approx(slowest * gain) for size, gain in expected.items()}
    assert found.rates == steps | {"480MiB": 30e9, "7MiB": pytest.approx(slowest * 1.7)}
    sizes = [mib * MIB for mib in (5, 14, 15, 30, 60, 120, 240)]
    assert found.calls_s == dict(zip(sizes, [1e-4] * 2 + [2e-4] * 5, strict=True))
    monkeypatch.setattr(cached_rates, "decoded", lambda *given: [Decoded(1e-4, 0.0, 1e8)] * 7)
    uncompiled = cached_rates.cached_rates(machine, 0.0)
    assert uncompiled == InSteps(dict(machine.cached_rates), {1e8: 1e-4}), "nothing tells kernels"


@given(share=st.floats(0, 1), rows=st.integers(0, 10000))
def test_what_caches_have_lost_is_told_from_products_with_rows(share: float, rows: int) -> None:
    """Of weights a share comes from memory: products are predicted as they were."""

    def held(part: float) -> Held:
        nbytes = round(16 * MIB * part)
        count = round(rows * part)
        reading_s = nbytes * (share / 30e9 + (1 - share) / 90e9)
        return Held(reading_s + count * (share * 3e-8 + (1 - share) * 1e-8), nbytes, count)

    found, seconds = held_rates(held, PRODUCTS, MEMORY)
    assert seconds == held(1.0).seconds and set(found) == {"4MiB", "16MiB"}
    faster = found["16MiB"] / MEMORY
    products = Products(
        PRODUCTS.bytes_per_s, 0.0, PRODUCTS.operations_per_s, PRODUCTS.row_s, faster,
        PRODUCTS.cached_per_s, PRODUCTS.cached_row_s,
    )  # fmt: skip
    predicted_s = products.seconds(16 * MIB, 8 * MIB, "bf16", 1, rows)
    assert predicted_s == pytest.approx(seconds, rel=1e-6)
    assert found["4MiB"] >= found["16MiB"]


def test_without_products_or_memory_nothing_is_known_of_caches() -> None:
    assert held_rates(lambda share: Held(1e-3, MIB, 8), ProductRates(), MEMORY) == ({}, 0.0)
    assert held_rates(lambda share: Held(0.0, 0, 0), PRODUCTS, MEMORY) == ({}, 0.0)
    small, seconds = held_rates(lambda share: Held(1e-4, MIB // 2, 8), PRODUCTS, MEMORY)
    assert (small, seconds) == ({}, 1e-4), "sizes are whole MiB"
    level = ProductRates({"bf16": 30e9}, cached_per_s={"bf16": 20e9})
    assert held_rates(lambda share: Held(1e-3, MIB, 8), level, MEMORY) == ({}, 1e-3)

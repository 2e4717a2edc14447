"""What caches do to steps: more bytes are never read faster, nor called for in less time."""

from dataclasses import replace

import pytest
from hmt.planner.caches import Caches
from hypothesis import given
from hypothesis import strategies as st
from models import machine_with, small_model

from hmt.base.units import MIB
from hmt.planner.routing import FEW, PUBLISHED, UNIFORM, HitCurve, working_set

BARE = machine_with(small_model())
CACHED = replace(
    BARE,
    ram_read_rate=30e9,
    cache_bytes=480 * MIB,
    cached_rates={"15MiB": 60e9, "60MiB": 50e9, "240MiB": 35e9},
    cold_calls={"16MiB": 1.0, "256MiB": 4.0},
)


@given(st.floats(0, 1e10), st.floats(0, 1e10))
def test_more_bytes_gain_less_from_caches(first: float, second: float) -> None:
    caches, (less, more) = Caches(CACHED), sorted((first, second))
    assert 2.0 >= caches.faster(less) >= caches.faster(more) >= 1.0
    assert 1.0 <= caches.slower(less) <= caches.slower(more) <= 4.0
    shares = [caches.from_memory(caches.faster(nbytes)) for nbytes in (less, more)]
    assert 0.0 <= shares[0] <= shares[1] <= 1.0
    unknown = Caches(BARE)
    assert unknown.faster(less) == unknown.slower(less) == unknown.from_memory(1.0) == 1.0


def test_points_are_met_and_ends_are_level() -> None:
    caches = Caches(CACHED)
    for mib, rate in ((1, 60e9), (15, 60e9), (60, 50e9), (240, 35e9), (960, 30e9), (5000, 30e9)):
        assert caches.faster(mib * MIB) == pytest.approx(rate / 30e9)
    assert (caches.from_memory(2.0), caches.from_memory(1.0)) == (0.0, 1.0)
    # Of two equal parts one is read at twice memory's rate: three fourths of the time.
    assert caches.from_memory(4 / 3) == pytest.approx(0.5)
    assert caches.slower(0) == 1.0
    assert caches.slower(16 * MIB) == 1.0
    assert caches.slower(64 * MIB) == pytest.approx(2.5)
    assert caches.slower(256 * MIB) == caches.slower(1 << 40) == 4.0


@pytest.mark.parametrize("curve", [UNIFORM, PUBLISHED, FEW])
@given(hits=st.floats(0, 1))
def test_a_residency_has_its_hits(curve: HitCurve, hits: float) -> None:
    residency = curve.residency(hits)
    assert curve.hits(residency) == pytest.approx(hits, abs=1e-6)
    one, several = working_set(curve), working_set(curve, 4)
    assert curve.hits(one) == pytest.approx(0.9) and one < several <= min(1.0, 4 * one)

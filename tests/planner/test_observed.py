"""Caches of experts that texts share, and curves of hits from what runs saw, beside plain LRU."""

import random
from collections import OrderedDict
from itertools import pairwise

import pytest
from hmt.planner.observed import SeenPoint, Sighting, seen_curve
from hypothesis import given
from hypothesis import strategies as st

from hmt.planner.routing import (
    PUBLISHED,
    UNIFORM,
    HitCurve,
    measured_curve,
    needed_experts,
    own_share,
    shared_hits,
    usual_curve,
)

EXPERTS, CHOSEN, STEPS = 64, 4, 500


def text(seed: int, drift: float = 0.01) -> list[set[int]]:
    """Experts of each step: mostly of a few that change slowly, as a text's subject does."""
    chance = random.Random(seed)
    liked = [chance.gauss(0, 2) for _ in range(EXPERTS)]
    steps = []
    for _ in range(STEPS):
        for expert in range(EXPERTS):
            if chance.random() < drift:
                liked[expert] = chance.gauss(0, 2)
        keys = [like - chance.expovariate(1) for like in liked]
        steps.append(set(sorted(range(EXPERTS), key=keys.__getitem__)[-CHOSEN:]))
    return steps


TEXTS = [text(seed) for seed in range(4)]


def least_recently_used(texts: list[list[set[int]]], room: int) -> tuple[int, int]:
    """Experts that steps needed, and those that were not there; in the second half."""
    cache: OrderedDict[int, None] = OrderedDict()
    needed = missed = 0
    for number, chosen in enumerate(zip(*texts, strict=True)):
        union = sorted(set().union(*chosen))
        late = number >= STEPS // 2
        needed += late * len(union)
        missed += late * sum(expert not in cache for expert in union)
        for expert in union:
            cache[expert] = None
            cache.move_to_end(expert)
        while len(cache) > room:
            cache.popitem(last=False)
    return needed, missed


def hits_of_one(room: int) -> float:
    found = [least_recently_used([one], room) for one in TEXTS]
    return 1 - sum(missed for _, missed in found) / sum(needed for needed, _ in found)


@pytest.fixture(scope="module")
def simulated() -> HitCurve:
    rooms = (2, 4, 6, 8, 12, 16, 24, 32, 48)
    return measured_curve([room / EXPERTS for room in rooms], [hits_of_one(r) for r in rooms])


@pytest.mark.parametrize(("count", "room"), [(1, 16), (2, 8), (2, 16), (4, 12), (4, 24)])
def test_texts_share_a_cache_as_simulated(simulated: HitCurve, count: int, room: int) -> None:
    needed, missed = least_recently_used(TEXTS[:count], room)
    steps = STEPS - STEPS // 2
    found = needed_experts(EXPERTS, CHOSEN, count, room, simulated, count)
    assert found.absent == pytest.approx(missed / steps, rel=0.15)
    assert found.absent + found.cached == pytest.approx(needed / steps, rel=0.1)
    if count > 1:  # as if all had one working set
        together = needed_experts(EXPERTS, CHOSEN, count, room, simulated)
        assert together.absent < 0.5 * missed / steps


@pytest.mark.parametrize(("count", "room"), [(1, 16), (2, 24), (4, 32)])
def test_what_a_run_saw_predicts_it_and_others_better(
    simulated: HitCurve, count: int, room: int
) -> None:
    needed, missed = least_recently_used(TEXTS[:count], room)
    point = Sighting(EXPERTS, CHOSEN, room / EXPERTS, count, needed, missed).point()
    assert point is not None
    curve = seen_curve(PUBLISHED, [point], "a run")
    found = needed_experts(EXPERTS, CHOSEN, count, room, curve, count)
    assert found.absent / (found.absent + found.cached) == pytest.approx(missed / needed, rel=1e-3)
    if count == 1:
        assert curve.hits(room / EXPERTS) == pytest.approx(1 - missed / needed, abs=1e-6)
    shares = [room / EXPERTS for room in (4, 8, 16, 32)]
    wrong = [
        sum(abs(one.hits(share) - simulated.hits(share)) for share in shares)
        for one in (curve, PUBLISHED)
    ]
    assert wrong[0] < 0.6 * wrong[1]


chances = st.floats(0.01, 0.99)


@given(st.lists(st.tuples(chances, st.floats(0, 1), st.floats(0.1, 100)), max_size=6))
def test_a_seen_curve_goes_through_what_ascends(seen: list[tuple[float, float, float]]) -> None:
    points = [SeenPoint(*each) for each in seen]
    for usual in (PUBLISHED, UNIFORM, usual_curve(8)):
        curve = seen_curve(usual, points, "runs")
        grid = [curve.hits(n / 100) for n in range(101)]
        assert grid == sorted(grid) and grid[0] == 0 and grid[-1] == 1
        ordered = sorted(points, key=lambda point: point.share)
        if all(a.share < b.share and a.hits <= b.hits for a, b in pairwise(ordered)):
            for point in points:
                assert curve.hits(point.share) == pytest.approx(point.hits, abs=1e-9)
        elif points:
            low, high = min(p.hits for p in points), max(p.hits for p in points)
            assert all(low - 1e-9 <= curve.hits(p.share) <= high + 1e-9 for p in points), (
                "what descends counts together"
            )
    assert points or seen_curve(PUBLISHED, points) is PUBLISHED


@given(st.sampled_from([8, 64, 256]), st.integers(1, 8), chances, st.integers(1, 16), chances)
def test_a_sighting_is_undone_exactly(
    experts: int, chosen: int, residency: float, texts: int, hits: float
) -> None:
    share = own_share(residency, texts)
    curve = HitCurve(((0.0, 0.0), (share, hits), (1.0, 1.0)))
    cached = residency * experts
    found = needed_experts(experts, chosen, texts, cached, curve, texts)
    missed = found.absent / (found.absent + found.cached)
    point = Sighting(experts, chosen, residency, texts, 1 << 40, round(missed * (1 << 40))).point()
    assert point is not None and point.share == share
    again = HitCurve(((0.0, 0.0), (share, point.hits), (1.0, 1.0)))
    told = needed_experts(experts, chosen, texts, cached, again, texts)
    assert told.absent / (told.absent + told.cached) == pytest.approx(missed, abs=1e-4)
    # Where a step needs nearly all experts, hits hardly matter; nor do those without room.
    if shared_hits(curve, residency, texts) <= cached / chosen and 4 * texts * chosen <= experts:
        assert point.hits == pytest.approx(hits, abs=1e-4)
    assert Sighting(experts, chosen, 1.0, texts, 10, 0).point() is None
    assert Sighting(experts, chosen, residency, texts, 0, 0).point() is None

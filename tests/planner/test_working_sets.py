"""How many experts steps need: texts whose routing is known, and what must hold for any."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hmt.planner.cost.expert_hit_rate import (
    FEW,
    PUBLISHED,
    UNIFORM,
    HitCurve,
    needed_experts,
    newly_used,
    shared_hits,
    usual_curve,
)

CURVES = st.sampled_from([UNIFORM, FEW, PUBLISHED])


def of_popularity(weights: list[float], chosen: int, tokens: int) -> tuple[list[float], HitCurve]:
    """Distinct experts after each token of a text that chooses by chance, and its curve of hits."""
    total = sum(weights)
    sizes = [0.0]
    for count in range(1, tokens + 1):
        sizes.append(sum(1 - (1 - min(1.0, chosen * w / total)) ** count for w in weights))
    experts, points = len(weights), [(0.0, 0.0)]
    for before, after in pairwise(sizes[1:]):
        share, hits = before / experts, 1 - (after - before) / chosen
        if share < 0.999 and share > points[-1][0] + 1e-9 and hits >= points[-1][1]:
            points.append((share, min(1.0, hits)))
    return sizes, HitCurve((*points, (1.0, 1.0)))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("experts, chosen", [(32, 4), (128, 8)])
def test_a_working_set_grows_by_what_a_cache_of_it_would_miss(
    power: float, experts: int, chosen: int
) -> None:
    weights = [(n + 1) ** -power for n in range(experts)]
    sizes, curve = of_popularity(weights, chosen, 600)
    for tokens in (1, 2, 5, 16, 64, 256, 512):
        found = newly_used(curve, experts, chosen, 0.0, tokens)
        assert found == pytest.approx(sizes[tokens], rel=0.1), tokens
        if tokens < 64:  # and from the middle on
            more = newly_used(curve, experts, chosen, sizes[10], tokens)
            assert more == pytest.approx(sizes[10 + tokens] - sizes[10], rel=0.15, abs=0.1)


@given(CURVES, st.integers(8, 256), st.integers(1, 8), st.floats(0, 1), st.floats(1, 5000))
def test_more_tokens_need_no_fewer_and_never_more_than_there_are(
    curve: HitCurve, experts: int, chosen: int, share: float, tokens: float
) -> None:
    used = share * experts
    one, found, more = (
        newly_used(curve, experts, chosen, used, t) for t in (1, tokens, tokens + 1)
    )
    assert 0 <= one <= found * (1 + 1e-9) and found <= more + 1e-9
    assert more <= experts - used + 1e-9 and found <= chosen * tokens + 1e-9
    hits = min(curve.hits(share), used / chosen)
    assert one == pytest.approx(min((1 - hits) * chosen, experts - used), abs=1e-9)


@given(
    CURVES, st.integers(1, 8), st.floats(0, 1), st.integers(1, 8), st.integers(1, 64),
    st.floats(0, 1),
)  # fmt: skip
def test_what_a_step_needs_is_in_the_cache_or_not(
    curve: HitCurve, chosen: int, share: float, texts: int, each: int, apart: float
) -> None:
    experts, given_curve = 64, HitCurve(curve.points, independence=apart)
    cached = share * experts
    found = needed_experts(experts, chosen, texts * each, cached, given_curve, texts)
    assert 0 <= found.cached <= cached + 1e-9 and 0 <= found.absent <= experts - cached + 1e-9
    assert found.cached + found.absent <= min(experts, texts * each * chosen) + 1e-6


def test_texts_that_choose_alike_share_a_cache_as_one() -> None:
    for share in (0.1, 0.3, 0.7):
        alike = HitCurve(FEW.points, independence=0.0)
        assert shared_hits(alike, share, 8.0) == pytest.approx(FEW.hits(share))
        found = [
            needed_experts(32, 4, 4, share * 32, HitCurve(FEW.points, independence=apart), 4).absent
            for apart in (0.0, 0.5, 1.0)
        ]
        assert found == sorted(found) and found[0] < found[-1]
    assert usual_curve(64) is PUBLISHED and usual_curve(63) is FEW

"""Surveys, draws and largest scores: the extension against the reference and float64."""

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import without_tiles

from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension

native = extension.load()
pytestmark = pytest.mark.skipif(
    native is None, reason="the extension was not built, or HMT_KERNELS=reference"
)
SIZES = [1, 2, 15, 16, 17, 127, 128, 129, 1000, 2048, 2049, 5003]
VOCABULARY = 152_064
LAST = 1 - 2.0**-53
T = TypeVar("T")
How = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def everywhere(compute: Callable[[], T]) -> list[T]:
    """What it returns on each instruction set."""
    before, found = native.isa(), []
    try:
        for name in without_tiles(native):
            native.set_isa(name)
            found.append(compute())
    finally:
        native.set_isa(before)
    return found


def draws(scores: torch.Tensor, how: How, uniforms: Iterable[float]) -> list[int]:
    """The tokens drawn, the same on every instruction set."""
    first, *others = everywhere(lambda: [ops.draw(scores, *how, uniform) for uniform in uniforms])
    assert all(other == first for other in others)
    return first


def random(count: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("count", [*SIZES, VOCABULARY])
def test_survey(count):
    for logits in (
        random(count),
        random(count).round(),
        random(count, spread=1e4),
        random(count, spread=1e-42),
        torch.zeros(count),
        torch.full((count,), -3e38),
        torch.linspace(-90, 90, count),
        random(count).sign() * 3e38,
    ):
        best = int((logits == logits.max()).nonzero()[0])
        exact = float(torch.logsumexp(logits.double(), 0))
        for found in everywhere(lambda: ops.logit_stats(logits)):  # noqa: B023
            assert found.finite and found.best == best
            assert found.log_sum_exp == pytest.approx(exact, rel=1e-7, abs=2e-6)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_survey_of_logits_that_are_no_numbers(count, bad):
    for place in {0, count // 2, max(0, count - 17), count - 1}:
        logits = random(count)
        logits[place] = bad
        assert not any(found.finite for found in everywhere(lambda: ops.logit_stats(logits)))  # noqa: B023
        assert not reference.logit_stats(logits).finite


@pytest.mark.parametrize("count", SIZES)
def test_largest(count):
    for scores in (random(count), random(count).round(), torch.zeros(count), random(count).sign()):
        scores[scores == 0] *= -1.0  # of both signs
        for wanted in (0, 1, 2, 20, count // 2, count, count + 5):
            expected = reference.largest(scores, wanted)
            for found in everywhere(lambda: ops.largest(scores, wanted)):  # noqa: B023
                assert torch.equal(found, expected)
            by_hand = sorted(range(count), key=lambda i: (-float(scores[i]), i))[:wanted]
            assert expected.tolist() == by_hand


def places(scores: torch.Tensor, how: How) -> list[tuple[float, int]]:
    """Random numbers in the middle of what each token owns, by the reference, and the token."""
    tempered = (scores - scores.max()) / how[0]
    ids = reference.support(tempered, *how[1:])
    shares = tempered[ids].exp().double()
    shares /= shares.sum()
    middles = shares.cumsum(0) - shares / 2
    wide = (shares > 1e-5).nonzero().flatten()
    wide = wide[:: max(1, len(wide) // 25)]
    return list(zip(middles[wide].tolist(), ids[wide].tolist(), strict=True))


HOWS = [
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 40, 1.0, 0.0),
    (2.0, 300, 0.9, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.5, 0, 0.95, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.0, 0, 1.0, 1.0),
    (1.2, 20, 0.95, 0.05),
    (1.0, 700, 0.999, 1e-3),
    (5.0, 0, 0.9999, 0.0),
    (1.0, 1 << 31, 0.8, 0.1),
]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 50, 129, 1000, 5003])
def test_every_token_owns_its_share(count, how):
    for scores in (random(count, seed=1), random(count, seed=2).round(), torch.ones(count)):
        expected = places(scores, how)
        found = draws(scores, how, [uniform for uniform, _ in expected])
        assert found == [token for _, token in expected]
        ids = reference.support((scores - scores.max()) / how[0], *how[1:]).tolist()
        assert draws(scores, how, (0.0, LAST)) == [ids[0], reference.draw(scores, *how, LAST)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 400),
    st.floats(0.2, 5),
    st.integers(0, 500),
    st.one_of(st.floats(0.01, 0.999), st.just(1.0)),
    st.floats(0, 1),
    st.floats(0, LAST),
)
def test_draws_equal_the_reference(seed, count, temperature, top_k, top_p, min_p, uniform):
    scores = random(count, seed)
    how = (temperature, top_k, top_p, min_p)
    # Weights differ in their last bit, so at an edge either neighbour may be meant.
    near = {
        reference.draw(scores, *how, min(max(uniform + step, 0.0), LAST))
        for step in (-1e-6, 0.0, 1e-6)
    }
    assert draws(scores, how, [uniform])[0] in near


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_draws_from_a_large_vocabulary(how):
    generator = torch.Generator().manual_seed(3)
    for scores in (random(VOCABULARY, spread=2.0), torch.zeros(VOCABULARY)):
        uniforms = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        expected = [reference.draw(scores, *how, uniform) for uniform in uniforms]
        assert draws(scores, how, uniforms) == expected


def test_scores_and_temperatures_at_the_limits():
    scores = torch.full((300,), -3e38)
    scores[[9, 200]] = 3e38
    for temperature in (1e-60, 1e-30, 1.0, 1e30):
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (5, 0.9, 0.1), (0, 0.9, 0.0), (0, 1.0, 0.5)):
            how = (temperature, top_k, top_p, min_p)
            assert draws(scores, how, (0.0, LAST)) == [9, 200]


def test_scores_that_are_no_numbers_never_name_a_token_that_does_not_exist():
    for bad in (math.nan, math.inf, -math.inf):
        for count in (1, 5, 300):
            for scores in (torch.full((count,), bad), random(count)):
                scores[count // 2] = bad
                for how in HOWS:
                    assert 0 <= draws(scores, how, [0.7])[0] < count


def test_scores_that_do_not_lie_together_are_left_to_the_reference():
    scores = random(100)
    apart = torch.stack((scores, scores), dim=1)[:, 0]
    assert not apart.is_contiguous()
    assert ops.logit_stats(apart).best == ops.logit_stats(scores).best
    assert torch.equal(ops.largest(apart, 7), ops.largest(scores, 7))
    assert ops.draw(apart, 1.0, 5, 0.9, 0.0, 0.4) == ops.draw(scores, 1.0, 5, 0.9, 0.0, 0.4)

"""Foreseeing experts: candidates in order, trust by what came true."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hmt.engine.experts.predictor import PredictionSource, Trust, candidates

EXPERTS = 6
chosen = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True)


@given(st.lists(chosen, max_size=6))
def test_candidates_are_all_that_were_foreseen_the_likeliest_first(guess: list[list[int]]) -> None:
    found = candidates(guess, PredictionSource.ROUTER)
    experts = [expert for expert, _ in found]
    assert sorted(experts) == sorted({expert for token in guess for expert in token})
    tokens = Counter(expert for token in guess for expert in token)
    ranks = {
        expert: min(token.index(expert) for token in guess if expert in token) for expert in experts
    }
    assert [kind for _, kind in found] == [
        (PredictionSource.ROUTER, ranks[expert]) for expert in experts
    ]
    keys = [(ranks[expert], -tokens[expert]) for expert in experts]
    assert keys == sorted(keys)


def test_trust_follows_what_comes_true_by_source_and_rank() -> None:
    trust = Trust()
    often, seldom = (PredictionSource.ROUTER, 0), (PredictionSource.ROUTER, 3)
    for number in range(300):
        trust.learn([(1, often), (2, seldom)], {1, 2} if number % 3 == 0 else {1})
    assert trust.probable(often) and not trust.probable(seldom)
    assert trust.probable((PredictionSource.ROUTER_OF_FIRST, 3)), (
        "what was never tried may be tried"
    )
    for _ in range(100):
        trust.learn([(1, often)], set())
        trust.learn([(2, seldom)], {2})
    assert not trust.probable(often) and trust.probable(seldom)

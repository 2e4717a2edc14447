"""Foreseeing experts: candidates in order, trust by what came true, transitions as counted."""

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.engine.experts.predictor import PredictionSource, Transitions, Trust, candidates

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
    assert trust.probable((PredictionSource.TRANSITIONS, 3)), "what was never tried may be tried"
    for _ in range(100):
        trust.learn([(1, often)], set())
        trust.learn([(2, seldom)], {2})
    assert not trust.probable(often) and trust.probable(seldom)


@given(st.lists(st.tuples(chosen, chosen), max_size=40), chosen, st.integers(1, EXPERTS))
@settings(max_examples=100, deadline=None)
def test_transitions_are_as_counted(
    seen: list[tuple[list[int], list[int]]], before: list[int], count: int
) -> None:
    memory = torch.full((Transitions.nbytes(EXPERTS) + 9,), 255, dtype=torch.uint8)
    transitions = Transitions(memory, EXPERTS)
    plain = np.zeros((EXPERTS, EXPERTS))
    for old, new in seen:
        transitions.learn(old, new)
        for a in old:
            for b in new:
                plain[a, b] += 1
    scores = sum(plain[a] / max(1, plain[a].sum()) for a in before)
    found = transitions.following(before, count)
    assert len(found) == min(count, int((scores > 0).sum())) == len(set(found))
    assert np.allclose(scores[found], np.sort(scores)[::-1][: len(found)])


def test_counts_fade_instead_of_overflowing() -> None:
    transitions = Transitions(torch.zeros(Transitions.nbytes(2), dtype=torch.uint8), 2)
    for _ in range(40_000):
        transitions.learn([0], [0])
    for _ in range(40_000):
        transitions.learn([0], [1])
    assert transitions.following([0], 2) == [1, 0]
    assert transitions.following([1], 2) == []

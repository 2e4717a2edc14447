"""Bits under a budget: as good as the best choice, up to what cannot be divided."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.quantizing.choosing import Option, choose

GROUPS = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 100)), min_size=1, max_size=4, unique=True),
    min_size=1,
    max_size=5,
)


def options_of(groups: list[list[tuple[int, float]]]) -> list[list[Option]]:
    return [[Option(number, *pair) for number, pair in enumerate(some)] for some in groups]


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.integers(0, 200))
def test_a_choice_fits_and_loses_little_more_than_the_best(
    given: list[list[tuple[int, float]]], budget: int
):
    groups = options_of(given)
    fitting = [
        sum(option.loss for option in some)
        for some in product(*groups)
        if sum(option.nbytes for option in some) <= budget
    ]
    found = choose(groups, budget)
    if not fitting:
        assert found is None
        return
    assert found is not None and sum(option.nbytes for option in found) <= budget
    assert all(option in some for option, some in zip(found, groups, strict=True))
    # A greedy choice is apart from the best by one step of one group at most.
    largest = max(max(o.loss for o in some) - min(o.loss for o in some) for some in groups)
    assert sum(option.loss for option in found) <= min(fitting) + largest + 1e-9


def test_more_room_never_loses_more_where_steps_are_even():
    groups = [[Option(b, 10 * b, weight * 4.0**-b) for b in (2, 3, 4, 8)] for weight in (1, 9, 300)]
    losses = []
    for budget in range(60, 250, 10):
        found = choose(groups, budget)
        assert found is not None
        losses.append(sum(option.loss for option in found))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == pytest.approx(310 * 4.0**-8)

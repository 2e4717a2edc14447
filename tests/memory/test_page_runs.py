"""Runs of numbers against a plain set."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hmt.memory.allocator.page_runs import PageRuns

SPANS = st.tuples(st.integers(0, 40), st.integers(1, 12))


@given(st.lists(st.tuples(st.booleans(), SPANS)), SPANS)
def test_runs_are_the_set_of_their_numbers(
    changes: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]
) -> None:
    runs, numbers = PageRuns(), set()
    for adding, (first, length) in changes:
        span = range(first, first + length)
        if adding:
            runs.add(first, first + length)
            numbers |= set(span)
        else:
            runs.remove(first, first + length)
            numbers -= set(span)
    for first, length in (asked, (0, 60)):
        parts = runs.within(first, first + length)
        assert [n for a, b in parts for n in range(a, b)] == sorted(
            numbers & set(range(first, first + length))
        )
        assert all(b < a for (_, b), (a, _) in pairwise(parts)), "neighbours"

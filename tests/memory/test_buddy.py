"""The buddy system against a plain set of free pages."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hmt.memory.allocator.buddy import Buddy


def runs_of(free: set[int]) -> list[tuple[int, int]]:
    """(first, length) of the runs of adjacent numbers, by a plain scan."""
    runs: list[tuple[int, int]] = []
    for page in sorted(free):
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


class BuddyMachine(RuleBasedStateMachine):
    """Pages are taken and given back in any pieces."""

    @initialize(pages=st.integers(0, 200))
    def begin(self, pages: int) -> None:
        self.buddy = Buddy(pages)
        self.free = set(range(pages))
        self.taken: list[tuple[int, int]] = []

    @rule(wanted=st.integers(1, 80), packed=st.booleans())
    def take(self, wanted: int, packed: bool) -> None:
        fitting = [first for first, length in runs_of(self.free) if length >= wanted]
        place = (self.buddy.take_packed if packed else self.buddy.take)(wanted)
        assert (place is not None) == bool(fitting), "whatever is free in one piece can be had"
        if place is not None:
            assert not packed or place == fitting[0]
            self._took(place, wanted)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take_these(self, data: st.DataObject) -> None:
        first, length = data.draw(st.sampled_from(runs_of(self.free)))
        skipped = data.draw(st.integers(0, length - 1))
        wanted = data.draw(st.integers(1, length - skipped))
        self.buddy.take_at(first + skipped, wanted)
        self._took(first + skipped, wanted)

    def _took(self, place: int, wanted: int) -> None:
        pages = set(range(place, place + wanted))
        assert pages <= self.free
        self.free -= pages
        self.taken.append((place, wanted))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        place, length = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        part = data.draw(st.integers(1, length))
        if part < length:
            self.taken.append((place + part, length - part))
        self.buddy.give(place, part)
        self.free |= set(range(place, place + part))

    @invariant()
    def agrees(self) -> None:
        assert list(self.buddy.runs()) == runs_of(self.free)
        assert self.buddy.free_pages == len(self.free)


TestBuddy = BuddyMachine.TestCase
TestBuddy.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 10_000))
def test_a_size_costs_exactly_its_pages(wanted: int) -> None:
    """33 MiB cost 33 MiB and not 64."""
    buddy = Buddy(2 * wanted + 1)
    place = buddy.take(wanted)
    assert place is not None and buddy.free_pages == wanted + 1
    buddy.give(place, wanted)
    assert list(buddy.runs()) == [(0, 2 * wanted + 1)]


def test_sizes_that_are_no_powers_of_two_fill_every_page() -> None:
    buddy = Buddy(10 * 33)
    places = [buddy.take_packed(33) for _ in range(10)]
    assert places == [33 * number for number in range(10)] and buddy.free_pages == 0

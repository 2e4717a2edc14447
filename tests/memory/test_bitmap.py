"""The bitmap against a plain set."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hmt.memory import Bitmap


def runs_of(numbers: set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


class BitmapMachine(RuleBasedStateMachine):
    """Numbers are taken and given back in any order."""

    @initialize(count=st.sampled_from([0, 1, 2, 59, 60, 61, 64, 200]))
    def begin(self, count: int) -> None:
        self.count = count
        self.bitmap = Bitmap(count)
        self.free = set(range(count))

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        wanted = data.draw(st.integers(0, len(self.free)))
        runs = runs_of(self.free)
        taken = self.bitmap.take(wanted)
        assert len(taken) == len(set(taken)) == wanted and set(taken) <= self.free
        whole = next((run for run in runs if len(run) >= wanted), None)
        if wanted and whole is not None:
            assert taken == whole[:wanted], "the lowest run that holds them"
        elif wanted:
            longest = max(len(run) for run in runs)
            assert len(runs_of(set(taken[:longest]))) == 1, "the longest run first"
        self.free -= set(taken)

    @precondition(lambda self: len(self.free) < self.count)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        used = sorted(set(range(self.count)) - self.free)
        given = data.draw(st.lists(st.sampled_from(used), unique=True))
        self.bitmap.give(given)
        self.free |= set(given)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def give_twice(self, data: st.DataObject) -> None:
        free = data.draw(st.sampled_from(sorted(self.free)))
        others = data.draw(st.permutations([free, *(set(range(self.count)) - self.free)]))
        with pytest.raises(AssertionError, match="twice"):
            self.bitmap.give(others)

    @invariant()
    def agrees(self) -> None:
        assert self.bitmap.free == len(self.free)


TestBitmap = BitmapMachine.TestCase
TestBitmap.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_number_given_twice_in_one_call_is_seen() -> None:
    bitmap = Bitmap(8)
    bitmap.take(8)
    with pytest.raises(AssertionError, match="twice"):
        bitmap.give([3, 5, 3])
    with pytest.raises(AssertionError, match="none of"):
        bitmap.give([8])


def test_a_hundred_thousand_operations() -> None:
    """Texts that take pages, grow and end, in a pool that is full half of the time."""
    draw, count = random.Random(0), 1000
    bitmap, free, texts = Bitmap(count), set(range(count)), list[list[int]]()
    for _ in range(100_000):
        wanted = draw.randrange(1, 40)
        if texts and (draw.random() < 0.45 or wanted > len(free)):
            given = texts.pop(draw.randrange(len(texts)))
            bitmap.give(given)
            free |= set(given)
        else:
            taken = bitmap.take(wanted)
            assert len(taken) == wanted and free.issuperset(taken)
            free.difference_update(taken)
            if texts and draw.random() < 0.5:
                draw.choice(texts).extend(taken)
            else:
                texts.append(taken)
        assert bitmap.free == len(free)
    bitmap.give([page for text in texts for page in text])
    assert bitmap.free == count
    assert bitmap.take(count) == list(range(count))

"""Slots of sequences, and spare ones: given where they are needed most, and each to one holder."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.kvcache import SequenceSlots


class Copies:
    """Copies in spare slots, as StateCheckpoints has them."""

    def __init__(self, slots: SequenceSlots) -> None:
        self.slots, self.held = slots, list[int]()
        slots.copies = self

    @property
    def in_use(self) -> int:
        return len(self.held)

    def give_up_one(self) -> None:
        self.slots.give_spare(self.held.pop(0))

    def make(self) -> None:
        if (slot := self.slots.take_spare()) is not None:
            self.held.append(slot)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), count=st.integers(1, 4), spare=st.integers(0, 5))
def test_slots_are_what_plain_counting_says(data: st.DataObject, count: int, spare: int) -> None:
    slots = SequenceSlots(count, 1, spare)
    copies = Copies(slots)
    running, waiting, numbers = set[int](), set[int](), iter(range(10_000))
    for _ in range(60):
        # Waiting ones for which no spare slot was left have one of the others.
        stand_in = sum(sequence in slots._parked for sequence in waiting)
        taken = len(running) + len(waiting) - stand_in
        assert slots.can_open(1) == (taken < count)
        act = data.draw(st.sampled_from(["open", "close", "park", "resume", "copy", "other"]))
        one = data.draw(st.sampled_from(sorted(running | waiting))) if running | waiting else None
        if act == "open" and slots.can_open(1):
            sequence = next(numbers)
            slots.open(sequence, 3)
            running.add(sequence)
        elif act == "copy":
            before = slots.spare_free
            copies.make()
            assert slots.spare_free == max(0, before - 1)
        elif one is None:
            continue
        elif act == "close":
            slots.close(one)
            running.discard(one)
            waiting.discard(one)
        elif act == "park" and one in running:
            room = slots.can_park()
            slots.park(one)
            assert room == (one in slots._parked)
            running.remove(one)
            waiting.add(one)
        elif act == "resume" and one in waiting:
            assert slots.can_resume(one) == (one not in slots._parked or slots.can_open(1))
            if slots.can_resume(one):
                slots.resume(one)
                waiting.remove(one)
                running.add(one)
        elif act == "other" and one in running:
            own, other = int(slots.of(one)[0]), slots.other(one)
            assert (other is None) == (not slots.has_other(one))
            if other is not None:
                assert slots.other(one) == other != own
                slots.exchange(one)
                assert (int(slots.of(one)[0]), slots.other(one)) == (other, own)
        others = [slots._others[sequence] for sequence in slots._others]
        used = [int(slots.of(sequence)[0]) for sequence in slots.sequences] + others + copies.held
        assert len(set(used)) == len(used) <= count + spare, "no slot has two holders"
        assert slots.sequences == running | waiting and slots._others.keys() <= running
        assert len(others) + len(copies.held) + len(slots._parked) + slots.spare_free == spare


def test_a_sequence_that_waits_takes_what_is_needed_least() -> None:
    """First a slot that is free, then one for a guess, then a copy."""
    slots = SequenceSlots(3, 1, spare=3)
    copies = Copies(slots)
    for sequence in range(3):
        slots.open(sequence, 1)
    copies.make()
    assert slots.other(0) is not None
    slots.park(2)
    assert slots.has_other(0) and copies.in_use == 1
    slots.park(1)
    assert not slots.has_other(0) and copies.in_use == 1
    assert slots.other(0) is not None, "in the place of a copy"
    assert copies.in_use == 0 and slots.can_park()
    slots.park(0)
    assert not slots.can_park() and slots.can_open(1)
    for sequence in range(3, 6):
        slots.open(sequence, 1)
    assert not slots.can_resume(0) and slots.other(3) is None

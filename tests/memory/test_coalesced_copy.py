"""Copies of neighbours as one: the same bytes arrive, in as few copies as there are gaps."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.memory.device.coalesced_copy import joined

PIECES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1), st.integers(0, 1)), max_size=12)


def _laid_out(sizes: list[int], gaps: list[bool]) -> list[torch.Tensor]:
    """Slices of one arena, one behind the other, with a byte between them where there is a gap."""
    arena = torch.randint(0, 256, (sum(sizes) + len(sizes),), dtype=torch.uint8)
    at, found = 0, []
    for size, gap in zip(sizes, gaps, strict=True):
        found.append(arena[at + gap : at + gap + size])
        at += gap + size
    return found


@given(PIECES)
@settings(deadline=None)
def test_the_same_bytes_arrive_where_they_are_meant(pieces: list[tuple[int, int, int]]) -> None:
    sizes = [size for size, _, _ in pieces]
    targets = _laid_out(sizes, [bool(gap) for _, gap, _ in pieces])
    sources = _laid_out(sizes, [bool(gap) for _, _, gap in pieces])
    expected = [source.clone() for source in sources]
    pairs = list(joined(targets, sources))
    for target, source in pairs:
        assert target.shape == source.shape
        target.copy_(source)
    for target, wanted in zip(targets, expected, strict=True):
        assert torch.equal(target, wanted)
    behind_a_gap = sum(bool(one or other) for _, one, other in pieces[1:])
    assert len(pairs) == (1 + behind_a_gap if pieces else 0)


def test_arenas_that_happen_to_touch_stay_apart() -> None:
    # Two arenas over the same memory, as the system may map one right behind the other.
    memory = bytearray(range(16))
    first = torch.frombuffer(memory, dtype=torch.uint8, count=8)
    second = torch.frombuffer(memory, dtype=torch.uint8, count=8, offset=8)
    targets = list(torch.zeros(16, dtype=torch.uint8).split(8))
    assert len(list(joined(targets, [first, second]))) == 2
    assert len(list(joined([first, second], targets))) == 2


def test_the_rest_of_an_arena_is_not_touched() -> None:
    target, source = torch.zeros(20, dtype=torch.uint8), torch.ones(20, dtype=torch.uint8)
    for into, out_of in joined([target[4:8], target[8:12]], [source[:4], source[4:8]]):
        into.copy_(out_of)
    assert target.tolist() == [0] * 4 + [1] * 8 + [0] * 8

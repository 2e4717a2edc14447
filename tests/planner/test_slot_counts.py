"""Slots by size: they fit, every size has enough to go on, and shares of the circle are even."""

from hypothesis import given
from hypothesis import strategies as st

from hmt.contracts.blocks import BlockId, BlockKind, BlockSize
from hmt.planner.placement.slot_counts import slot_counts

PAGE = 4096
KINDS = [BlockKind.ATTENTION, BlockKind.FFN, BlockKind.ROUTER, BlockKind.HEAD]


@st.composite
def streamed(draw: st.DrawFn) -> list[BlockSize]:
    kinds = draw(st.lists(st.sampled_from(KINDS), unique=True, min_size=1))
    blocks = []
    for kind in kinds:
        size = draw(st.integers(1, 40)) * PAGE
        for layer in range(draw(st.integers(1, 12))):
            blocks.append(BlockSize(BlockId(layer, kind), size, size))
    if draw(st.booleans()):
        size = draw(st.integers(1, 40)) * PAGE
        for index in range(draw(st.integers(1, 64))):
            blocks.append(BlockSize(BlockId(0, BlockKind.EXPERT, index), size, size))
    return blocks


@given(streamed(), st.integers(0, 3000))
def test_slots_fit_and_are_shared_evenly(blocks: list[BlockSize], pages: int) -> None:
    counts = slot_counts(blocks, pages * PAGE)
    if not counts:
        return
    there = {size: [b for b in blocks if b.slot_bytes == size] for size in counts}
    assert sum(size * count for size, count in counts.items()) <= pages * PAGE
    assert all(1 <= counts[size] <= len(own) for size, own in there.items())
    if any(counts[size] < min(2, len(own)) for size, own in there.items()):
        # Two of each had no room: sizes take turns, and what is smaller has their slots as well.
        assert len(counts) > 1 and all(b.id.kind is not BlockKind.EXPERT for b in blocks)
        assert max(counts) == max(block.slot_bytes for block in blocks)
        return
    assert sum(map(len, there.values())) == len(blocks)
    dense = {s: own for s, own in there.items() if own[0].id.kind is not BlockKind.EXPERT}
    # One slot more of any other size would not have been fairer: shares differ by one slot.
    for size, own in dense.items():
        if counts[size] > min(2, len(own)):
            before = (counts[size] - 1) / len(own)
            for other, others in dense.items():
                fits = sum(s * c for s, c in counts.items()) - size + other <= pages * PAGE
                if counts[other] < len(others) and fits and len(dense) == len(there):
                    assert counts[other] / len(others) >= before - 1e-9


def test_sizes_take_turns_where_each_could_not_have_two() -> None:
    blocks = [BlockSize(BlockId(n, BlockKind.FFN), 10 * PAGE, 10 * PAGE) for n in range(8)]
    blocks += [BlockSize(BlockId(n, BlockKind.ATTENTION), 2 * PAGE, 2 * PAGE) for n in range(8)]
    head = [BlockSize(BlockId(-1, BlockKind.HEAD), PAGE, PAGE)]
    assert slot_counts(blocks, 11 * PAGE) == {}, "not two sizes fit"
    assert slot_counts(blocks, 12 * PAGE) == {10 * PAGE: 1, 2 * PAGE: 1}
    assert slot_counts([*blocks, *head], 12 * PAGE) == {10 * PAGE: 1, 2 * PAGE: 1}
    assert slot_counts([*blocks, *head], 13 * PAGE) == {10 * PAGE: 1, 2 * PAGE: 1, PAGE: 1}
    assert slot_counts(blocks, 16 * PAGE) == {10 * PAGE: 1, 2 * PAGE: 3}
    expert = [BlockSize(BlockId(0, BlockKind.EXPERT, n), PAGE, PAGE) for n in range(8)]
    assert slot_counts([*blocks, *expert], 20 * PAGE) == {}


def test_slots_are_for_the_size_of_which_the_least_has_some() -> None:
    blocks = [BlockSize(BlockId(n, BlockKind.FFN), 10 * PAGE, 10 * PAGE) for n in range(8)]
    blocks += [BlockSize(BlockId(n, BlockKind.ATTENTION), PAGE, PAGE) for n in range(8)]
    assert slot_counts(blocks, 21 * PAGE) == {10 * PAGE: 2, PAGE: 1}
    assert slot_counts(blocks, 22 * PAGE) == {10 * PAGE: 2, PAGE: 2}
    assert slot_counts(blocks, 32 * PAGE) == {10 * PAGE: 3, PAGE: 2}
    assert slot_counts(blocks, 33 * PAGE) == {10 * PAGE: 3, PAGE: 3}


def test_an_expert_that_is_as_large_as_a_dense_block_shares() -> None:
    blocks = [BlockSize(BlockId(n, BlockKind.ATTENTION), PAGE, PAGE) for n in range(8)]
    blocks += [BlockSize(BlockId(0, BlockKind.EXPERT, n), PAGE, PAGE) for n in range(8)]
    assert slot_counts(blocks, 100 * PAGE) == {}

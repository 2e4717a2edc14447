"""The allocator of KV pages against plain lists of who owns what."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import BudgetError
from hmt.contracts.model import PAGE_TOKENS
from hmt.kvcache import KVAllocator, PagePool
from hmt.kvcache.prefix import PrefixTree, keep_prefixes
from hmt.kvcache.sequence_slots import SequenceSlots

PAGES = 24


@dataclass
class Recorder:
    """A storage that keeps, for each page, which positions of which text were written there."""

    held: dict[int, object] = field(default_factory=dict)
    slots: list[tuple[int, int]] = field(default_factory=list)

    def copy_page(self, page: np.ndarray, to: np.ndarray) -> None:
        self.held[int(to[0])] = self.held[int(page[0])]

    def copy_slots(self, sequence: int, to: int) -> None:
        self.slots.append((sequence, to))

    def rollback(self, sequence: int, tokens: int) -> None:
        pass

    def pages_made(self, ids: np.ndarray) -> None:
        for page in ids.tolist():
            self.held[page] = None


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_reservations_are_what_plain_counting_says(data: st.DataObject) -> None:
    """Free positions are all minus the distinct pages that are owned; nothing is owned twice."""
    allocator, storage = KVAllocator(PagePool(PAGES)), Recorder()
    allocator.attach(storage)
    reserved: dict[int, int] = {}  # pages by sequence
    filled: dict[int, list[object]] = {}  # by sequence: what each of its positions holds
    for number in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["open", "fork", "grow", "shrink", "fill", "close"]))
        tokens = data.draw(st.integers(1, 200))
        one = data.draw(st.sampled_from(sorted(reserved))) if reserved else None
        owned = {page for each in reserved for page in allocator.pages(each).tolist()}
        free = PAGES - len(owned)
        assert allocator.free_tokens == PAGE_TOKENS * free
        if what == "open":
            assert allocator.can_open(tokens) == (pages_of(tokens) <= free)
            if not allocator.can_open(tokens):
                with pytest.raises(BudgetError, match="are free"):
                    allocator.open(tokens)
                continue
            made = allocator.open(tokens)
            reserved[made], filled[made] = pages_of(tokens), []
        elif one is None:
            continue
        elif what == "fork":
            held = data.draw(st.integers(0, len(filled[one])))
            tokens += held
            more = pages_of(tokens) - held // PAGE_TOKENS
            assert allocator.can_fork(one, held, tokens) == (more <= free)
            if more <= free:
                made = allocator.fork(one, held, tokens)
                reserved[made], filled[made] = pages_of(tokens), filled[one][:held]
        elif what == "grow":
            more = pages_of(tokens) - reserved[one]
            assert allocator.can_grow(one, tokens) == (more <= max(0, free))
            if allocator.can_grow(one, tokens):
                allocator.grow(one, tokens)
                reserved[one] = max(reserved[one], pages_of(tokens))
        elif what == "shrink":
            least = max(len(filled[one]), tokens)
            allocator.shrink(one, least)
            reserved[one] = min(reserved[one], pages_of(least))
        elif what == "fill":
            room = reserved[one] * PAGE_TOKENS - len(filled[one])
            for _ in range(min(room, tokens)):
                filled[one].append((number, len(filled[one])))
                page = int(allocator.pages(one)[(len(filled[one]) - 1) // PAGE_TOKENS])
                start = (len(filled[one]) - 1) // PAGE_TOKENS * PAGE_TOKENS
                storage.held[page] = tuple(filled[one][start:])
        else:
            allocator.close(one)
            del reserved[one], filled[one]
        for each, pages in reserved.items():
            assert allocator.reserved_tokens(each) == pages * PAGE_TOKENS
            assert len(allocator.pages(each)) == pages
            for at in range(pages_of(len(filled[each]))):
                own = tuple(filled[each][at * PAGE_TOKENS : (at + 1) * PAGE_TOKENS])
                kept = storage.held[int(allocator.pages(each)[at])]
                assert isinstance(kept, tuple) and kept[: len(own)] == own
    for each in [*reserved]:
        allocator.close(each)
    assert allocator.free_tokens == allocator.capacity_tokens == PAGES * PAGE_TOKENS


def test_slots_of_a_fixed_number_bound_sequences_as_pages_do() -> None:
    """The case of recurrent state: one slot for each sequence, whatever its length."""
    allocator, storage = KVAllocator(PagePool(PAGES), [SequenceSlots(2, most=1)]), Recorder()
    allocator.attach(storage)
    first = allocator.open(40)
    forked = allocator.fork(first, 0, 16)
    assert storage.slots == [(first, forked)]
    assert allocator.free_tokens and not allocator.can_open(1)
    with pytest.raises(BudgetError):
        allocator.open(1)
    assert allocator.can_grow(first, 200)
    assert not allocator.can_rewind() and not allocator.can_park()
    allocator.close(first)
    assert allocator.can_open(1)


def test_rings_grow_with_their_sequence_up_to_their_length() -> None:
    slots = SequenceSlots(7, most=5)
    slots.open(1, 2)
    first = slots.of(1)
    assert slots.can_grow(1, 100) and slots.can_open(5) and slots.can_open(100)
    slots.grow(1, 100)
    assert len(slots.of(1)) == 5 and slots.of(1)[:2].tolist() == first.tolist()
    assert len(first) == 2, "whoever has read it keeps it as it was"
    assert slots.can_open(2) and not slots.can_open(3)
    slots.close(1)
    assert slots.can_open(5)


def test_prefixes_give_way_to_sequences_and_are_counted_as_free() -> None:
    """Also where nothing holds bytes, as in a simulation."""
    allocator = KVAllocator(PagePool(PAGES))
    tree: PrefixTree = keep_prefixes(allocator)
    first = allocator.open(10 * PAGE_TOKENS)
    tree.insert([7] * (10 * PAGE_TOKENS), allocator.pages(first))
    allocator.close(first)
    assert allocator.free_tokens == allocator.capacity_tokens and tree.held_pages == 10
    ids = tree.find([7] * (4 * PAGE_TOKENS))
    assert allocator.can_open_with(PAGES * PAGE_TOKENS, ids)
    assert not allocator.can_open_with((PAGES + 1) * PAGE_TOKENS, ids)
    second = allocator.open_with((PAGES - 2) * PAGE_TOKENS, ids)
    assert allocator.pages(second)[:4].tolist() == ids.tolist(), "what it shares was not evicted"
    assert len(set(allocator.pages(second).tolist())) == PAGES - 2
    assert allocator.free_tokens == 2 * PAGE_TOKENS


def test_what_lacks_is_named_where_pages_are_free_and_slots_are_not() -> None:
    allocator = KVAllocator(PagePool(10), [SequenceSlots(2, 1)])
    first, _ = allocator.open(16), allocator.open(16)
    assert not allocator.can_open(16) and not allocator.can_fork(first, 16, 32)
    with pytest.raises(BudgetError, match=r"2 open ones leave none of 2; .*--max-batch"):
        allocator.open(16)
    with pytest.raises(BudgetError, match="128 of 160 are free"):
        allocator.grow(first, 16 * 12)
    allocator.close(first)
    assert allocator.can_open(16)

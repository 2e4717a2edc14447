"""The tree of prefixes against a plain table of all beginnings."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.contracts.model import PAGE_TOKENS
from hmt.kvcache.eviction import KV_EVICTION
from hmt.kvcache.page_table import PageTable
from hmt.kvcache.prefix import PrefixTree
from hmt.memory import Bitmap

PAGES, MOST, AGE_S = 60, 40, 30.0


def text(*pages: int) -> list[int]:
    """Tokens of whole pages, each named by a number."""
    return [PAGE_TOKENS * page + at for page in pages for at in range(PAGE_TOKENS)]


@dataclass
class Held:
    page: int
    used_s: float


class Table:
    """Every beginning that is held, by salt and pages."""

    def __init__(self) -> None:
        self.book = PageTable([Bitmap(PAGES)])
        self.now = 0.0
        self.tree = PrefixTree(
            self.book, MOST, order="lru", max_age_s=AGE_S, clock=lambda: self.now
        )
        self.held: dict[tuple, Held] = {}
        self.taken: list[np.ndarray] = []  # what pretended sequences own

    def path(self, salt: str, pages: tuple) -> list[tuple]:
        found = []
        for end in range(1, len(pages) + 1):
            if (salt, pages[:end]) not in self.held:
                break
            found.append((salt, pages[:end]))
        return found

    def expire(self) -> None:
        self.held = {k: h for k, h in self.held.items() if h.used_s >= self.now - AGE_S}

    def use(self, keys: list[tuple]) -> None:
        for key in keys:
            self.held[key].used_s = self.now

    def owners(self, page: int) -> int:
        return sum(int(page in ids) for ids in self.taken)

    def ends(self) -> list[tuple]:
        """Beginnings that nothing continues."""
        inner = {(salt, pages[:-1]) for salt, pages in self.held}
        return [key for key in self.held if key not in inner]

    def shed(self, wanted: int, freeing: bool) -> None:
        """Forget the least recently used end, one after the other."""
        alone = sum(not self.owners(h.page) for h in self.held.values())
        left = min(wanted, alone) if freeing else wanted
        while left > 0:

            def rank(key: tuple) -> tuple:
                held = self.held[key]
                return freeing and self.owners(held.page) > 0, held.used_s

            key = min(self.ends(), key=rank)
            left -= 1 if not freeing else not self.owners(self.held[key].page)
            del self.held[key]

    def check(self) -> None:
        tree, book = self.tree, self.book
        for salt, pages in self.held:
            ids = [h.page for h in (self.held[key] for key in self.path(salt, pages))]
            assert tree.find(text(*pages), salt).tolist() == ids
        held = [h.page for h in self.held.values()]
        assert len(set(held)) == len(held) == tree.held_pages
        owned = {int(page) for ids in self.taken for page in ids}
        assert PAGES - book.free == len(owned | set(held))
        assert sorted(tree.alone().tolist()) == sorted(set(held) - owned)


texts = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
salts = st.sampled_from(["", "other model"])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_is_a_table_of_beginnings(data):
    table = Table()
    for _ in range(data.draw(st.integers(1, 25))):
        table.now += data.draw(st.sampled_from([1.0, 1.0, 1.0, 14.0]))
        salt, pages = data.draw(salts), data.draw(texts)
        act = data.draw(st.sampled_from(["compute", "compute", "match", "evict", "close", "miss"]))
        tokens = text(*pages) + [7] * data.draw(st.integers(0, PAGE_TOKENS - 1))
        if act == "compute" and table.book.free >= len(pages):
            _compute(table, salt, pages, tokens)
        elif act == "match":
            _match(table, salt, pages, tokens)
        elif act == "evict":
            _evict(table, data.draw(st.integers(1, 12)))
        elif act == "close" and table.taken:
            ids = table.taken.pop(data.draw(st.integers(0, len(table.taken) - 1)))
            table.book.drop(ids)
        elif act == "miss":
            assert len(table.tree.find(text(9, *pages), salt)) == 0
            _common(table, salt, tokens[: data.draw(st.integers(0, len(tokens)))])
        table.check()
    table.tree.clear()
    for ids in table.taken:
        table.book.drop(ids)
    assert table.book.free == PAGES


def _compute(table, salt, pages, tokens):
    """A sequence computes a text all by itself; it may go on to own it."""
    ids = table.book.new(len(pages))
    table.taken.append(ids)
    table.expire()
    path = table.path(salt, pages)
    table.use(path)
    table.shed(len(table.held) + len(pages) - len(path) - MOST, freeing=False)
    path = table.path(salt, pages)
    assert table.tree.insert(tokens, ids, salt) == len(pages) - len(path)
    for end in range(len(path), len(pages)):
        table.held[salt, pages[: end + 1]] = Held(int(ids[end]), table.now)


def _match(table, salt, pages, tokens):
    """And share what is found, as whoever begins with it does."""
    table.expire()
    path = table.path(salt, pages)
    table.use(path)
    found = table.tree.match(tokens, salt)
    assert found.tolist() == [table.held[key].page for key in path]
    table.book.share(found)
    table.taken.append(found)


def _common(table, salt, tokens):
    """How far a text that then goes on otherwise agrees with any that is held, to the token."""
    asked, best = [*tokens, 7777], 0
    for other, pages in table.held:
        same = [a == b for a, b in zip(asked, text(*pages), strict=False)]
        if other == salt:
            best = max(best, [*same, False].index(False))
    assert table.tree.diverged_at(asked, salt) == best


def _evict(table, count):
    before = table.book.free
    freed = table.tree.evict(count)
    assert freed == min(count, len(table.tree.alone()) + freed)
    assert table.book.free - before == freed
    table.shed(count, freeing=True)


def inserted(tree, book, *pages, salt=""):
    """Pages that the tree alone owns."""
    ids = book.new(len(pages))
    tree.insert(text(*pages), ids, salt)
    book.drop(ids)
    return ids


@pytest.mark.parametrize("order", KV_EVICTION)
def test_a_full_tree_takes_what_is_new_and_keeps_what_is_used(order):
    now = [0.0]
    book = PageTable([Bitmap(100)])
    tree = PrefixTree(book, 12, order=order, clock=lambda: now[0])
    inserted(tree, book, 1, 2, 3, 4)
    for first in range(10, 40, 5):
        now[0] += 10
        assert len(tree.match(text(1, 2, 3))) == 3
        assert len(inserted(tree, book, first, 6, 7, 8)) == 4
        assert len(tree.find(text(first, 6, 7, 8))) == 4
        assert tree.held_pages <= 12
    assert len(tree.find(text(1, 2, 3))) == 3
    assert tree.counters.evicted == 4 * 7 - tree.held_pages
    assert book.free == 100 - tree.held_pages


def test_pages_in_use_go_last_and_stay_with_their_owners():
    book = PageTable([Bitmap(10)])
    tree = PrefixTree(book, 10)
    first = inserted(tree, book, 1, 2)
    own = book.new(3)  # somebody had computed 1 and 2 again before going on with 3
    tree.insert(text(1, 2, 3), own)
    assert tree.find(text(1, 2, 3)).tolist() == [*first, own[2]]
    other = inserted(tree, book, 5)
    assert tree.evict(1) == 1
    assert tree.find(text(5)).tolist() == []
    assert other[0] not in tree.alone()
    assert tree.evict(9) == 2, "3 is in use, but what it continues is not"
    assert tree.held_pages == 0
    assert book.free == 7
    assert not len(tree.match(text(1)))
    assert len(book.drop(own)) == 3


def test_a_text_larger_than_the_tree_is_held_in_part():
    book = PageTable([Bitmap(10)])
    tree = PrefixTree(book, 3)
    inserted(tree, book, 1, 2, 3, 4, 5)
    assert len(tree.find(text(1, 2, 3, 4, 5))) == 3
    assert book.free == 7


def test_counters_tell_what_was_asked_and_found():
    book = PageTable([Bitmap(10)])
    tree = PrefixTree(book, 10)
    inserted(tree, book, 1, 2, 3)
    tree.match(text(1, 2, 4))
    tree.match(text(4))
    tree.match(text(1, 2, 3), salt="other")
    tree.find(text(1))
    found = tree.counters
    assert (found.lookups, found.hits, found.hit_tokens) == (3, 1, 2 * PAGE_TOKENS)
    assert (found.inserted, found.evicted) == (3, 0)

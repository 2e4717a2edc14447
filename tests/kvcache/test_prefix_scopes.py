"""Owners of a prefix cache: none sees pages of another, and none evicts another's share."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.plan import Tier
from hmt.kvcache.eviction import KV_EVICTION
from hmt.kvcache.page_table import PageTable
from hmt.kvcache.prefix import PrefixStore, PrefixTree, store_buffer_bytes
from hmt.kvcache.prefix.fairness import allowance
from hmt.kvcache.prefix.segments import segment_bytes
from hmt.memory import Bitmap, HostPool, Ledger

OWNERS = ("", "a", "b", "c")
PAGE_BYTES = 512


def text(*pages: int) -> list[int]:
    return [PAGE_TOKENS * page + at for page in pages for at in range(PAGE_TOKENS)]


def fair_shares(demands: list[int], capacity: int) -> list[float]:
    """Max-min fairness by filling all shares little by little, which needs no formula."""
    shares = [0.0] * len(demands)
    left = float(capacity)
    while left > 1e-9 and any(s < d for s, d in zip(shares, demands, strict=True)):
        open_ = [i for i, d in enumerate(demands) if shares[i] < d]
        drop = min(left / len(open_), min(demands[i] - shares[i] for i in open_))
        for i in open_:
            shares[i] += drop
        left -= drop * len(open_)
    return shares


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(0, 100))
def test_an_allowance_is_the_fair_share(demands: list[int], capacity: int) -> None:
    held = {str(number): demand for number, demand in enumerate(demands)}
    most = allowance(held, "0", demands[0], capacity)
    assert most == int(fair_shares(demands, capacity)[0] + 1e-6)


class Pages:
    """Pages whose content is known: who wrote them, and the beginning that they end."""

    def __init__(self, count: int, most: int, order: str = "lru") -> None:
        self.now = 0.0
        self.book = PageTable([Bitmap(count)])
        self.tree = PrefixTree(self.book, most, order=order, clock=self.tick)
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.running: list[np.ndarray] = []

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def found(self, owner: str, pages: list[int]) -> np.ndarray:
        ids = self.tree.match(text(*pages), salt=owner)
        for at, page in enumerate(ids):
            assert self.content[int(page)] == (owner, tuple(pages[: at + 1]))
        return ids

    def run(self, owner: str, pages: list[int]) -> bool:
        """A sequence as the cache has it: shared pages first, prefixes go where room is short."""
        ids = self.found(owner, pages)
        self.book.share(ids)
        short = len(pages) - len(ids) - self.book.free
        if short > 0 and self.tree.evict(short) < short:
            self.book.drop(ids)
            return False
        new = self.book.new(len(pages) - len(ids))
        for page, end in zip(new, range(len(ids) + 1, len(pages) + 1), strict=True):
            self.content[int(page)] = (owner, tuple(pages[:end]))
        every = np.concatenate([ids, new])
        self.tree.insert(text(*pages), every, owner, owner)
        self.running.append(every)
        return True

    def end(self, number: int) -> None:
        self.book.drop(self.running.pop(number))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_owner_ever_sees_pages_of_another(data: st.DataObject) -> None:
    """Whatever runs, ends and is evicted, in the order that hypothesis thinks of."""
    pages = Pages(
        24, data.draw(st.integers(2, 30)), data.draw(st.sampled_from(sorted(KV_EVICTION)))
    )
    asked = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    for _ in range(data.draw(st.integers(1, 40))):
        owner = data.draw(st.sampled_from(OWNERS))
        act = data.draw(st.sampled_from(["run", "run", "look", "end", "evict"]))
        if act == "run":
            pages.run(owner, data.draw(asked))
        elif act == "look":
            pages.found(owner, data.draw(asked))
        elif act == "end" and pages.running:
            pages.end(data.draw(st.integers(0, len(pages.running) - 1)))
        elif act == "evict":
            pages.tree.evict(data.draw(st.integers(1, 8)))
        counted = sum(pages.tree._holding[name] for name in OWNERS)
        assert counted == pages.tree.held_pages <= pages.tree.pages


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_within_an_owners_share_survives_the_others(data: st.DataObject) -> None:
    most = data.draw(st.integers(8, 40))
    by_room = data.draw(st.booleans())
    pages = Pages(most if by_room else 200, most)
    quiet = data.draw(st.integers(1, most // 3))
    longest = most // 3
    assert pages.run("quiet", list(range(quiet)))
    pages.end(0)
    noisy = data.draw(st.lists(st.sampled_from(["a", "b"]), min_size=10, max_size=40))
    for number, owner in enumerate(noisy):
        length = data.draw(st.integers(1, longest))
        assert pages.run(owner, [100 * number + at for at in range(3, 3 + length)])
        pages.end(0)
    # Two others and what one of them runs meanwhile: of the rest a third at least is everyone's.
    least = min(quiet, (most - longest) // 3) if by_room else min(quiet, most // 3)
    assert len(pages.found("quiet", list(range(quiet)))) >= least


def test_the_owner_with_most_pages_loses_its_own_least_recently_used() -> None:
    pages = Pages(40, 12)
    for owner, first in (("a", 0), ("b", 10), ("a", 20), ("b", 30)):
        pages.run(owner, [first, first + 1, first + 2])
        pages.end(0)
    pages.run("a", [40, 41])
    pages.end(0)
    assert len(pages.found("a", [0, 1, 2])) == 1
    assert len(pages.found("b", [10, 11, 12])) == 3, "less recently used, and another's"
    assert pages.tree._holding["a"] == pages.tree._holding["b"] == 6


@pytest.fixture(scope="module")
def pool():
    nbytes = 3 * store_buffer_bytes(PAGE_BYTES)
    made = HostPool(Ledger({Tier.HOST: nbytes}).open(Tier.HOST, "prefixes", nbytes))
    yield made
    made.close()


class Drive:
    """A store whose pages say whose they are."""

    def __init__(self, folder: Path, pool: HostPool, model: str = "m", **options: int) -> None:
        options = {"capacity_bytes": 1 << 20, "segment_bytes": 4 * PAGE_BYTES} | options
        self.store = PrefixStore(folder, model, PAGE_BYTES, pool, **options)

    def save(self, owner: str, *pages: int) -> int:
        def export(first: int, memory: torch.Tensor) -> None:
            for at, row in enumerate(memory, first):
                row[:] = torch.tensor((OWNERS.index(owner), pages[at])).repeat(PAGE_BYTES // 2)

        keys, written = self.store.keys(text(*pages), owner), 0
        while count := self.store.save(keys, export, owner):
            written += count
        return written

    def load(self, owner: str, *pages: int) -> int:
        rows: list[list[int]] = []
        keys = self.store.keys(text(*pages), owner)
        self.store.held(keys)  # learns of files that others wrote
        self.store.load(keys, 0, lambda memory: rows.extend(memory[:, :2].tolist()))
        assert rows == [[OWNERS.index(owner), page] for page in pages[: len(rows)]]
        return len(rows)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_owner_reads_files_of_another(tmp_path_factory, pool, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("owners")
    drive = Drive(folder, pool, capacity_bytes=data.draw(st.integers(6000, 30_000)))
    try:
        for _ in range(data.draw(st.integers(1, 15))):
            owner = data.draw(st.sampled_from(OWNERS))
            pages = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=7))
            act = data.draw(st.sampled_from(["save", "load", "restart"]))
            if act == "save":
                drive.save(owner, *pages)
            elif act == "load":
                drive.load(owner, *pages)
            else:
                drive.store.close()
                drive = Drive(folder, pool)
    finally:
        drive.store.close()


def test_files_within_an_owners_share_survive_a_flood_of_another_process(tmp_path, pool) -> None:
    most = 12 * segment_bytes(4, PAGE_BYTES)
    mine, other = (Drive(tmp_path, pool, model, capacity_bytes=most) for model in ("m", "other"))
    assert mine.save("a", *range(20)) == 20  # five files
    assert mine.save("", *range(50, 54)) == 4  # from before there were keys
    for number in range(100, 160, 5):
        other.save("b", number, 1, 2, 3)
    assert mine.load("a", *range(20)) == 20
    assert mine.load("", *range(50, 54)) == 4
    assert other.save("b", *range(200, 300)) == 24, "its share, which is six files, and no more"
    assert mine.load("a", *range(20)) == 20
    # Of eleven files two owners have five and a half each: who has six may lose one.
    assert mine.save("a", *range(300, 400)) in (20, 24)
    assert other.load("b", *range(200, 300)) in (20, 24)
    assert mine.load("", *range(50, 54)) == 4
    for drive in (mine, other):
        drive.store.close()


def test_names_of_files_do_not_tell_their_owner(tmp_path, pool) -> None:
    key, other = "sk-0123456789abcdef", "sk-fedcba9876543210"

    def export(first: int, memory: torch.Tensor) -> None:
        memory.fill_(7)

    store = Drive(tmp_path, pool).store
    for owner in (key, other, ""):
        assert store.save(store.keys(text(1, 2), owner), export, owner) == 2
    store.close()
    names = [file.name for file in tmp_path.glob("*.hmtkv")]
    assert len(names) == 3
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert not any(one.encode() in content or one in "".join(names) for one in (key, other))
    store = Drive(tmp_path, pool).store
    found = [store.held(store.keys(text(1, 2), owner)) for owner in (key, other, "", "sk-")]
    store.close()
    assert found == [2, 2, 2, 0]

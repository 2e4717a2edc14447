"""A radix tree over pages: which prefixes of sequences have their KV pages cached."""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from hmt.base.errors import ConfigError
from hmt.contracts.model import PAGE_TOKENS
from hmt.kvcache.allocator import KVAllocator
from hmt.kvcache.eviction import KV_EVICTION
from hmt.kvcache.page_table import Ints, PageTable
from hmt.kvcache.prefix.fairness import allowance
from hmt.kvcache.state_checkpoints import StateCheckpoints

Tokens = Sequence[int] | Ints

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class PrefixCounters:
    """What a tree was asked for, and what it gave up.

    lookups      sequences that were looked for
    hits         of these, ones whose first page at least was held
    hit_tokens   positions that were held of them
    inserted     pages that came
    evicted      pages that went: for room, for age, or because the tree was full
    """

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0
    inserted: int = 0
    evicted: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """Pages in a row that no text leaves or enters in between.

    rows    int64 [pages, 16]: their tokens
    after   runs that continue it, by the tokens of their first pages
    """

    key: bytes
    rows: Ints
    ids: Ints
    parent: "_Run | None"
    after: dict[bytes, "_Run"] = field(default_factory=dict)


class PrefixTree:
    """Maps the longest beginning of a text that is held to pages, and owns one share of each.

    Only whole pages are held.  A sequence is int64 numbers, and a salt: those of different salts
    have nothing in common.  It says what else the KV depends on (how it is encoded, an adapter),
    and which requests may share it.  Positions without a token, such as those of images, stand as
    numbers made from a hash of their content.

    Each page counts for the owner who inserted it.  The owner that holds most loses pages first, so
    that no owner evicts what is within the share of another (`fairness`).  Of an owner pages go by
    the policy's order, and none before all that continue it.  A page that a sequence uses, too,
    stays with it: the tree only forgets it.  Only for the engine's thread.
    """

    def __init__(
        self,
        page_table: PageTable,
        pages: int,
        *,
        order: str = "lru",
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Holds at most `pages` of `page_table`, none longer than `max_age_s` after its last use.

        order   a name in `hmt.kvcache.eviction.ORDERS`; each use counts as full attention
        """
        self.pages = pages
        self.counters = PrefixCounters()
        self._page_table = page_table
        self._policy = KV_EVICTION[order](page_table.count)
        self._max_age_s = max_age_s
        self._clock = clock
        self._held = np.zeros(page_table.count, dtype=np.bool_)
        self._owner = np.full(page_table.count, "", dtype=np.object_)
        self._holding: Counter[str] = Counter()  # pages by owner
        self._used_s = np.zeros(page_table.count)
        self.on_drop: Callable[[Ints], None] = lambda ids: None  # told of pages that it lets go of
        self._root = _Run(b"", _NONE.reshape(0, PAGE_TOKENS), _NONE, None)

    @property
    def held_pages(self) -> int:
        """Pages that it owns a share of."""
        return int(self._held.sum())

    def alone(self) -> Ints:
        """Pages that nobody else owns."""
        held = np.flatnonzero(self._held)
        return held[self._page_table.alone(held)]

    def find(self, tokens: Tokens, salt: str = "") -> Ints:
        """Pages of the longest beginning of `tokens` that is held, by position.

        Counts for nothing; they may go when anything else is asked.
        """
        found = [run.ids[:matched] for run, matched in self._path(_rows(tokens), salt)]
        return np.concatenate([_NONE, *found])

    def diverged_at(self, tokens: Tokens, salt: str = "") -> int:
        """The first of `tokens` that differs from every sequence in the tree; len(tokens): none.

        Behind the pages that `find` gives, by less than a page.  Not a use of these pages.
        """
        path = self._path(_rows(tokens), salt)
        held = PAGE_TOKENS * sum(matched for _, matched in path)
        run, matched = path[-1] if path else (self._root.after.get(salt.encode()), 0)
        rest = np.asarray(tokens[held : held + PAGE_TOKENS], dtype=np.int64)
        if run is None:
            return 0
        rows = run.rows[matched : matched + 1]
        if not len(rows):
            rows = np.concatenate([rows, *[child.rows[:1] for child in run.after.values()]])
        same = np.logical_and.accumulate(rows[:, : len(rest)] == rest, axis=1).sum(axis=1)
        return held + int(same.max(initial=0))

    def match(self, tokens: Tokens, salt: str = "") -> Ints:
        """Like `find`, and a use of these pages.  Whoever wants to keep them shares them next."""
        self.expire()
        ids = self.find(tokens, salt)
        self.used(ids)
        return ids

    def used(self, ids: Ints) -> None:
        """A sequence was looked for, and `ids` are what `find` found and a request uses now."""
        self.counters.lookups += 1
        self.counters.hits += len(ids) > 0
        self.counters.hit_tokens += PAGE_TOKENS * len(ids)
        self._use(ids)

    def insert(self, tokens: Tokens, ids: Ints, salt: str = "", owner: str = "") -> int:
        """Hold the whole pages of `tokens`, which lie in `ids`; how many are new.

        Where a beginning is held already, its pages stay and those of `ids` are not taken.  Others
        go if there are too many; of a sequence that is larger than the share of `owner` its
        beginning is held.
        """
        self.expire()
        rows = _rows(tokens)[: self.pages]
        assert len(rows) <= len(ids), "tokens of pages that are not there"
        path = self._path(rows, salt)
        matched_ids = np.concatenate([_NONE, *[run.ids[:matched] for run, matched in path]])
        held = len(matched_ids)
        self._use(matched_ids)
        rows = rows[: held + self._room_for(owner, len(rows) - held, matched_ids)]
        # Before it comes: a new page, which nobody has used again yet, would often go first.
        while (over := self.held_pages + len(rows) - held - self.pages) > 0:
            self._shed(over, freeing=False, incoming={owner: len(rows) - held})
            path = self._path(rows, salt)  # some policies let go of what was used just now
            held = sum(matched for _, matched in path)
        new = ids[held : len(rows)].copy()
        if not len(new):
            return 0
        if path:
            parent = self._split(*path[-1])
        else:
            parent = self._child(self._root, salt.encode(), rows[:0], _NONE)
        assert not self._held[new].any(), "a page holds one beginning"
        self._child(parent, rows[held].tobytes(), rows[held:].copy(), new)
        self._page_table.share(new)
        self._held[new] = True
        self._owner[new] = owner
        self._holding[owner] += len(new)
        now = self._clock()
        self._used_s[new] = now
        self._policy.added(new, now)
        self.counters.inserted += len(new)
        return len(new)

    def evict(self, pages: int) -> int:
        """Let go of pages until so many that nobody else owns are free; how many are.

        Fewer only if there were fewer.  Pages in use are forgotten only where they continue others
        that have to go.
        """
        return self._shed(pages, freeing=True)

    def expire(self) -> None:
        """Forget what has not been used for `max_age_s`."""
        if self._max_age_s is None:
            return
        old = self._held & (self._used_s < self._clock() - self._max_age_s)
        if not old.any():
            return
        gone = []  # what continues a page was not used later than it
        for run in list(self._runs()):
            if len(run.ids) and old[run.ids[-1]]:
                first = int(old[run.ids].argmax())
                gone.append(run.ids[first:])
                self._cut(run, first)
        self._drop(np.concatenate(gone))

    def clear(self) -> None:
        """Let go of everything."""
        self._drop(np.flatnonzero(self._held))
        self._root.after.clear()

    def _path(self, rows: Ints, salt: str) -> list[tuple[_Run, int]]:
        """Runs that `rows` go along, and how many pages of each are theirs."""
        run, at, path = self._root.after.get(salt.encode()), 0, []
        while run is not None and at < len(rows):
            run = run.after.get(rows[at].tobytes())
            if run is None:
                break
            there = rows[at : at + len(run.rows)]
            same = (run.rows[: len(there)] == there).all(axis=1)
            matched = len(same) if same.all() else int(same.argmin())
            path.append((run, matched))
            at += matched
            if matched < len(run.rows):
                break
        return path

    def _child(self, parent: _Run, key: bytes, rows: Ints, ids: Ints) -> _Run:
        if key not in parent.after:
            parent.after[key] = _Run(key, rows, ids, parent)
        return parent.after[key]

    def _split(self, run: _Run, at: int) -> _Run:
        """The run of its first `at` pages, at least one; the rest continues it."""
        if at < len(run.ids):
            rest = _Run(run.rows[at].tobytes(), run.rows[at:], run.ids[at:], run, run.after)
            for child in rest.after.values():
                child.parent = rest
            run.rows, run.ids, run.after = run.rows[:at], run.ids[:at], {rest.key: rest}
        return run

    def _use(self, ids: Ints) -> None:
        now = self._clock()
        self._used_s[ids] = now
        self._policy.weighed(ids, np.ones(len(ids)), now)

    def _room_for(self, owner: str, pages: int, path: Ints) -> int:
        """How many of `pages` new ones behind the pages `path` fit the share of `owner`."""
        most = allowance(self._holding, owner, self._holding[owner] + pages, self.pages)
        own = int((self._owner[path] == owner).sum())
        return min(pages, max(0, most - own))

    def _shed(
        self, wanted: int, *, freeing: bool, incoming: Mapping[str, int] | None = None
    ) -> int:
        """Let go of pages until so many have gone, or are free; how many are free.

        incoming   pages that are about to come, by owner
        """
        ids = np.flatnonzero(self._held)
        alone = np.zeros(len(self._held), dtype=np.bool_)
        alone[ids] = self._page_table.alone(ids)
        worth = np.zeros(len(self._held))
        worth[ids] = self._policy.worth(ids, self._clock(), len(ids) / max(1, self.pages))
        left = min(wanted, int(alone.sum())) if freeing else wanted
        holding = self._holding + Counter(incoming)

        def rank(run: _Run, end: int) -> tuple[bool, float]:
            last = run.ids[end - 1]
            return freeing and not alone[last], float(worth[last])

        order = count()
        ends: dict[str, list[tuple[tuple[bool, float], int, _Run]]] = {}
        for run in self._runs():
            if not run.after:
                entry = rank(run, len(run.ids)), next(order), run
                ends.setdefault(self._owner[run.ids[-1]], []).append(entry)
        for heap in ends.values():
            heapq.heapify(heap)
        gone: list[int] = []
        while left > 0:
            owner = min(ends, key=lambda name: (ends[name][0][0][0], -holding[name]))
            heap = ends[owner]
            (in_use, _), _, run = heapq.heappop(heap)
            most = max((holding[name] for name in ends if name != owner), default=0)
            end = len(run.ids)
            while True:
                end -= 1
                gone.append(int(run.ids[end]))
                holding[owner] -= 1
                left -= int(alone[run.ids[end]]) if freeing else 1
                if not end or left <= 0 or self._owner[run.ids[end - 1]] != owner:
                    break
                now = rank(run, end)
                if holding[owner] < most or now[0] != in_use or (heap and now > heap[0][0]):
                    break
            self._cut(run, end)
            if not heap:
                del ends[owner]
            rest = run if end else run.parent
            if rest is not None and len(rest.ids) and not rest.after:
                entry = rank(rest, len(rest.ids)), next(order), rest
                heapq.heappush(ends.setdefault(self._owner[rest.ids[-1]], []), entry)
        return len(self._drop(np.array(gone, dtype=np.int64)))

    def _cut(self, run: _Run, pages: int) -> None:
        """Keep the first pages of a run; what continued it has gone, or goes as well."""
        run.rows, run.ids = run.rows[:pages], run.ids[:pages]
        while run.parent is not None and not len(run.ids) and not run.after:
            run.parent.after.pop(run.key, None)
            run = run.parent

    def _drop(self, ids: Ints) -> Ints:
        self._held[ids] = False
        self.on_drop(ids)
        self._holding -= Counter(self._owner[ids].tolist())  # without those that hold none
        self.counters.evicted += len(ids)
        return self._page_table.drop(ids)

    def _runs(self) -> Iterator[_Run]:
        """All but the root, and those that are salts only; what continues a run comes before it."""
        stack = [(run, False) for run in self._root.after.values()]
        while stack:
            run, below = stack.pop()
            if below:
                if len(run.ids):
                    yield run
            else:
                stack.append((run, True))
                stack += [(child, False) for child in run.after.values()]


def keep_prefixes(
    allocator: KVAllocator,
    pages: int | None = None,
    *,
    order: str = "lru",
    max_age_s: float | None = None,
    checkpoints: StateCheckpoints | None = None,
) -> PrefixTree:
    """Begin to keep prefixes: at most `pages`, or as many as there is room for.

    Prefixes that lie in fewer bits are used as they are, like those of a running sequence.

    checkpoints   of recurrent state, without which a prefix of layers that have one is of no use

    Raises ConfigError where a layer forgets positions, which a prefix would need.
    """
    if not allocator.keeps_all_positions and (checkpoints is None or allocator.has_rings):
        raise ConfigError(
            "this model has layers with a sliding window, whose KV pages are not kept "
            "beyond it, or with recurrent state of which no checkpoints are kept, so prompts "
            "cannot share them: leave the prefix cache off"
        )
    table = allocator.page_table
    most = table.count if pages is None else pages
    tree = PrefixTree(table, most, order=order, max_age_s=max_age_s, clock=allocator.pool.clock)
    if checkpoints is not None:
        tree.on_drop = checkpoints.forget_pages
    allocator.share_with(tree)
    return tree


def _rows(tokens: Tokens) -> Ints:
    """Tokens of whole pages: int64 [pages, 16]."""
    whole = len(tokens) // PAGE_TOKENS * PAGE_TOKENS
    return np.asarray(tokens[:whole], dtype=np.int64).reshape(-1, PAGE_TOKENS)

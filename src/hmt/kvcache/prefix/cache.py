"""The prefix cache: what a prompt shares with earlier ones, in memory or on the disk."""

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from hmt.contracts.model import PAGE_TOKENS
from hmt.kvcache.offload.tiered_cache import TieredKV
from hmt.kvcache.page_table import Ints
from hmt.kvcache.paged_cache import PagedKV
from hmt.kvcache.prefix.extents import PageExtents
from hmt.kvcache.prefix.store import PrefixStore
from hmt.kvcache.prefix.tree import PrefixTree, Tokens

_MOST_UNSAVED = 256  # texts, of which those that ended first are not saved


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence in the cache, of whose positions the first `held` have keys and values."""

    sequence: int
    held: int


@dataclass(slots=True)
class PrefixCache:
    """Opens and closes sequences of a cache so that what one has computed others need not.

    A prompt sees nothing of sequences with another salt, neither their pages nor that any exist.
    An owner evicts no pages of others that are within their share; see PrefixTree.  Without a store
    prefixes live as long as the cache.  Only for the engine's thread.
    """

    kv: PagedKV | TieredKV
    tree: PrefixTree
    store: PrefixStore | None = None
    extents: PageExtents | None = None
    _unsaved: dict[str, deque[tuple[Ints, str]]] = field(default_factory=dict)  # by owner

    def shared(self, prompt: Tokens, salt: str = "") -> int:
        """Positions that memory has of a text that begins with `prompt`.  Counts for nothing."""
        return PAGE_TOKENS * len(self.tree.find(prompt[: max(0, len(prompt) - 1)], salt))

    def open(
        self, positions: int, prompt: Tokens, salt: str = "", *, spare: int = 0
    ) -> Opened | None:
        """Reserve `positions` for a text that begins with `prompt`; None while there is no room.

        At least the last token of the prompt is not held, so that there are logits to compute.
        Whatever memory has is shared, whatever else the disk has is read.

        spare   positions that have to stay free besides
        """
        known = prompt[: max(0, len(prompt) - 1)]
        self.tree.expire()
        ids, allocator = self.tree.find(known, salt), self.kv.allocator
        if not allocator.can_open_with(positions + spare, ids):
            # A prefix may hold more room than it fills, where groups on the disk are mixed.
            ids = ids[:0]
            if not allocator.can_open(positions + spare):
                return None
        self.tree.used(ids)
        sequence = allocator.open_with(positions, ids)
        held = len(ids)
        try:
            held += self._load(sequence, known, salt, held)
        except BaseException:
            allocator.close(sequence)
            raise
        return Opened(sequence, held * PAGE_TOKENS)

    def leave(self, sequence: int, tokens: Tokens, salt: str = "", owner: str = "") -> None:
        """Close a sequence that will go on later, and keep its pages in memory; see `close`."""
        allocator = self.kv.allocator
        self.tree.insert(tokens, allocator.pages(sequence), salt, owner)
        allocator.close(sequence)

    def close(self, sequence: int, tokens: Tokens, salt: str = "", owner: str = "") -> None:
        """Close a sequence, and keep its pages for others.

        tokens   all whose KV was appended for every layer, from the first on
        owner    the one that they count for
        """
        self.leave(sequence, tokens, salt, owner)
        if self.store is None or len(tokens) < PAGE_TOKENS:
            return
        ended = self._unsaved.setdefault(owner, deque())
        ended.append((np.asarray(tokens, dtype=np.int64), salt))
        if sum(map(len, self._unsaved.values())) > _MOST_UNSAVED:
            most = max(self._unsaved, key=lambda name: len(self._unsaved[name]))
            self._unsaved[most].popleft()
            if not self._unsaved[most]:  # there are 256 other owners
                del self._unsaved[most]

    def tend(self) -> bool:
        """Save one more file's worth of what ended, of each owner in turn; whether more is left.

        For when there is nothing else to do.  Raises DiskReadError where pages of the cache that
        lie on the disk cannot be read.
        """
        if not self._unsaved or self.store is None or self.extents is None:
            return False
        owner = next(iter(self._unsaved))
        ended = self._unsaved.pop(owner)
        try:
            if not self._save(*ended[-1], owner):
                ended.pop()
        finally:
            if ended:
                self._unsaved[owner] = ended
        return bool(self._unsaved)

    def finish(self) -> None:
        """Save what was not saved yet, and close the store.  The cache itself stays open."""
        while self.tend():
            pass
        if self.store is not None:
            self.store.close()
            self.store = None

    def counters(self) -> dict[str, Any]:
        """What the tree and the store counted, by name."""
        counted = asdict(self.tree.counters)
        if self.store is not None:
            counted |= {f"drive_{n}": count for n, count in asdict(self.store.counters).items()}
        return counted

    def _save(self, tokens: Ints, salt: str, owner: str) -> int:
        """Save a file's worth of a sequence; how many pages, 0 where nothing is left to save."""
        assert self.store is not None and self.extents is not None
        ids, extents = self.tree.find(tokens, salt), self.extents

        def export(first: int, memory: torch.Tensor) -> None:
            self.kv.copy_out(ids[first : first + len(memory)], extents.kinds(memory))

        keys = self.store.keys(tokens[: PAGE_TOKENS * len(ids)], salt)
        return self.store.save(keys, export, owner)

    def _load(self, sequence: int, known: Tokens, salt: str, held: int) -> int:
        """Append what the disk has behind the first `held` pages; how many pages that is."""
        if self.store is None or self.extents is None:
            return 0
        extents, loaded = self.extents, 0

        def put(rows: torch.Tensor) -> None:
            nonlocal loaded
            at = 0
            for ids in self.kv.allocator.make_pages(sequence, held + loaded, len(rows)):
                self.kv.copy_in(ids, extents.kinds(rows[at : at + len(ids)]))
                at += len(ids)
            loaded += len(rows)

        keys = self.store.keys(known, salt)
        if self.store.held(keys) > held:
            self.store.load(keys, held, put)
        return loaded

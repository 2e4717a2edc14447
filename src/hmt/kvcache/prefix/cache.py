"""The prefix cache: what a prompt shares with earlier ones, in memory or on the disk."""

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from hmt.contracts.model import PAGE_TOKENS
from hmt.kvcache.allocator import KVAllocator
from hmt.kvcache.page_store import PagesByKind
from hmt.kvcache.page_table import Ints
from hmt.kvcache.prefix.extents import PageExtents
from hmt.kvcache.prefix.radix_tree import PrefixTree, Tokens
from hmt.kvcache.prefix.saved_states import SavedStates
from hmt.kvcache.prefix.store import PrefixStore
from hmt.kvcache.recurrent_state import StateStore
from hmt.kvcache.state_checkpoints import StateCheckpoints

_MOST_UNSAVED = 256  # sequences, of which those that ended first are not saved


class CachedPages(Protocol):
    """The KV cache whose pages are shared: of one memory, of several tiers or devices."""

    allocator: KVAllocator

    @property
    def states(self) -> StateStore | None:
        """Recurrent state of its layers; None where they have none."""
        ...

    def copy_out(self, ids: Ints, kinds: PagesByKind) -> None:
        """Fill pages 0 and on of `kinds`, in host memory, with pages `ids` (int64)."""
        ...

    def copy_in(self, ids: Ints, kinds: PagesByKind) -> None:
        """Let pages `ids` (int64) hold pages 0 and on of `kinds`, which are in host memory."""
        ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence in the cache, of whose positions the first `held` have KV.

    diverged_at   token of the prompt at which it differs from every sequence in the cache; behind
                  what is held where a page differs, or the state behind it is not kept
    """

    sequence: int
    held: int
    diverged_at: int = 0


@dataclass(slots=True)
class PrefixCache:
    """Opens and closes sequences of a cache so that what one has computed others need not.

    A prompt sees nothing of sequences with another salt, neither their pages nor that any exist.
    An owner evicts no pages of others that are within their share; see PrefixTree.  Without a store
    prefixes live as long as the cache.  Only for the engine's thread.

    saved_states   checkpoints of recurrent state on the disk, where `store` keeps pages
    """

    kv: CachedPages
    tree: PrefixTree
    store: PrefixStore | None = None
    extents: PageExtents | None = None
    saved_states: SavedStates | None = None
    _unsaved: dict[str, deque[tuple[Ints, str]]] = field(default_factory=dict)  # by owner

    def shared(self, prompt: Tokens, salt: str = "") -> int:
        """Positions that memory has of a text that begins with `prompt`.  Counts for nothing."""
        return PAGE_TOKENS * len(self._find(prompt[: max(0, len(prompt) - 1)], salt))

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
        ids, allocator = self._find(known, salt), self.kv.allocator
        if not allocator.can_open_with(positions + spare, ids):
            # A prefix may hold more room than it fills, where groups on the disk are mixed.
            ids = ids[:0]
            if not allocator.can_open(positions + spare):
                return None
        diverged_at, keys = self.tree.diverged_at(prompt, salt), list[bytes]()
        if self.store is not None:
            keys = self.store.keys(known, salt)
            keys = keys[: self.store.held(keys)]
            diverged_at = max(diverged_at, PAGE_TOKENS * len(keys))
        self.tree.used(ids)
        states, held = self.kv.states, len(ids)
        state = None
        if self._checkpoints is not None and held:  # before pages may go for those to come
            state = self._checkpoints.slot_behind(int(ids[-1]))
        sequence = allocator.open_with(positions, ids)
        if states is not None and state is not None:
            states.restore(sequence, state, held * PAGE_TOKENS)
        try:
            loaded = self._load(sequence, keys, held)
            if loaded and self.saved_states is not None:
                loaded = self._load_state(sequence, keys, held + loaded, (held, state))
            held += loaded
        except BaseException:
            allocator.close(sequence)
            raise
        return Opened(sequence, held * PAGE_TOKENS, diverged_at)

    def leave(self, sequence: int, tokens: Tokens, salt: str = "", owner: str = "") -> None:
        """Close a sequence that will go on later, and keep its pages in memory; see `close`."""
        allocator = self.kv.allocator
        self.tree.insert(tokens, allocator.pages(sequence), salt, owner)
        if self.kv.states is not None:
            # A step that failed has left a state behind `tokens`, whose page is not among these.
            self.kv.states.keep(sequence, self.tree.find(tokens, salt))
        allocator.close(sequence)

    def set_aside(self, sequence: int, tokens: Tokens, salt: str = "", owner: str = "") -> None:
        """Close a sequence that gives way to others and will go on later; see `close`.

        Its pages are written to the disk now, and its last checkpoint, since others need the room.
        """
        self.leave(sequence, tokens, salt, owner)
        if self.store is not None and self.extents is not None:
            while self._save(np.asarray(tokens, dtype=np.int64), salt, owner, last=True):
                pass

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
            self.store = self.saved_states = None

    def counters(self) -> dict[str, Any]:
        """What the tree and the store counted, by name."""
        counted = asdict(self.tree.counters)
        if self.store is not None:
            counted |= {f"drive_{n}": count for n, count in asdict(self.store.counters).items()}
        return counted

    @property
    def _checkpoints(self) -> StateCheckpoints | None:
        states = self.kv.states
        return None if states is None else states.checkpoints

    def _find(self, known: Tokens, salt: str) -> Ints:
        """Pages of the longest beginning from which a sequence can go on, by position."""
        ids, checkpoints = self.tree.find(known, salt), self._checkpoints
        return ids if checkpoints is None else ids[: checkpoints.longest(ids)]

    def _save(self, tokens: Ints, salt: str, owner: str, *, last: bool = False) -> int:
        """Save a file's worth of a sequence; how many pages, 0 where nothing is left to save.

        last   of its checkpoints only the last one
        """
        assert self.store is not None and self.extents is not None
        ids, extents = self.tree.find(tokens, salt), self.extents

        def export(first: int, memory: torch.Tensor) -> None:
            self.kv.copy_out(ids[first : first + len(memory)], extents.kinds(memory))

        keys = self.store.keys(tokens[: PAGE_TOKENS * len(ids)], salt)
        saved = self.store.save(keys, export, owner)
        if saved or self.saved_states is None or self._checkpoints is None:
            return saved
        behind = self._checkpoints.kept_behind(ids)
        for number, slot in behind[-1:] if last else behind:
            if saved := self.saved_states.save(keys[number], slot, owner):
                return saved
        return 0

    def _load(self, sequence: int, keys: list[bytes], held: int) -> int:
        """Append what of `keys` is behind the first `held` pages; how many pages that is.

        keys   of the sequence's first pages, all on the disk
        """
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

        if self.saved_states is not None:
            keys = keys[: self.saved_states.longest(keys, held)]
        if len(keys) > held:
            self.store.load(keys, held, put)
        return loaded if self.saved_states is None or held + loaded == len(keys) else 0

    def _load_state(
        self, sequence: int, keys: list[bytes], pages: int, before: tuple[int, int | None]
    ) -> int:
        """Read the state behind a sequence's first `pages`; how many came, 0 if it is not whole.

        before   pages that it had, and the slot with the state behind these; None: it has none
        """
        assert self.store is not None and self.saved_states is not None
        states, (held, slot) = self.kv.states, before
        assert states is not None
        if self.saved_states.load(keys[pages - 1], states.slot_of(sequence)):
            states.was_read(sequence, pages * PAGE_TOKENS)
            return pages - held
        if slot is not None:
            states.restore(sequence, slot, held * PAGE_TOKENS)
        return 0

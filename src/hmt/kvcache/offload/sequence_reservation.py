"""Sequences of a tiered cache: which pages they have, and what they may still take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from hmt.base.errors import BudgetError
from hmt.contracts.kv import KVAccount, PinnedPages, min_device_pages
from hmt.contracts.model import PAGE_TOKENS
from hmt.kvcache.offload.page_migration import PageMigration, pages_of
from hmt.kvcache.offload.sliding_window import SlidingWindowPages
from hmt.kvcache.offload.sparse_selection import Selection
from hmt.kvcache.page_table import Ints

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class _Sequence:
    """pages: those that were made, by position; unmade: how many more it may have."""

    pages: Ints
    unmade: int
    tokens: int = 0
    parked: bool = False


class TieredSequences:
    """What TieredKV knows of sequences; it says what they attend to.

    Capacity is reserved over all levels when a sequence is opened, and when it grows: what was
    reserved can always be used.
    """

    @override
    def __init__(
        self,
        places: PageMigration,
        sliding_windows: Sequence[SlidingWindowPages],
        selection: Callable[[PageMigration], Selection] | None,
        stay: PinnedPages,
        chunk: int,
    ) -> None:
        self._places = places
        self._windows = tuple(sliding_windows)
        self._selection = None if selection is None else selection(places)
        self._stay = stay
        self._chunk = chunk
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    @property
    def account(self) -> KVAccount:
        """What has happened since the cache was made."""
        return self._places.account

    def held(self) -> dict[str, int]:
        """Pages that are taken now, by level."""
        return self._places.held()

    @property
    def capacity_tokens(self) -> int:
        """Positions in all."""
        return self._places.page_table.count * PAGE_TOKENS

    @property
    def free_tokens(self) -> int:
        """Positions that no sequence has reserved."""
        return self._free_pages(_NONE) * PAGE_TOKENS

    def can_open(self, tokens: int) -> bool:
        """Whether `open` would succeed now."""
        return self._has_room(_NONE, pages_of(tokens))

    def open(self, tokens: int) -> int:
        """Reserve `tokens` positions for a new sequence; its handle.  Raises BudgetError."""
        return self._open(_NONE, pages_of(tokens))

    def can_fork(self, sequence: int, held: int, tokens: int) -> bool:
        """Whether `fork` would succeed now."""
        whole = held // PAGE_TOKENS
        return self._has_room(self._sequences[sequence].pages[:whole], pages_of(tokens) - whole)

    def fork(self, sequence: int, held: int, tokens: int) -> int:
        """A new sequence with the first `held` positions of another, and room for `tokens` in all.

        Whole pages are shared.  The last one, if it is not full, is copied at once: each of the two
        writes to it next.  Where layers have a window, `held` has to be all that the other holds:
        what they saw before is gone.  Raises BudgetError.
        """
        whole = held // PAGE_TOKENS
        theirs = self._sequences[sequence].pages
        forked = self._open(theirs[:whole].copy(), pages_of(tokens) - whole)
        self._places.page_table.share(theirs[:whole])
        self._sequences[forked].tokens = held
        for rings in self._windows:
            rings.copy(sequence, forked)
        try:
            if held % PAGE_TOKENS:
                self._grow({forked: 1})
                self._places.copy(theirs[whole : whole + 1], self._sequences[forked].pages[-1:])
        except BaseException:
            self.close(forked)
            raise
        return forked

    def can_grow(self, sequence: int, tokens: int) -> bool:
        """Whether `grow` would succeed now."""
        more = self._missing(sequence, tokens)
        if more > 0 and more > self._free_pages(_NONE):
            return False
        return all(rings.can_grow(sequence, pages_of(tokens)) for rings in self._windows)

    def grow(self, sequence: int, tokens: int) -> None:
        """Reserve `tokens` positions in all for a sequence, which keeps what it has.

        Raises BudgetError, changing nothing.
        """
        if not self.can_grow(sequence, tokens):
            raise self._too_little(self._missing(sequence, tokens))
        self._sequences[sequence].unmade += max(0, self._missing(sequence, tokens))
        for rings in self._windows:
            rings.grow(sequence, pages_of(tokens))

    def shrink(self, sequence: int, tokens: int) -> None:
        """Give back what a sequence has reserved beyond its first `tokens` positions.

        It keeps the pages that it has filled, and its rings.
        """
        held = self._sequences[sequence]
        held.unmade = max(0, held.unmade + min(0, self._missing(sequence, tokens)))

    def can_rewind(self) -> bool:
        """Whether `rewind` is possible: a ring has forgotten what was before its window."""
        return not self._windows

    def rewind(self, sequence: int, tokens: int) -> None:
        """Let a sequence hold no more than its first `tokens` positions, which it has filled.

        Reserves nothing behind them; `grow` does.  The last page, if it is not full, is copied to
        where it can be appended to, wherever it lies.  Raises BudgetError or DiskReadError; then
        the sequence can only be closed.
        """
        held, whole = self._sequences[sequence], tokens // PAGE_TOKENS
        partial = held.pages[whole : pages_of(tokens)]
        self._places.page_table.drop(held.pages[pages_of(tokens) :])
        held.pages, held.unmade, held.tokens = held.pages[:whole], 0, tokens
        try:
            if len(partial):
                if self._free_pages(_NONE) < 1:
                    raise self._too_little(1)
                held.unmade = 1
                self._grow({sequence: 1})
                self._places.copy(partial, held.pages[-1:])
        finally:
            self._places.page_table.drop(partial)

    def can_park(self) -> bool:
        """Whether others could have the place near of one that is parked: not that of its rings."""
        return not self._windows and self._has_device_room(len(self._at_work()), 1)

    def park(self, sequence: int) -> None:
        """A sequence will take no part in steps until `resume`: others have its place.

        It keeps its pages, which move away when room is needed, but for one that is not full.
        """
        self._sequences[sequence].parked = True

    def can_resume(self, sequence: int, tokens: int) -> bool:
        """Whether `resume` would succeed now."""
        room = self._has_device_room(len(self._at_work()) + 1, -1)
        return room and self.can_grow(sequence, tokens)

    def resume(self, sequence: int, tokens: int) -> None:
        """Let a parked sequence go on, with `tokens` positions in all.

        Attention goes to where its pages are.  Raises BudgetError, changing nothing.
        """
        if not self.can_resume(sequence, tokens):
            raise self._too_little(self._missing(sequence, tokens))
        self.grow(sequence, tokens)
        self._sequences[sequence].parked = False

    def close(self, sequence: int) -> None:
        """Free a sequence's pages."""
        ended = self._sequences.pop(sequence)
        self._places.page_table.drop(ended.pages)
        self.account.pages += len(ended.pages)
        self.account.tokens += ended.tokens
        for rings in self._windows:
            rings.close(sequence)

    def _grow(self, counts: Mapping[int, int]) -> None:
        """Make pages for sequences, hot: as many as `counts` says, of those that they reserved."""
        counts = {sequence: count for sequence, count in counts.items() if count > 0}
        for (number, count), made in zip(counts.items(), self._make(counts), strict=True):
            sequence = self._sequences[number]
            assert count <= sequence.unmade, "more positions than were reserved"
            sequence.pages = np.concatenate((sequence.pages, made))
            sequence.unmade -= count

    def _make(self, counts: Mapping[int, int]) -> list[Ints]:
        """New hot pages, as many as `counts` says for each."""
        if not counts:
            return []
        made = self._places.new(sum(counts.values()), self._stays())
        if self._selection is not None:
            self._selection.forget(made)
        return np.split(made, np.cumsum([*counts.values()])[:-1])

    def _stays(self) -> list[Ints]:
        """Pages that do not move away: sequences' first and last.

        Of parked ones those that are not full: codecs of far pages want all 16 tokens.
        """
        stays = [_NONE]
        for sequence in self._sequences.values():
            if not sequence.parked:
                stays += [sequence.pages[: self._stay.sinks], sequence.pages[-self._stay.recent :]]
            elif sequence.tokens % PAGE_TOKENS:
                stays.append(sequence.pages[-1:])
        return stays

    def _free_pages(self, held: Ints) -> int:
        """Pages that no sequence has reserved, once somebody holds `held`."""
        self._places.settle()  # pages on their way count twice
        return self._places.free_pages - self._unmade

    @property
    def _unmade(self) -> int:
        """Pages that sequences have reserved and not made."""
        return sum(sequence.unmade for sequence in self._sequences.values())

    def _has_room(self, held: Ints, unmade: int) -> bool:
        """For one more sequence of pages `held`, and so many that are to be made."""
        enough = unmade <= self._free_pages(held) and self._has_device_room(
            len(self._at_work()) + 1
        )
        return enough and all(rings.can_open(len(held) + unmade) for rings in self._windows)

    def _has_device_room(self, at_work: int, more_parked: int = 0) -> bool:
        """For what so many sequences keep near, and those that are parked."""
        parked = len(self._sequences) - len(self._at_work()) + more_parked
        least = min_device_pages(self._chunk, at_work, self._stay)
        return least + parked <= self._places.device.count

    def _at_work(self) -> list[_Sequence]:
        """Sequences that are not parked."""
        return [sequence for sequence in self._sequences.values() if not sequence.parked]

    def _missing(self, sequence: int, tokens: int) -> int:
        """Pages that a sequence would have to reserve for so many positions; below 0: too many."""
        held = self._sequences[sequence]
        return pages_of(tokens) - len(held.pages) - held.unmade

    def _open(self, held: Ints, unmade: int) -> int:
        pages = len(held) + unmade
        if not self._has_room(held, unmade):
            raise self._too_little(unmade)
        self._next += 1
        self._sequences[self._next] = _Sequence(held, unmade)
        for rings in self._windows:
            rings.open(self._next, pages)
        return self._next

    def _too_little(self, pages: int) -> BudgetError:
        near = self._places.device.count * PAGE_TOKENS
        return BudgetError(
            f"{pages * PAGE_TOKENS} positions of KV were asked for and {self.free_tokens} of "
            f"{self.capacity_tokens} are free, {near} of all near, with "
            f"{len(self._at_work())} sequences open; ask for a shorter context, or raise "
            "--kv-gpu-memory, --kv-host-memory or --kv-offload-disk-memory"
        )

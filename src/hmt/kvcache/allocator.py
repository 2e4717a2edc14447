"""What sequences hold of the KV cache: pages, reservations, forks and prefixes.  Numbers only.

The bytes are those of a KVStorage, which does what is decided here.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from hmt.base.errors import BudgetError
from hmt.contracts.kv import GROUP_PAGES, KVAccount, PinnedPages, min_device_pages
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import Segment
from hmt.kvcache.interface import KVStorage, SequencePages, SharedPrefixes
from hmt.kvcache.page_pool import PagePool
from hmt.kvcache.page_table import Ints, PageTable, PageTier
from hmt.kvcache.sequence_slots import SequenceSlots

_NONE = np.zeros(0, dtype=np.int64)
# Steps between looks at what tokens attend to, each in another layer.  A look reads the layer's
# keys once more: of 32 layers, 0.1% of what attention reads.  Pages are promoted as often, since
# what they are worth hardly changes in between.
SCORED_EVERY = 16


class KVAllocator:
    """Sequences, and what each of them holds and may still take.  For the engine's thread.

    What was reserved can always be used.  A page is reserved with its place where pages stay; where
    they move, capacity is reserved over all tiers, and a page gets its place when a step appends to
    it.

    A sequence holds pages of 16 positions, numbered alike for all layers, and SequenceSlots.
    """

    def __init__(
        self,
        pool: PagePool,
        slots: Sequence[SequenceSlots] = (),
        *,
        pinned: PinnedPages | None = None,
        chunk: int = 0,
    ) -> None:
        """Of one model, or of nothing that is ever computed.

        pinned  pages of running sequences that stay where layers compute, if others move
        chunk   tokens that a step may append where pages move, all but one of each sequence
        """
        self._pool = pool
        self._slots = tuple(slots)
        self._pinned = PinnedPages() if pinned is None else pinned
        self._chunk = chunk
        self._storages: list[KVStorage] = []
        self._prefixes: SharedPrefixes | None = None
        self._sequences: dict[int, SequencePages] = {}
        self._next = 0
        self._segments: tuple[Segment, ...] | None = None  # of the last step that began
        self.steps = 0  # that have begun, where pages move

    def attach(self, storage: KVStorage) -> None:
        """Let `storage` do from now on what is decided here."""
        self._storages.append(storage)

    def share_with(self, prefixes: SharedPrefixes) -> None:
        """Count pages that only `prefixes` own as free, and have them given up when needed."""
        self._prefixes = prefixes

    @property
    def pool(self) -> PagePool:
        """Where pages come from."""
        return self._pool

    @property
    def page_table(self) -> PageTable:
        """Which pages there are, who shares them, and where each lies."""
        return self._pool.page_table

    @property
    def account(self) -> KVAccount:
        """What has happened since the allocator was made."""
        return self._pool.account

    @property
    def sequences(self) -> Mapping[int, SequencePages]:
        """Those that are open, by handle."""
        return MappingProxyType(self._sequences)

    @property
    def keeps_all_positions(self) -> bool:
        """Whether no kind of cache forgets positions, as sliding windows do."""
        return not self._slots

    @property
    def has_rings(self) -> bool:
        """Whether a kind of cache has pages that it forgets, and not one slot per sequence."""
        return any(kind.most > 1 for kind in self._slots)

    @property
    def capacity_tokens(self) -> int:
        """Positions in all."""
        return self.page_table.count * PAGE_TOKENS

    @property
    def free_tokens(self) -> int:
        """Positions that no sequence has reserved."""
        return self._free_pages(_NONE) * PAGE_TOKENS

    @property
    def unmade(self) -> int:
        """Pages that sequences have reserved and that have no place yet."""
        return sum(sequence.unmade for sequence in self._sequences.values())

    def pages(self, sequence: int) -> Ints:
        """Ids of a sequence's pages, by position."""
        return self._sequences[sequence].pages

    def reserved_tokens(self, sequence: int) -> int:
        """Positions that a sequence may fill, in whole pages."""
        held = self._sequences[sequence]
        return (len(held.pages) + held.unmade) * PAGE_TOKENS

    # Sequences come, fork and go.

    def can_open(self, tokens: int) -> bool:
        """Whether `open` would succeed now."""
        return self._has_room(_NONE, pages_of(tokens))

    def open(self, tokens: int) -> int:
        """Reserve `tokens` positions for a new sequence; its handle.  Raises BudgetError."""
        return self._open(_NONE, pages_of(tokens))

    def can_open_with(self, tokens: int, ids: Ints) -> bool:
        """Whether `open_with` would succeed now."""
        return self._has_room(ids, pages_of(tokens) - len(ids))

    def open_with(self, tokens: int, ids: Ints) -> int:
        """A new sequence of `tokens` positions that begins with pages `ids`; its handle.

        ids   of shared prefixes, from a call since which nothing else was asked of this allocator;
              the sequence owns a share of them from now on.  Raises BudgetError.
        """
        return self._open(ids.copy(), pages_of(tokens) - len(ids), PAGE_TOKENS * len(ids))

    def can_fork(self, sequence: int, held: int, tokens: int) -> bool:
        """Whether `fork` would succeed now."""
        whole = held // PAGE_TOKENS
        return self._has_room(self._sequences[sequence].pages[:whole], pages_of(tokens) - whole)

    def fork(self, sequence: int, held: int, tokens: int) -> int:
        """A new sequence with the first `held` positions of another, and room for `tokens` in all.

        Whole pages are shared.  The last one, if it is not full, is copied at once: each of the two
        writes to it next.  Where positions are forgotten, `held` has to be all that the other
        holds.  Raises BudgetError or DiskReadError.
        """
        whole = held // PAGE_TOKENS
        theirs = self._sequences[sequence].pages
        forked = self._open(theirs[:whole].copy(), pages_of(tokens) - whole, held)
        for storage in self._storages:
            storage.copy_slots(sequence, forked)
        try:
            if held % PAGE_TOKENS:
                if self._pool.pages_move:
                    self._grow({forked: 1})
                self._copy(theirs[whole : whole + 1], self.pages(forked)[whole : whole + 1])
        except BaseException:
            self.close(forked)
            raise
        return forked

    def close(self, sequence: int) -> None:
        """Give up what a sequence holds."""
        ended = self._sequences.pop(sequence)
        self.page_table.drop(ended.pages)
        self.account.pages += len(ended.pages)
        self.account.tokens += ended.tokens
        for kind in self._slots:
            kind.close(sequence)

    # Reservations

    def can_grow(self, sequence: int, tokens: int) -> bool:
        """Whether `grow` would succeed now."""
        more = self._missing(sequence, tokens)
        slots = all(kind.can_grow(sequence, pages_of(tokens)) for kind in self._slots)
        return slots and (more <= 0 or more <= self._free_pages(_NONE))

    def grow(self, sequence: int, tokens: int) -> None:
        """Reserve `tokens` positions in all for a sequence, which keeps what it has.

        Raises BudgetError, changing nothing.
        """
        more = self._missing(sequence, tokens)
        if not self.can_grow(sequence, tokens):
            raise self._too_little(more)
        if more > 0:
            self._reserve(sequence, more)
        for kind in self._slots:
            kind.grow(sequence, pages_of(tokens))

    def shrink(self, sequence: int, tokens: int) -> None:
        """Give back what a sequence has reserved beyond its first `tokens` positions.

        Where pages move, it keeps those that have a place.  It keeps its slots.
        """
        held = self._sequences[sequence]
        if self._pool.pages_move:
            held.unmade = max(0, held.unmade + min(0, self._missing(sequence, tokens)))
            return
        self.page_table.drop(held.pages[pages_of(tokens) :])
        held.pages = held.pages[: pages_of(tokens)]

    def can_rewind(self) -> bool:
        """Whether `rewind` is possible: whether no cache has forgotten any position."""
        return self.keeps_all_positions

    def rewind(self, sequence: int, tokens: int) -> None:
        """Let a sequence hold no more than its first `tokens` positions, which it has filled.

        Reserves nothing behind them; `grow` does.  Where pages move, the last one, if it is not
        full, is copied to where it can be appended to; else no other sequence may use it.  Raises
        BudgetError or DiskReadError; then the sequence can only be closed.
        """
        if not self._pool.pages_move:
            self.shrink(sequence, tokens)
            return
        held, whole = self._sequences[sequence], tokens // PAGE_TOKENS
        partial = held.pages[whole : pages_of(tokens)]
        self.page_table.drop(held.pages[pages_of(tokens) :])
        held.pages, held.unmade, held.tokens = held.pages[:whole], 0, tokens
        try:
            if len(partial):
                if self._free_pages(_NONE) < 1:
                    raise self._too_little(1)
                held.unmade = 1
                self._grow({sequence: 1})
                self._copy(partial, held.pages[-1:])
        finally:
            self.page_table.drop(partial)

    def rollback(self, sequence: int, tokens: int) -> None:
        """Let a sequence hold its first `tokens` positions: the others were drafts of one step.

        It keeps all that it has reserved.
        """
        held = self._sequences[sequence]
        held.tokens = min(held.tokens, tokens)
        for storage in self._storages:
            storage.rollback(sequence, tokens)

    # Sequences that wait

    def can_park(self) -> bool:
        """Whether others could have the place of a sequence that is parked."""
        return all(kind.can_park() for kind in self._slots) and self.has_running_room(0, 1)

    def park(self, sequence: int) -> None:
        """A sequence takes no part in steps until `resume`: others have its place.

        It keeps its pages and slots.  Where pages move, they move away when room is needed, but for
        one that is not full.
        """
        self._sequences[sequence].parked = True
        for kind in self._slots:
            kind.park(sequence)

    def can_resume(self, sequence: int, tokens: int) -> bool:
        """Whether `resume` would succeed now."""
        slots = all(kind.can_resume(sequence) for kind in self._slots)
        return slots and self.has_running_room(1, -1) and self.can_grow(sequence, tokens)

    def resume(self, sequence: int, tokens: int) -> None:
        """Let a parked sequence go on, with `tokens` positions in all.

        Raises BudgetError, changing nothing.
        """
        if not self.can_resume(sequence, tokens):
            raise self._too_little(self._missing(sequence, tokens))
        self.grow(sequence, tokens)
        self._sequences[sequence].parked = False
        for kind in self._slots:
            kind.resume(sequence)

    def has_running_room(self, more_running: int, more_parked: int = 0) -> bool:
        """Whether so many more sequences may run, and be parked, besides those that do.

        Where pages move, each of them keeps some where layers compute.
        """
        if not self._pool.pages_move:
            return True
        running = self._running
        least = min_device_pages(self._chunk, running + more_running, self._pinned)
        parked = len(self._sequences) - running + more_parked
        return least + parked <= self.page_table.levels[PageTier.DEVICE].count

    # Steps

    def begin_step(self, segments: tuple[Segment, ...]) -> None:
        """Give a place to each page that a step appends to; no page moves until the next step.

        Does nothing where pages stay where they are, nor when called again for the same tuple.
        Raises DiskReadError.
        """
        if not self._pool.pages_move or segments is self._segments:
            return
        self._segments = segments
        self.steps += 1
        if self.steps % SCORED_EVERY == 1:
            self._pool.promote(self._stays())
        counts = {}
        for run in segments:
            sequence = self._sequences[run.sequence]
            sequence.tokens = run.context
            counts[run.sequence] = pages_of(run.context) - len(sequence.pages)
        self._pool.write_back(self.unmade, self._stays)  # before there are empty pages
        self._grow(counts)

    def make_pages(self, sequence: int, first: int, count: int) -> Iterable[Ints]:
        """Ids of `count` pages of a sequence, from number `first` on, some at a time.

        They have been reserved, and those before them have places.  Each part is to be filled
        before the next is asked for, which may move others away.  Raises DiskReadError.
        """
        most = max(1, self._chunk // PAGE_TOKENS) if self._pool.pages_move else max(1, count)
        for begin in range(first, first + count, most):
            end = min(begin + most, first + count)
            if self._pool.pages_move:
                assert len(self.pages(sequence)) == begin
                self._grow({sequence: end - begin})
            yield self.pages(sequence)[begin:end]

    def _open(self, shared: Ints, more: int, tokens: int = 0) -> int:
        """A sequence that owns a share of pages `shared`, and `more` reserved ones."""
        if not self._has_room(shared, more):
            raise self._too_little(more)
        self._next += 1
        self._sequences[self._next] = SequencePages(shared, 0, tokens)
        self.page_table.share(shared)
        for kind in self._slots:
            kind.open(self._next, len(shared) + more)
        self._reserve(self._next, more)
        return self._next

    def _reserve(self, sequence: int, pages: int) -> None:
        """There must be room for so many more pages."""
        self._sequences[sequence].unmade += pages
        if not self._pool.pages_move:
            self._grow({sequence: pages})

    def _grow(self, counts: Mapping[int, int]) -> None:
        """Give places to so many pages of each sequence, of those that it has reserved."""
        counts = {sequence: count for sequence, count in counts.items() if count > 0}
        if not counts:
            return
        total = sum(counts.values())
        self._evict_prefixes(total)
        made = self._pool.new(total, self._stays() if self._pool.pages_move else ())
        for storage in self._storages:
            storage.pages_made(made)
        parts = np.split(made, np.cumsum([*counts.values()])[:-1])
        for (number, count), ids in zip(counts.items(), parts, strict=True):
            sequence = self._sequences[number]
            assert count <= sequence.unmade, "more positions than were reserved"
            sequence.pages = np.concatenate((sequence.pages, ids))
            sequence.unmade -= count

    def _copy(self, page: Ints, to: Ints) -> None:
        for storage in self._storages:
            storage.copy_page(page, to)

    def _stays(self) -> list[Ints]:
        """Pages that do not move away: sequences' first and last.

        Of parked ones those that are not full: codecs of other tiers want all 16 tokens.
        """
        stays = [_NONE]
        for sequence in self._sequences.values():
            if not sequence.parked:
                pages = sequence.pages
                stays += [pages[: self._pinned.sinks], pages[-self._pinned.recent :]]
            elif sequence.tokens % PAGE_TOKENS:
                stays.append(sequence.pages[-1:])
        return stays

    @property
    def _running(self) -> int:
        """Sequences that are not parked."""
        return sum(not sequence.parked for sequence in self._sequences.values())

    def _missing(self, sequence: int, tokens: int) -> int:
        """Pages that a sequence would have to reserve for so many positions; below 0: too many."""
        held = self._sequences[sequence]
        return pages_of(tokens) - len(held.pages) - held.unmade

    def _free_pages(self, held: Ints) -> int:
        """Pages that no sequence has reserved, once one of them holds `held`.

        Pages that only prefixes own are free, too.
        """
        self._pool.settle()  # pages on their way count twice
        free = self._pool.free_pages - self.unmade
        idle = self._idle(held)
        return free + self.page_table.freed_by(idle) if len(idle) else free

    def _idle(self, held: Ints = _NONE) -> Ints:
        """Pages that only prefixes own, without `held`."""
        if self._prefixes is None:
            return _NONE
        alone = self._prefixes.alone()
        return np.setdiff1d(alone, held, assume_unique=True) if len(held) else alone

    def _has_room(self, shared: Ints, more: int) -> bool:
        """For one more sequence that shares pages `shared` and has `more` besides."""
        enough = more <= self._free_pages(shared) and self.has_running_room(1)
        return enough and all(kind.can_open(len(shared) + more) for kind in self._slots)

    def _evict_prefixes(self, pages: int) -> None:
        """Give up prefixes until so many pages can be made where layers compute.

        A page in a group on the disk with one in use makes no room when it is given up, so no more
        idle pages may go there than there are places to spare.
        """
        table = self.page_table
        if self._prefixes is None or pages <= table.free_at(PageTier.DEVICE):
            return
        if not self._pool.pages_move:
            self._prefixes.evict(pages - table.free)
            return
        self._pool.settle()
        while len(idle := self._idle()):
            short = pages - self._pool.free_pages
            in_memory = int((table.level_of(idle) != PageTier.DISK).sum())
            lost = in_memory - self._free_pages(_NONE) if self._pool.disk_has_room else 0
            if max(short, lost) <= 0:
                return
            self._prefixes.evict(max(short, lost, GROUP_PAGES))  # some more at once, as they move

    def _too_little(self, pages: int) -> BudgetError:
        full = [kind.count for kind in self._slots if not kind.can_open(max(1, pages))]
        if full and pages <= self._free_pages(_NONE):
            return BudgetError(
                f"a sequence needs a slot beside its KV pages, and {len(self._sequences)} open "
                f"ones leave none of {full[0]}; wait until one ends, or raise --max-batch"
            )
        asked = (
            f"{pages * PAGE_TOKENS} positions of KV were asked for and {self.free_tokens} of "
            f"{self.capacity_tokens} are free"
        )
        if not self._pool.pages_move:
            return BudgetError(
                f"{asked}; ask for a shorter context, or raise --context or --host-memory"
            )
        device = self.page_table.levels[PageTier.DEVICE].count * PAGE_TOKENS
        return BudgetError(
            f"{asked}, {device} of all where layers compute, with {self._running} sequences open; "
            "shorten the context, or raise --kv-gpu-memory, --kv-host-memory or "
            "--kv-offload-disk-memory"
        )


def pages_of(tokens: int) -> int:
    """Pages that so many positions take."""
    return -(-tokens // PAGE_TOKENS)

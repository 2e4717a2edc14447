"""Page-aligned host memory within one account's limit: slabs, a buddy system, and compaction."""

import heapq
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from hmt.base.errors import BudgetError, os_reason
from hmt.base.units import format_bytes
from hmt.memory.allocator.arena import PAGE_BYTES, POISON, Arena, HostBuffer
from hmt.memory.allocator.buddy import Buddy
from hmt.memory.allocator.compaction import MovableRegion, Move, free_runs, moved_pages, plan_moves
from hmt.memory.ledger import Account

# Copying a page costs about what giving one back to the system and taking another does (14 and 12
# GB/s), which is the other way to make room; but copying keeps huge pages whole.
_MOST_MOVED = 2  # times the pages that are wanted
_SELDOM_TOO_MANY = 512  # pages, which take 0.15 ms
_BACKED_PAGES = 1 << 20  # at a time: 4 GiB


class BufferOwner(Protocol):
    """Who may agree to moving a pool's buffers.

    Asked from within `try_allocate`, by the thread that called it and with whatever locks that
    thread holds; must not call the pool.
    """

    def movable(self, buffer: HostBuffer) -> bool:
        """Whether nobody reads or writes the buffer now, nor will before `moved`."""
        ...

    def moved(self, buffer: HostBuffer) -> None:
        """The buffer has a new `view` and `tensor`; the old ones must not be used any more."""
        ...


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool holds.

    limit_bytes     what it may take
    backed_bytes    memory that it has taken from the system, free pages among it
    in_use_bytes    buffers that are handed out, in whole pages
    asked_bytes     what was asked for them
    peak_bytes      the most that was handed out at once
    arenas          address ranges in use, mappings for single buffers included
    moves, moved_bytes   buffers that were moved to bring free pages together
    external        1 - largest free piece / all that is free; 0 when nothing is
    internal        1 - asked / in use; 0 when nothing is in use
    """

    purpose: str
    limit_bytes: int
    backed_bytes: int
    in_use_bytes: int
    asked_bytes: int
    peak_bytes: int
    arenas: int
    moves: int
    moved_bytes: int
    external: float
    internal: float


class HostPool:
    """Hands out HostBuffers; a request fails only when the limit does not allow it.  Thread-safe.

    One arena of exactly the account's limit holds them, so what the plan promised in sum can be
    had: there is no rounding but to whole pages of 4 KiB, and no header.  It is backed as it is
    used.  Which pages serve a request:

    1. A size that was announced is a slab: a freed slot waits for the next request of its size,
       and new ones begin at the lowest free page, side by side.  Equal blocks waste nothing and
       never fragment, and sizes that are never freed fill the arena to its last page.
    2. Any other size comes from the buddy system, in 4 KiB steps.
    3. Free pages enough, but not in one piece: waiting slots join the free pages; then the
       pool's owner is asked which buffers may move, and the fewest pages move.
    4. Where that is not possible, because what is between is leased, the buffer becomes a mapping
       of its own, and as many free pages are returned to the system before it is made.
    """

    def __init__(
        self,
        account: Account,
        sizes: Iterable[int] = (),
        *,
        poison: bool = False,
        packed: bool = False,
    ) -> None:
        """`sizes` in bytes are those that come often.  `poison`: see Arena.

        packed   every buffer begins at the lowest address where it fits: for few that stay, of
                 which none may have to lie outside of the arena, where it could not be pinned
        """
        self.account = account
        self._packed = packed
        self._poison = poison
        self._pages = account.limit_bytes // PAGE_BYTES
        # By pages of a slot: first pages of the slots that wait, the lowest first, with what they
        # were; a buffer is five times as long in the making (5 us) as in being found again.
        self._slabs: dict[int, list[tuple[int, HostBuffer]]] = {
            pages_of(size): [] for size in sizes if size
        }
        self._held: dict[int, HostBuffer] = {}  # in the arena, by first page
        self._apart: set[HostBuffer] = set()  # mappings of their own
        self._owner: BufferOwner | None = None
        self._unpin: Callable[[], None] | None = None
        self._in_use = self._asked = self._peak = self._moves = self._moved = 0
        self._lock = threading.Lock()
        self._arena = Arena(account, self._pages, poison=poison)
        self._buddy = Buddy(self._pages)

    def owner_of(self, owner: BufferOwner) -> None:
        """From now on `owner` is asked which buffers may move."""
        self._owner = owner

    def try_allocate(self, nbytes: int) -> HostBuffer | None:
        """At least `nbytes`, rounded up to whole pages; None when the limit does not allow it.

        The contents are undefined.  Raises BudgetError when the system has no memory left.
        """
        pages = pages_of(nbytes)
        with self._lock:
            if self._in_use + pages * PAGE_BYTES > self.account.limit_bytes:
                return None
            try:
                buffer = self._in_arena(pages) or self._on_its_own(pages)
            except OSError as error:
                raise BudgetError(
                    f"{self.account.purpose}: the system has no {format_bytes(nbytes)} left "
                    f"({os_reason(error)}); lower --host-memory"
                ) from error
            buffer.asked_bytes = nbytes
            self._in_use += buffer.nbytes
            self._asked += nbytes
            self._peak = max(self._peak, self._in_use)
            return buffer

    def allocate(self, nbytes: int) -> HostBuffer:
        """Like `try_allocate`, but raises BudgetError."""
        buffer = self.try_allocate(nbytes)
        if buffer is None:
            raise BudgetError(
                f"{self.account.purpose}: {format_bytes(nbytes)} do not fit; "
                f"{format_bytes(self._in_use)} of "
                f"{format_bytes(self.account.limit_bytes)} are in use"
            )
        return buffer

    def free(self, buffer: HostBuffer) -> None:
        """Take back a buffer of this pool; the caller's views must not be used afterwards."""
        with self._lock:
            if buffer.place is None:
                self._apart.remove(buffer)
                self._end(buffer)
            else:
                held = self._held.pop(buffer.place, None)
                if held is not buffer:
                    raise AssertionError(f"{self.account.purpose}: a buffer was freed twice")
                self._arena.give_up(buffer)
                waiting = self._slabs.get(buffer.nbytes // PAGE_BYTES)
                if waiting is None:
                    self._buddy.give(buffer.place, buffer.nbytes // PAGE_BYTES)
                else:
                    heapq.heappush(waiting, (buffer.place, buffer))
            self._in_use -= buffer.nbytes
            self._asked -= buffer.asked_bytes

    def prefault(self, between: Callable[[], None] = lambda: None) -> None:
        """Take the memory of the whole arena now: several threads do so faster than first use.

        `between` is called now and then, and may raise to end it.
        """
        for first in range(0, self._pages, _BACKED_PAGES):
            with self._lock:
                self._arena.back(first, min(_BACKED_PAGES, self._pages - first))
            between()

    def pin(self, unpin: Callable[[], None]) -> list[memoryview]:
        """Back the whole arena; its bytes, for registering them with the kernel or a device.

        They stay the same memory until `close`, or until the pool calls `unpin`, once, because it
        has to return some of them: whoever registered them must let go before `unpin` returns.
        Buffers that are mappings of their own lie outside; with `poison` all are, and the bytes are
        those of the buffers that there are.
        """
        with self._lock:
            assert self._unpin is None, f"{self.account.purpose} is pinned already"
            backed = self._back(0, self._pages)
            assert backed, f"{self.account.purpose}: pinned while buffers lie outside of the arena"
            self._unpin = unpin
            if self._poison:
                return [buffer.view for buffer in self._held.values()]
            return [self._arena.memory()]

    def trim(self) -> None:
        """Return the memory of all free pages to the system, unless it is pinned.

        Nobody else may use it meanwhile, for the limit stays reserved: this is for memory that is
        not needed for long.  Taking it again costs a copy's time (12 GB/s).
        """
        with self._lock:
            if self._unpin is None:
                self._discard_free()

    def close(self) -> None:
        """Release all memory; the account stays open.  All buffers must have been freed."""
        with self._lock:
            if self._in_use:
                raise AssertionError(f"{self.account.purpose}: {self._in_use} bytes still in use")
            self._release_pin()
            self._discard_free()
            self._arena = Arena(self.account, self._pages, poison=self._poison)

    @property
    def in_use_bytes(self) -> int:
        """Bytes of buffers that are handed out."""
        return self._in_use

    def stats(self) -> PoolStats:
        """Figures of now."""
        with self._lock:
            free = self._pages - self._in_use // PAGE_BYTES
            runs = free_runs(self._pieces(lambda buffer: False), self._pages)
            longest = max((end - first for first, end in runs), default=0)
            return PoolStats(
                purpose=self.account.purpose,
                limit_bytes=self.account.limit_bytes,
                backed_bytes=self.account.used_bytes,
                in_use_bytes=self._in_use,
                asked_bytes=self._asked,
                peak_bytes=self._peak,
                arenas=bool(self.account.used_bytes) + len(self._apart),
                moves=self._moves,
                moved_bytes=self._moved,
                external=1 - min(longest, free) / free if free else 0.0,
                internal=1 - self._asked / self._in_use if self._in_use else 0.0,
            )

    # Inside, with the lock held

    def _in_arena(self, pages: int) -> HostBuffer | None:
        waiting = self._slabs.get(pages)
        place, buffer = heapq.heappop(waiting) if waiting else (self._place(pages), None)
        if place is None:
            return None
        if buffer is None or self._poison:  # what is poisoned is never used again
            try:
                backed = self._back(place, pages)
                assert backed, "the account has room for all that is in use"
                buffer = self._arena.buffer(place, pages)
            except BaseException:
                self._buddy.give(place, pages)
                raise
        self._held[place] = buffer
        return buffer

    def _place(self, pages: int) -> int | None:
        """Free pages, taken; None where they are not in one piece and cannot be brought there."""
        packed = self._packed or pages in self._slabs
        take = self._buddy.take_packed if packed else self._buddy.take
        place = take(pages)
        if place is None and self._join_waiting():
            place = take(pages)
        if place is None and self._owner is not None and self._compact(self._owner, pages):
            place = take(pages)
        return place

    def _join_waiting(self) -> bool:
        """Let the slots that wait be free pages again; whether there were any."""
        any_waited = False
        for pages, waiting in self._slabs.items():
            for place, _ in waiting:
                self._buddy.give(place, pages)
                any_waited = True
            waiting.clear()
        return any_waited

    def _compact(self, owner: BufferOwner, wanted: int) -> bool:
        """Bring `wanted` free pages together by moving buffers; False where it cannot be done."""
        moves = plan_moves(self._pieces(owner.movable), self._pages, wanted)
        if moves is None or moved_pages(moves) > max(_MOST_MOVED * wanted, _SELDOM_TOO_MANY):
            return False
        return all(self._move(owner, move) for move in moves)

    def _pieces(self, movable: Callable[[HostBuffer], bool]) -> list[MovableRegion]:
        return [
            MovableRegion(place, buffer.nbytes // PAGE_BYTES, movable(buffer))
            for place, buffer in sorted(self._held.items())
        ]

    def _move(self, owner: BufferOwner, move: Move) -> bool:
        # The pages that the buffer gains are its own before it leaves any.
        source, target, pages = move
        gained = (target, min(pages, abs(source - target)))
        left = (max(source, target + pages) if target < source else source, gained[1])
        assert target < source or target >= source + pages
        self._buddy.take_at(*gained)
        if not self._back(*gained):
            self._buddy.give(*gained)
            return False
        buffer = self._held.pop(source)
        self._arena.move(buffer, target)
        self._held[target] = buffer
        self._buddy.give(*left)
        self._moves += 1
        self._moved += buffer.nbytes
        owner.moved(buffer)
        return True

    def _back(self, place: int, pages: int) -> bool:
        """Back taken pages, in exchange for free ones where the limit asks for it.

        False when there are not enough.
        """
        if self._arena.back(place, pages):
            return True
        self._make_room(self._arena.missing_pages(place, pages))
        return self._arena.back(place, pages)

    def _on_its_own(self, pages: int) -> HostBuffer:
        """A buffer outside of the arena, in exchange for free pages."""
        nbytes = pages * PAGE_BYTES
        self._make_room(pages)
        self.account.charge(nbytes)
        try:
            buffer = HostBuffer(nbytes)
        except BaseException:
            self.account.release(nbytes)
            raise
        self._apart.add(buffer)
        return buffer

    def _end(self, buffer: HostBuffer) -> None:
        if self._poison:
            buffer.tensor.fill_(POISON)
        else:
            buffer.discard()
        self.account.release(buffer.nbytes)

    def _make_room(self, pages: int) -> None:
        """Return free pages to the system until the account has room for `pages`, if it can be."""
        pages -= (self.account.limit_bytes - self.account.used_bytes) // PAGE_BYTES
        if pages > 0:
            self._release_pin()
            self._join_waiting()
            for first, length in reversed(list(self._buddy.runs())):
                if pages <= 0:
                    break
                pages -= self._arena.discard(first, length, pages)

    def _discard_free(self) -> None:
        self._join_waiting()
        for first, length in self._buddy.runs():
            self._arena.discard(first, length, length)

    def _release_pin(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


def pages_of(nbytes: int) -> int:
    """Pages that hold `nbytes`; one at least."""
    return max(1, -(-nbytes // PAGE_BYTES))

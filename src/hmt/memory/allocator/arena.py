"""Memory on huge pages: buffers that are a mapping of their own, and arenas that hold many."""

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from hmt.base.units import MIB, round_down, round_up
from hmt.memory.allocator.page_runs import PageRuns
from hmt.memory.ledger import Account

PAGE_BYTES = 4096
POISON = 0xFF  # every float encoding reads this as NaN
_HUGE_PAGE_BYTES = 2 * MIB
_HUGE_PAGES = _HUGE_PAGE_BYTES // PAGE_BYTES
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h; Python's mmap does not name it
_TOGETHER_BYTES = 128 * MIB  # from here on several threads populate, each so much at a time
_MOST_THREADS = 32


class Mapping:
    """Anonymous memory, on a huge page's border where it is as large as one.

    It ends with the last view of it.

    view     writable memoryview of all bytes
    tensor   uint8 [nbytes] over the same bytes
    """

    def __init__(self, nbytes: int) -> None:
        """Addresses only; `populate` takes memory.  OSError when the system refuses them."""
        huge = nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
        slack = _HUGE_PAGE_BYTES if huge else 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, nbytes + slack, flags=flags)
        # Buffers are made wherever a slot is needed, also inside a step; a tensor made in inference
        # mode could not be written by the disk workers, which are outside of it.
        with torch.inference_mode(False):
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
            self._begin = -whole.data_ptr() % _HUGE_PAGE_BYTES if huge else 0
            self.tensor = whole[self._begin : self._begin + nbytes]
        self.view = memoryview(self._map)[self._begin : self._begin + nbytes]
        if huge:
            # One fault for 2 MiB instead of 512, and full rate of the disk: see Arena.
            self._map.madvise(mmap.MADV_HUGEPAGE, self._begin, nbytes)

    def populate(self, begin: int, nbytes: int) -> None:
        """Take memory for these bytes now.

        The first O_DIRECT reads into fresh buffers of 16 MiB ran at 1.0 to 2.0 GB/s, and at
        3.3 GB/s into populated ones.
        """
        # Linux before 5.14 refuses: memory comes at the first touch.
        first = self.tensor.data_ptr() + begin
        if nbytes < 2 * _TOGETHER_BYTES:
            _madvise(first, nbytes)
            return
        # One thread clears 2 to 10 GB/s.
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, "populate") as pool:
            for at in range(0, nbytes, _TOGETHER_BYTES):
                pool.submit(_madvise, first + at, min(_TOGETHER_BYTES, nbytes - at))

    def discard(self, begin: int, nbytes: int) -> None:
        """Return the memory of these bytes to the system; they read as zeros."""
        self._map.madvise(mmap.MADV_DONTNEED, self._begin + begin, nbytes)

    def allow_huge_pages(self, begin: int, nbytes: int, *, allow: bool) -> None:
        """Whether the system may put one huge page there, also where parts have no memory."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            advice = mmap.MADV_HUGEPAGE if allow else mmap.MADV_NOHUGEPAGE
            self._map.madvise(advice, self._begin + begin, nbytes)


def _madvise(address: int, nbytes: int) -> None:
    # Python's mmap would hold on to the interpreter's lock meanwhile.
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)


_libc = ctypes.CDLL(None)


class HostBuffer:
    """Page-aligned bytes of one size.

    A pool's buffer is valid until it is handed back; a pool whose owner agrees may move it, which
    replaces `view` and `tensor`.  A buffer made here is a mapping of its own and never moves.

    view     writable memoryview of all bytes
    tensor   uint8 [nbytes] over the same bytes
    place    the pool's business: first page in its arena, None outside of any
    """

    __slots__ = ("_mapping", "asked_bytes", "nbytes", "place", "tensor", "view")

    def __init__(self, nbytes: int) -> None:
        """Populated memory outside of every pool.  OSError when the system has none."""
        self.nbytes = self.asked_bytes = nbytes
        self.place: int | None = None
        self._mapping: Mapping | None = Mapping(nbytes)
        self._mapping.populate(0, nbytes)
        self.view, self.tensor = self._mapping.view, self._mapping.tensor

    @classmethod
    def _in_arena(cls, nbytes: int, place: int) -> "HostBuffer":
        buffer = cls.__new__(cls)
        buffer.nbytes, buffer.asked_bytes, buffer.place = nbytes, nbytes, place
        buffer._mapping = None
        return buffer

    def discard(self) -> None:
        """Return the physical pages to the system; the contents are gone.

        The mapping itself ends with its last view, so a forgotten tensor reads zeros and not
        somebody else's memory.
        """
        assert self._mapping is not None, "the pages of a pool's buffer are the pool's"
        self._mapping.discard(0, self.nbytes)


class Arena:
    """Adjacent pages, charged to an account while memory backs them.  Not thread-safe.

    Small slots lie side by side on huge pages: O_DIRECT into slots of 600 KiB runs at 2.2 GB/s, and
    ran at 1.1 when each was a mapping of its own, of 150 pages that lie anywhere.

    With `poison` every buffer is a mapping of its own that is filled with NaN when it is given up
    and never used again, so that whoever still reads it, reads NaN and nobody else's numbers.
    """

    def __init__(self, account: Account, pages: int, *, poison: bool) -> None:
        """Of at most `pages` pages; none is backed yet, and no addresses are taken."""
        self.pages = pages
        self._account = account
        self._poison = poison
        self._mapping: Mapping | None = None
        self._backed = PageRuns()

    def buffer(self, place: int, pages: int) -> HostBuffer:
        """A buffer over backed pages."""
        buffer = HostBuffer._in_arena(pages * PAGE_BYTES, place)
        self._show(buffer)
        return buffer

    def move(self, buffer: HostBuffer, place: int) -> None:
        """Copy a buffer to other backed pages, which may overlap its own."""
        old = buffer.tensor
        assert buffer.place is not None
        buffer.place = place
        self._show(buffer)
        ctypes.memmove(buffer.tensor.data_ptr(), old.data_ptr(), buffer.nbytes)
        if self._poison:
            old.fill_(POISON)

    def give_up(self, buffer: HostBuffer) -> None:
        """The buffer's pages are to be used by others."""
        if self._poison:
            buffer.tensor.fill_(POISON)

    def missing_pages(self, place: int, pages: int) -> int:
        """How many of these pages are not backed."""
        return pages - sum(end - first for first, end in self._backed.within(place, place + pages))

    def back(self, place: int, pages: int) -> bool:
        """Back these pages with memory; False, backing none, when the account does not allow it."""
        if not self.missing_pages(place, pages):
            return True
        if not self._poison:
            self._mapped()  # before anything is charged: the system may refuse
        # Whole huge pages where the account allows it: half a huge page is no huge page.
        wide = round_down(place, _HUGE_PAGES)
        wide_pages = min(round_up(place + pages, _HUGE_PAGES), self.pages) - wide
        for chosen in ((wide, wide_pages), (place, pages)):
            if self._account.try_charge(self.missing_pages(*chosen) * PAGE_BYTES):
                self._populate(*chosen)
                return True
        return False

    def discard(self, place: int, pages: int, most: int) -> int:
        """Return the memory of free pages to the system, of `most` of them, the highest first.

        How many had some.
        """
        returned = 0
        for first, end in reversed(self._backed.within(place, place + pages)):
            first = max(first, end - (most - returned))
            if first < end:
                self._backed.remove(first, end)
                if self._mapping is not None:
                    self._mapping.discard(first * PAGE_BYTES, (end - first) * PAGE_BYTES)
                    self._keep_to_the_account(first, end)
                returned += end - first
        self._account.release(returned * PAGE_BYTES)
        return returned

    def memory(self) -> memoryview:
        """All bytes, for whoever registers them with the kernel or a device."""
        return self._mapped().view if self.pages else memoryview(b"")

    def _populate(self, place: int, pages: int) -> None:
        self._backed.add(place, place + pages)
        if not self._poison:
            self._keep_to_the_account(place, place + pages)
            self._mapped().populate(place * PAGE_BYTES, pages * PAGE_BYTES)

    def _mapped(self) -> Mapping:
        if self._mapping is None:
            self._mapping = Mapping(self.pages * PAGE_BYTES)
        return self._mapping

    def _show(self, buffer: HostBuffer) -> None:
        """Let `view` and `tensor` be those of the buffer's place."""
        assert buffer.place is not None
        if self._poison:
            own = Mapping(buffer.nbytes)
            buffer.view, buffer.tensor = own.view, own.tensor
            return
        begin = buffer.place * PAGE_BYTES
        mapping = self._mapped()
        with torch.inference_mode(False):
            buffer.tensor = mapping.tensor[begin : begin + buffer.nbytes]
        buffer.view = mapping.view[begin : begin + buffer.nbytes]

    def _keep_to_the_account(self, first: int, end: int) -> None:
        """No huge page where only parts of one are charged: it would bring the others with it."""
        assert self._mapping is not None
        for edge in {round_down(first, _HUGE_PAGES), round_down(end - 1, _HUGE_PAGES)}:
            length = min(_HUGE_PAGES, self.pages - edge)
            partly = 0 < self.missing_pages(edge, length) < length
            self._mapping.allow_huge_pages(edge * PAGE_BYTES, length * PAGE_BYTES, allow=not partly)

"""Page-aligned host memory, charged to the ledger and reused by size."""

import contextlib
import mmap
import threading
from collections import defaultdict

import torch

from hmt.base.errors import BudgetError
from hmt.base.units import MIB, format_bytes, round_up
from hmt.memory.ledger import Account

PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 * MIB
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h; Python's mmap does not name it


class HostBuffer:
    """Page-aligned bytes of one size.  Valid until handed back to its pool.

    view     writable memoryview of all bytes
    tensor   uint8 [nbytes] over the same bytes
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            # One fault for 2 MiB instead of 512; and all of them now: the first O_DIRECT reads into
            # fresh buffers of 16 MiB ran at 1.0 to 2.0 GB/s, and at 3.3 GB/s into populated ones.
            self._map.madvise(mmap.MADV_HUGEPAGE)
            with contextlib.suppress(OSError):  # Linux before 5.14
                self._map.madvise(_MADV_POPULATE_WRITE)
        self.view = memoryview(self._map)
        # Buffers are made wherever a slot is needed, also inside a step; a tensor made in inference
        # mode could not be written by the disk workers, which are outside of it.
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def discard(self) -> None:
        """Return the physical pages to the system; the contents are gone.

        The mapping itself ends with its last view, so a forgotten tensor reads zeros and not
        somebody else's memory.
        """
        self._map.madvise(mmap.MADV_DONTNEED)


class HostPool:
    """Hands out HostBuffers within one account's limit.  Thread-safe.

    A model has few distinct block sizes, so freed buffers wait in a list per size and are handed
    out again without page faults.  Waiting buffers stay charged (they are memory of ours) and are
    given up, largest first, when another size needs their place.
    """

    def __init__(self, account: Account) -> None:
        self.account = account
        self._idle: dict[int, list[HostBuffer]] = defaultdict(list)
        self._in_use = 0
        self._lock = threading.Lock()

    def try_allocate(self, nbytes: int) -> HostBuffer | None:
        """At least `nbytes`, rounded up to whole pages; None when the limit does not allow it."""
        size = round_up(max(nbytes, 1), PAGE_BYTES)
        with self._lock:
            if idle := self._idle.get(size):
                self._in_use += size
                return idle.pop()
            if self._in_use + size > self.account.limit_bytes:
                return None
            while not self.account.try_charge(size):
                self._drop_largest_idle()
            self._in_use += size
        try:
            return HostBuffer(size)
        except OSError as error:
            with self._lock:
                self._in_use -= size
            self.account.release(size)
            raise BudgetError(
                f"{self.account.purpose}: the system has no {format_bytes(size)} left "
                f"({error.strerror}); lower --host-memory"
            ) from error

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
            self._in_use -= buffer.nbytes
            self._idle[buffer.nbytes].append(buffer)

    def close(self) -> None:
        """Release all memory; the account stays open.  All buffers must have been freed."""
        with self._lock:
            assert self._in_use == 0, f"{self.account.purpose}: {self._in_use} bytes still in use"
            while any(self._idle.values()):
                self._drop_largest_idle()

    @property
    def in_use_bytes(self) -> int:
        """Bytes of buffers that are handed out."""
        return self._in_use

    def _drop_largest_idle(self) -> None:
        size = max(size for size, idle in self._idle.items() if idle)
        self._idle[size].pop().discard()
        self.account.release(size)

"""The queue of disk reads: worker threads that serve chunks by priority."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hmt.base.errors import DiskReadError, HMTError
from hmt.base.log import logger
from hmt.base.trace import Tracer
from hmt.base.units import MIB
from hmt.contracts.store import Priority
from hmt.memory.readers import DiskReader


@dataclass(frozen=True, slots=True)
class DiskRead:
    """One aligned range of a file and where it goes.

    useful_end   offset in the file up to which bytes must exist; the rest is alignment padding
    """

    path: Path
    offset: int
    view: memoryview
    useful_end: int


Done = Callable[[HMTError | None], None]


class Ticket:
    """A group of reads that finishes as one."""

    def __init__(self, chunks: int, done: Done) -> None:
        self._left = chunks
        self.untaken = chunks  # chunks that no worker has begun; under the queue's lock
        self._done = done
        self._error: HMTError | None = None
        self._lock = threading.Lock()
        self.priority = Priority.GUESS

    def failed(self) -> bool:
        """True once any chunk has failed; the others need not be read."""
        return self._error is not None

    def chunk_finished(self, error: HMTError | None) -> None:
        """Count one chunk; the last one calls `done`, on the thread that finished it."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._done(self._error)


class _Chunk:
    __slots__ = ("read", "taken", "ticket")

    def __init__(self, read: DiskRead, ticket: Ticket) -> None:
        self.read = read
        self.ticket = ticket
        self.taken = False


class TransferQueue:
    """Reads ranges on `threads` workers, the most urgent chunk first.  Thread-safe.

    Ranges are cut into chunks of `chunk_bytes`: enough for a drive's full rate, small enough that
    an urgent read waits for at most `threads` chunks of something less urgent.
    """

    def __init__(
        self,
        reader: DiskReader,
        tracer: Tracer,
        *,
        threads: int = 8,
        chunk_bytes: int = 2 * MIB,
        worker_starts: Callable[[], None] = lambda: None,
    ) -> None:
        """`worker_starts` is called once on every worker, before this returns."""
        self._reader = reader
        self._tracer = tracer
        self._chunk_bytes = chunk_bytes
        self._heap: list[tuple[int, int, _Chunk]] = []
        self._waiting: dict[Ticket, list[_Chunk]] = {}
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        started = threading.Barrier(threads + 1)

        def work() -> None:
            worker_starts()
            started.wait()
            self._work()

        self._threads = [
            threading.Thread(target=work, name=f"hmt-disk-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        started.wait()

    def submit(self, reads: Sequence[DiskRead], priority: Priority, done: Done) -> Ticket:
        """Queue `reads`; `done(error or None)` is called once, on a worker, when all have ended.

        The views must stay valid until then.
        """
        pieces = [piece for read in reads for piece in self._cut(read)]
        assert pieces, "nothing to read"
        ticket = Ticket(len(pieces), done)
        chunks = [_Chunk(piece, ticket) for piece in pieces]
        with self._wake:
            if not self._closed:
                self._waiting[ticket] = chunks
                self._push(ticket, chunks, priority)
                return ticket
        for chunk in chunks:
            chunk.ticket.chunk_finished(DiskReadError("the engine was closed before this read"))
        return ticket

    def read(self, reads: Sequence[DiskRead]) -> None:
        """Read all `reads`, before everything else, and wait.  Raises the first error."""
        ended = threading.Event()
        errors: list[HMTError] = []

        def done(error: HMTError | None) -> None:
            if error is not None:
                errors.append(error)
            ended.set()

        self.submit(reads, Priority.NEED, done)
        ended.wait()
        if errors:
            raise errors[0]

    def promote(self, ticket: Ticket, priority: Priority) -> None:
        """Make the part of `ticket` that has not started at least as urgent as `priority`."""
        with self._wake:
            if priority < ticket.priority and ticket in self._waiting:
                self._push(ticket, [c for c in self._waiting[ticket] if not c.taken], priority)

    def close(self) -> None:
        """Stop the workers.  Reads that have not started end with an error.  Idempotent."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            dropped = [c for chunks in self._waiting.values() for c in chunks if not c.taken]
            for chunk in dropped:
                chunk.taken = True
            self._wake.notify_all()
        for chunk in dropped:
            chunk.ticket.chunk_finished(DiskReadError("the engine was closed during this read"))
        for thread in self._threads:
            thread.join()
        self._reader.close()

    def _push(self, ticket: Ticket, chunks: list[_Chunk], priority: Priority) -> None:
        ticket.priority = priority
        for chunk in chunks:
            heapq.heappush(self._heap, (int(priority), next(self._order), chunk))
        self._wake.notify(len(chunks))

    def _cut(self, read: DiskRead) -> list[DiskRead]:
        step = self._chunk_bytes
        return [
            DiskRead(read.path, read.offset + at, read.view[at : at + step], read.useful_end)
            for at in range(0, len(read.view), step)
        ]

    def _work(self) -> None:
        while (chunk := self._next()) is not None:
            # Not inside _next: `done` may take long, and may submit more.
            try:
                chunk.ticket.chunk_finished(self._read(chunk))
            except Exception:  # the worker must live; whoever gave `done` has to guard it
                logger.exception("a callback of the disk queue failed")

    def _next(self) -> _Chunk | None:
        with self._wake:
            while True:
                while self._heap:
                    chunk = heapq.heappop(self._heap)[2]
                    if not chunk.taken:  # promoted chunks stand in the heap twice
                        self._take(chunk)
                        return chunk
                if self._closed:
                    return None
                self._wake.wait()

    def _take(self, chunk: _Chunk) -> None:
        chunk.taken = True
        chunk.ticket.untaken -= 1
        if not chunk.ticket.untaken:
            del self._waiting[chunk.ticket]

    def _read(self, chunk: _Chunk) -> HMTError | None:
        if chunk.ticket.failed():
            return None
        read = chunk.read
        begin = time.perf_counter()
        try:
            got = self._reader.read_into(read.path, read.offset, read.view)
        except HMTError as error:
            return error
        except Exception as error:  # a worker must survive whatever a reader does
            return DiskReadError(f"reading {read.path} at {read.offset} failed: {error!r}")
        self._tracer.record("read", "disk", got, begin, time.perf_counter())
        missing = min(read.useful_end, read.offset + len(read.view)) - (read.offset + got)
        if missing > 0:
            return DiskReadError(
                f"{read.path} ended {missing} bytes early while it was being read at "
                f"{read.offset}; was the file replaced or truncated?"
            )
        return None

"""The queue of disk reads: what waits, what is being read, and who hears of the end.

The order is `hmt.memory.disk.read_scheduler`'s; the reading is an issuer's
(`hmt.memory.disk.io_backends`).
"""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from hmt.base.errors import Cancelled, DiskReadError, HMTError
from hmt.base.log import logger
from hmt.base.trace import Tracer
from hmt.base.units import MIB
from hmt.contracts.store import Priority
from hmt.memory.disk.io_backends import backend_of
from hmt.memory.disk.read_scheduler import DiskRead, Done, IoRequest, IoScheduler, ReadGroup
from hmt.memory.disk.readers import DiskReader


@dataclass(slots=True)
class ReadCounters:
    """What was read with one priority.

    requests      reads that the disk was asked for
    read_bytes    that they brought
    useful_bytes  of them, bytes that a block or row wanted: no alignment padding, no gaps
    queued_s      sum over requests of the time from a ticket's arrival to its being read
    tickets, cancelled, failed   tickets that have ended, and of them without an answer
    """

    requests: int = 0
    read_bytes: int = 0
    useful_bytes: int = 0
    queued_s: float = 0.0
    tickets: int = 0
    cancelled: int = 0
    failed: int = 0


@dataclass(slots=True)
class QueueCounters:
    """Sums since the queue was made.  `busy_s`: time in which something was being read."""

    by_priority: dict[Priority, ReadCounters] = field(
        default_factory=lambda: {priority: ReadCounters() for priority in Priority}
    )
    busy_s: float = 0.0

    @property
    def read_bytes(self) -> int:
        """Bytes read with any priority."""
        return sum(counters.read_bytes for counters in self.by_priority.values())

    @property
    def useful_bytes(self) -> int:
        """Of them, bytes that a block or row wanted."""
        return sum(counters.useful_bytes for counters in self.by_priority.values())

    @property
    def requests(self) -> int:
        """Reads that the disk was asked for."""
        return sum(counters.requests for counters in self.by_priority.values())


class ReadQueue:
    """Reads ranges of files, the most urgent first.  Thread-safe.

    Requests are of `chunk_bytes` at most, and `depth` times that is the most that is read at once
    (`bound_bytes`): enough for a disk's full rate, and all that an urgent read ever waits for.
    Small requests run more than `depth` at a time where the issuer can.  Guesses fill half of it.
    """

    def __init__(
        self,
        reader: DiskReader,
        tracer: Tracer,
        *,
        depth: int = 8,
        chunk_bytes: int = 2 * MIB,
        worker_starts: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`worker_starts` is called once on every thread that calls `done`, before this returns."""
        self.bound_bytes = depth * chunk_bytes
        self._reader = reader
        self._tracer = tracer
        self._clock = clock
        self._schedule = IoScheduler(chunk_bytes)
        self._wake = threading.Condition()
        self._closed = False
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._busy_since = 0.0
        self._counters = QueueCounters()
        self._issuer = backend_of(reader, depth)
        self._issuer.start(self, worker_starts)

    def submit(
        self,
        reads: Sequence[DiskRead],
        priority: Priority,
        done: Done,
        *,
        owner: Hashable = None,
        light: bool = False,
    ) -> ReadGroup:
        """Queue `reads`; `done(error or None)` is called once, when all have ended.

        It is called on a thread of the queue, or on that which cancels the ticket or closes the
        queue.  `light` promises that it takes a fraction of a millisecond at most.  The views must
        stay valid until then.  `owner`: whom the bytes are counted for where the disk is shared.
        """
        ticket = ReadGroup(reads, done, owner=owner, light=light)
        with self._wake:
            if not self._closed:
                self._schedule.add(ticket, priority, self._clock())
                self._more_to_take(len(reads))
                return ticket
        ticket.error = DiskReadError("the engine was closed before this read")
        self.end(ticket)
        return ticket

    def read(self, reads: Sequence[DiskRead]) -> None:
        """Read all `reads`, before everything else, and wait.  Raises the first error."""
        ended = threading.Event()
        errors: list[HMTError] = []

        def done(error: HMTError | None) -> None:
            if error is not None:
                errors.append(error)
            ended.set()

        self.submit(reads, Priority.DEMAND, done, light=True)
        ended.wait()
        if errors:
            raise errors[0]

    def promote(self, ticket: ReadGroup, priority: Priority) -> None:
        """Make the part of `ticket` that has not begun at least as urgent as `priority`."""
        with self._wake:
            lost = ticket.ended or ticket.error is not None or self._closed
            if priority < ticket.priority and not lost:
                self._schedule.promote(ticket, priority, self._clock())
                self._more_to_take(1)

    def cancel(self, ticket: ReadGroup) -> bool:
        """Drop what has not begun of `ticket`; False when there is nothing to drop.

        Its `done` hears of Cancelled: at once and on this thread when nothing of it is being read,
        else when that has ended.
        """
        with self._wake:
            if not ticket.waiting:
                return False
            self._schedule.remove(ticket)
            ticket.error = ticket.error or Cancelled("this read was cancelled before it began")
            ended = ticket.ended
            if ended:
                self._ended(ticket)
        if ended:
            self.end(ticket)
        return True

    def register(self, memory: memoryview) -> bool:
        """Let reads into `memory` save finding its pages, where the issuer can; whether it does.

        The pages stay pinned until `unregister`, which must come before they are given back.
        """
        return self._issuer.register(memory)

    def unregister(self, memory: memoryview) -> None:
        """End what `register` began.  No read into `memory` may be under way."""
        self._issuer.unregister(memory)

    def counters(self) -> QueueCounters:
        """A copy of what was counted so far."""
        with self._wake:
            busy = self._counters.busy_s
            if self._in_flight:
                busy += self._clock() - self._busy_since
            return QueueCounters(
                {p: replace(counters) for p, counters in self._counters.by_priority.items()}, busy
            )

    def close(self) -> None:
        """Stop reading.  Reads that have not started end with an error.  Idempotent."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            dropped = self._schedule.clear()
            for ticket in dropped:
                ticket.error = ticket.error or DiskReadError(
                    "the engine was closed during this read"
                )
            dropped = [ticket for ticket in dropped if ticket.ended]
            for ticket in dropped:
                self._ended(ticket)
            self._wake.notify_all()
        self._issuer.wake()
        for ticket in dropped:
            self.end(ticket)
        self._issuer.join()
        self._reader.close()

    # For the issuer

    @property
    def closed(self) -> bool:
        """Whether nothing more will be taken."""
        return self._closed

    def take(self, *, wait: bool) -> IoRequest | None:
        """What to read next.  None when the queue is closed or, unless `wait`, nothing may begin.

        Every request that was taken must be finished, also of a closed queue.
        """
        with self._wake:
            while not self._closed:
                now = self._clock()
                least = self._least_urgent()
                request = None if least is None else self._schedule.take(now, least)
                if request is not None:
                    self._begun(request, now)
                    return request
                if not wait:
                    return None
                self._wake.wait()
            return None

    def finish(self, request: IoRequest, got: int | HMTError) -> list[ReadGroup]:
        """Say what `request` brought: bytes, fewer only at the file's end, or an error.

        The tickets that this has ended: call `end` with each, which may take long.
        """
        now = self._clock()
        if isinstance(got, int):
            what = request.path.name, request.offset, request.priority
            self._tracer.record("read", "disk", got, request.begun_s, now, what)
        with self._wake:
            self._in_flight -= 1
            self._in_flight_bytes -= request.nbytes
            if not self._in_flight:
                self._counters.busy_s += now - self._busy_since
            failed = isinstance(got, HMTError)
            if failed and not self._closed and self._schedule.retry(request):
                self._wake.notify()
                return []
            self._account(request, got)
            ended = []
            for ticket in request.tickets():
                ticket.in_flight -= 1
                if ticket.error is not None:
                    self._schedule.remove(ticket)
                if ticket.ended:
                    self._ended(ticket)
                    ended.append(ticket)
            if ended:
                self._wake.notify()  # this thread may be away for a while
        return ended

    def end(self, ticket: ReadGroup) -> None:
        """Tell the owner of `ticket`, once."""
        try:
            ticket.done(ticket.error)
        except Exception:  # the thread must live; whoever gave `done` has to guard it
            logger.exception("a callback of the disk queue failed")

    # Inside, with the lock held

    def _least_urgent(self) -> Priority | None:
        """What may begin now, beside what is being read."""
        with_one_more = self._in_flight_bytes + self._schedule.block_bytes
        if with_one_more > self.bound_bytes:
            return None
        guesses = not self._in_flight or with_one_more <= self.bound_bytes // 2
        return Priority.SPECULATIVE if guesses else Priority.PREFETCH

    def _more_to_take(self, reads: int) -> None:
        if self._in_flight_bytes < self.bound_bytes:
            self._wake.notify(reads)
            self._issuer.wake()

    def _ended(self, ticket: ReadGroup) -> None:
        ticket.reads = ()  # what they fill may be given back soon
        counters = self._counters.by_priority[ticket.priority]
        counters.tickets += 1
        if ticket.error is not None:
            counters.failed += 1
            counters.cancelled += isinstance(ticket.error, Cancelled)

    def _begun(self, request: IoRequest, now_s: float) -> None:
        if not self._in_flight:
            self._busy_since = now_s
        self._in_flight += 1
        self._in_flight_bytes += request.nbytes
        first = request.parts[0].ticket
        counters = self._counters.by_priority[first.priority]
        counters.requests += 1
        counters.queued_s += now_s - first.since_s

    def _account(self, request: IoRequest, got: int | HMTError) -> None:
        """Count what came, and note what each ticket misses."""
        counters = self._counters.by_priority[request.parts[0].ticket.priority]
        if isinstance(got, HMTError):
            for ticket in request.tickets():
                ticket.error = ticket.error or got
            return
        counters.read_bytes += got
        for part in request.parts:
            counters.useful_bytes += part.useful_bytes
            missing = part.missing_bytes(request.offset + got)
            if missing and part.ticket.error is None:
                part.ticket.error = DiskReadError(
                    f"{request.path} ended {missing} bytes early while it was being read at "
                    f"{part.offset}; was the file replaced or truncated?"
                )

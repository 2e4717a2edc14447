"""Which read goes next: priorities, ageing, shares of owners, and neighbours in one request.

Pure bookkeeping: no threads, no clock of its own, nothing is read here.

A ticket is a group of reads that ends as one.  Tickets wait on three levels, by Priority, and a
level is served only when those above it are empty.  Three rules make that fair:

Shares.  Within a level the owner that has been served the fewest bytes goes first, so owners that
always have something waiting get equal bytes, within the size of one request.  An owner's tickets
go in the order in which they came.

Ageing.  A load that has begun holds the memory that it will fill, so none may wait for ever behind
more urgent ones.  While the oldest ticket of a level has waited for AGE_S, it is served on the next
level, too, as one more owner there with AGED_SHARE of a share.  So it moves on, and what is more
urgent loses a ninth of the disk at most.  It is one level, never two: while something is needed,
no guess is begun.

Neighbours.  A request is cut from the first ticket, up to `block_bytes`, and goes on through its
next read, and the owner's next ticket, while they lie side by side in the file: a gap of less than
64 KiB is read into scrap memory.
"""

import mmap
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hmt.base.errors import HMTError
from hmt.base.units import KIB
from hmt.contracts.store import Priority

AGE_S = {Priority.PREFETCH: 0.25, Priority.SPECULATIVE: 1.0}
AGED_SHARE = 1 / 8
GAP_BYTES = 64 * KIB  # reading this much for nothing costs less than another request

_MOST_VIEWS = 256  # of one request; the kernel's limit is 1024

Done = Callable[[HMTError | None], None]


@dataclass(frozen=True, slots=True)
class DiskRead:
    """One aligned range of a file and where it goes.

    useful_end     offset in the file up to which bytes must exist; the rest is alignment padding
    useful_bytes   of the range, bytes that somebody wants; None: all up to useful_end
    """

    path: Path
    offset: int
    view: memoryview
    useful_end: int
    useful_bytes: int | None = None

    @property
    def end(self) -> int:
        """The offset behind the range."""
        return self.offset + len(self.view)


class ReadGroup:
    """A group of reads that ends as one.  All but `done` belongs to the queue.

    light   whether `done` takes no more than a fraction of a millisecond
    """

    __slots__ = (
        "_at", "_index", "done", "error", "flow", "in_flight", "light", "owner", "priority",
        "reads", "since_s",
    )  # fmt: skip

    def __init__(
        self, reads: Sequence[DiskRead], done: Done, *, owner: Hashable = None, light: bool = False
    ) -> None:
        assert reads, "nothing to read"
        self.reads = tuple(reads)
        self.done = done
        self.owner = owner
        self.light = light
        self.priority = Priority.SPECULATIVE
        self.since_s = 0.0  # when it came, or was promoted
        self.flow: _Flow | None = None  # while it waits
        self.in_flight = 0  # requests that hold a part of it
        self.error: HMTError | None = None
        self._index = 0  # of the first read that is not taken whole
        self._at = 0  # bytes of it that are taken

    @property
    def waiting(self) -> bool:
        """Whether a part of it has not begun."""
        return self.flow is not None

    @property
    def ended(self) -> bool:
        """Whether nothing of it waits or is being read."""
        return self.flow is None and not self.in_flight

    def position(self) -> tuple[Path, int]:
        """File and offset of what is read next."""
        read = self.reads[self._index]
        return read.path, read.offset + self._at

    def take(self, most_bytes: int) -> "ReadChunk":
        """The next part, of at most `most_bytes`."""
        read, begin = self.reads[self._index], self._at
        self._at = min(begin + most_bytes, len(read.view))
        part = ReadChunk(self, read, begin, self._at)
        if self._at == len(read.view):
            self._index, self._at = self._index + 1, 0
        return part

    @property
    def exhausted(self) -> bool:
        """Whether `take` has given everything."""
        return self._index == len(self.reads)


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """Bytes [begin, end) of one read of a ticket."""

    ticket: ReadGroup
    read: DiskRead
    begin: int
    end: int

    @property
    def offset(self) -> int:
        """Where it begins in the file."""
        return self.read.offset + self.begin

    def missing_bytes(self, got_to: int) -> int:
        """Bytes that must exist and are not there, when the file was read up to offset `got_to`."""
        return max(0, min(self.read.useful_end, self.read.offset + self.end) - got_to)

    @property
    def useful_bytes(self) -> int:
        """Bytes that somebody wants.  A read's padding is counted where the read ends."""
        read = self.read
        if read.useful_bytes is None:
            return max(0, min(self.end, read.useful_end - read.offset) - self.begin)
        padding = len(read.view) - read.useful_bytes
        return self.end - self.begin - (padding if self.end == len(read.view) else 0)


@dataclass(slots=True)
class IoRequest:
    """One contiguous range of a file, and the views that it fills, one after the other.

    begun_s   when it was taken
    """

    path: Path
    offset: int
    views: list[memoryview]
    parts: list[ReadChunk]
    nbytes: int
    priority: Priority
    begun_s: float = 0.0

    def split(self) -> "list[IoRequest]":
        """The same in requests that hold one ticket and no gap; one, when it is that already."""
        runs: list[IoRequest] = []
        for part in self.parts:
            run = runs[-1] if runs else None
            view = part.read.view[part.begin : part.end]
            if (
                run is not None
                and run.parts[-1].ticket is part.ticket
                and run.offset + run.nbytes == part.offset
            ):
                run.views.append(view)
                run.parts.append(part)
                run.nbytes += len(view)
            else:
                runs.append(
                    IoRequest(self.path, part.offset, [view], [part], len(view), self.priority)
                )
        return runs

    def tickets(self) -> Iterator[ReadGroup]:
        """Each ticket once, in order."""
        return iter(dict.fromkeys(part.ticket for part in self.parts))


class _Flow:
    """Tickets of one owner on one level."""

    __slots__ = ("served", "tickets")

    def __init__(self, served: float) -> None:
        self.served = served  # bytes, and what it would have been served had it been here before
        self.tickets: OrderedDict[ReadGroup, None] = OrderedDict()


def _served(flow: _Flow) -> float:
    return flow.served


class _Level:
    """Flows that wait, by start-time fair queueing (Goyal, Vin and Cheng, 1996)."""

    def __init__(self) -> None:
        self.flows: dict[Hashable, _Flow] = {}
        self.again: deque[IoRequest] = deque()  # parts of requests that failed as a whole
        self.by_age: deque[ReadGroup] = deque()  # tickets as they came, and some that have left
        self._now = 0.0  # virtual time: `served` of the flow that was served last
        self._left_at: dict[Hashable, float] = {}  # `served` of flows that ran empty
        self._aged_served = 0.0  # times 1 / AGED_SHARE: what older tickets of the next level got
        self._aged_waits = False

    def add(self, ticket: ReadGroup) -> None:
        flow = self.flows.get(ticket.owner)
        if flow is None:
            served = max(self._now, self._left_at.pop(ticket.owner, 0.0))
            flow = self.flows[ticket.owner] = _Flow(served)
        flow.tickets[ticket] = None
        ticket.flow = flow
        self.by_age.append(ticket)

    def remove(self, ticket: ReadGroup) -> None:
        flow = ticket.flow
        assert flow is not None
        del flow.tickets[ticket]
        ticket.flow = None
        if flow.tickets:
            return
        del self.flows[ticket.owner]
        self._left_at[ticket.owner] = flow.served
        if not self.flows:
            self._now = self._aged_served = 0.0
            self._aged_waits = False
            self._left_at.clear()
        elif len(self._left_at) > 2 * len(self.flows) + 16:
            # An owner that was served no more than the others has nothing to be remembered for.
            self._left_at = {k: at for k, at in self._left_at.items() if at > self._now}

    def oldest(self, priority: Priority) -> ReadGroup | None:
        """The ticket that waits here longest."""
        while self.by_age:
            ticket = self.by_age[0]
            if ticket.waiting and ticket.priority is priority:
                return ticket
            self.by_age.popleft()
        return None

    def turn(self, aged: bool) -> _Flow | None:
        """The flow that is served next; None: the aged tickets below, if there are any."""
        if aged and not self._aged_waits:
            self._aged_served = max(self._aged_served, self._now)
        self._aged_waits = aged
        flows = self.flows.values()
        flow = min(flows, key=_served) if len(flows) > 1 else next(iter(flows))
        if aged and self._aged_served < flow.served:
            self._now = self._aged_served
            return None
        self._now = flow.served
        return flow

    def charge_aged(self, nbytes: int) -> None:
        self._aged_served += nbytes / AGED_SHARE


class IoScheduler:
    """Tickets that wait, and the order in which they are cut into requests.  For one thread."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._levels = {priority: _Level() for priority in Priority}
        # The only memory of the queue's own.  Reads into it overlap; nobody looks.
        self._scrap = memoryview(mmap.mmap(-1, GAP_BYTES))

    def add(self, ticket: ReadGroup, priority: Priority, now_s: float) -> None:
        """Let `ticket` wait on the level of `priority`."""
        ticket.priority = priority
        ticket.since_s = now_s
        self._levels[priority].add(ticket)

    def promote(self, ticket: ReadGroup, priority: Priority, now_s: float) -> None:
        """Make what waits of `ticket` at least as urgent as `priority`, behind what is already."""
        if priority >= ticket.priority:
            return
        if ticket.waiting:
            self.remove(ticket)
            self.add(ticket, priority, now_s)
        ticket.priority = priority
        for level in list(self._levels.values())[priority + 1 :]:
            for piece in [p for p in level.again if p.parts[0].ticket is ticket]:
                level.again.remove(piece)
                self._levels[priority].again.append(piece)

    def remove(self, ticket: ReadGroup) -> None:
        """Forget what waits of `ticket`."""
        if ticket.waiting:
            self._levels[ticket.priority].remove(ticket)

    def retry(self, request: IoRequest) -> bool:
        """Queue a failed `request` again, piece by piece, so that only the bad piece fails.

        False when it is one piece already.
        """
        pieces = request.split()
        if len(pieces) == 1:
            return False
        for ticket in request.tickets():
            ticket.in_flight -= 1
        for piece in pieces:
            ticket = piece.parts[0].ticket
            ticket.in_flight += 1
            self._levels[min(request.priority, ticket.priority)].again.append(piece)
        return True

    def clear(self) -> list[ReadGroup]:
        """Forget everything that waits; the tickets that waited, and those of retries."""
        dropped: dict[ReadGroup, None] = {}
        for level in self._levels.values():
            for piece in level.again:
                ticket = piece.parts[0].ticket
                ticket.in_flight -= 1
                dropped[ticket] = None
            level.again.clear()
            for flow in list(level.flows.values()):
                for ticket in list(flow.tickets):
                    level.remove(ticket)
                    dropped[ticket] = None
            level.by_age.clear()
        return list(dropped)

    def take(self, now_s: float, least: Priority = Priority.SPECULATIVE) -> IoRequest | None:
        """The next request, from the levels down to `least`; None when nothing waits there."""
        for priority, level in self._levels.items():
            if priority > least:
                break
            if level.again:
                request = level.again.popleft()
            elif level.flows:
                request = self._serve(priority, now_s)
            else:
                continue
            request.begun_s = now_s
            return request
        return None

    def _serve(self, priority: Priority, now_s: float) -> IoRequest:
        """The next request of a level on which something waits."""
        level = self._levels[priority]
        aged = (
            None if priority is Priority.SPECULATIVE else self._aged(Priority(priority + 1), now_s)
        )
        flow = level.turn(aged is not None)
        if flow is not None:
            return self._cut(flow, priority)
        assert aged is not None and aged.flow is not None
        request = self._cut(aged.flow, aged.priority)  # of which it is the first
        level.charge_aged(request.nbytes)
        return request

    def _aged(self, priority: Priority, now_s: float) -> ReadGroup | None:
        oldest = self._levels[priority].oldest(priority)
        old = oldest is not None and now_s - oldest.since_s >= AGE_S[priority]
        return oldest if old else None

    def _cut(self, flow: _Flow, priority: Priority) -> IoRequest:
        following: ReadGroup | None = next(iter(flow.tickets))
        assert following is not None
        path, offset = following.position()
        request = IoRequest(path, offset, [], [], 0, priority)
        while following is not None:
            before = request.nbytes
            self._extend(request, following)
            flow.served += request.nbytes - before
            if following.exhausted:
                self._levels[priority].remove(following)
            if request.nbytes == self.block_bytes:
                break
            following = next(iter(flow.tickets), None)
            if following is not None and not self._adjoins(request, following):
                break
        return request

    def _extend(self, request: IoRequest, ticket: ReadGroup) -> None:
        """Add the next part of `ticket`, and the gap before it."""
        if not request.parts or request.parts[-1].ticket is not ticket:
            ticket.in_flight += 1
        gap = ticket.position()[1] - (request.offset + request.nbytes)
        if gap:
            request.views.append(self._scrap[:gap])
            request.nbytes += gap
        part = ticket.take(self.block_bytes - request.nbytes)
        request.views.append(part.read.view[part.begin : part.end])
        request.parts.append(part)
        request.nbytes += part.end - part.begin

    def _adjoins(self, request: IoRequest, ticket: ReadGroup) -> bool:
        """Whether the next part of `ticket` can be read with `request`."""
        path, offset = ticket.position()
        gap = offset - (request.offset + request.nbytes)
        return (
            path == request.path
            and 0 <= gap < GAP_BYTES
            and request.nbytes + gap < self.block_bytes
            and len(request.views) + 2 <= _MOST_VIEWS
        )

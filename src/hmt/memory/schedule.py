"""Which read goes next: priorities, ageing, shares of owners, and neighbours in one request.

Pure bookkeeping: no threads, no clock of its own, nothing is read here.

A ticket is a group of reads that ends as one.  Tickets wait on three levels, by Priority, and a
level is served only when those above it are empty.  Three rules make that fair:

Shares.  Within a level the owner that has been served the fewest bytes goes first, so owners that
always have something waiting get equal bytes, within the size of one request.  An owner's tickets
go in the order in which they came.

Ageing.  A load that has begun holds the memory that it will fill, so none may wait for ever behind
more urgent ones.  A ticket that has waited AGE_S of its level joins the next level once, in one
flow with all others that did, which gets AGED_SHARE of what an owner gets.  So it moves on, and
what is urgent loses a ninth of the drive at most.  A guess gains one level, never two: on the level
of what is needed there are no guesses, and none is begun while something there waits.

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

AGE_S = {Priority.SURE: 0.25, Priority.GUESS: 1.0}
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


class Ticket:
    """A group of reads that ends as one.  All but `done` belongs to the queue.

    light   whether `done` takes no more than a fraction of a millisecond
    """

    __slots__ = (
        "_at", "_index", "aged", "done", "error", "flow", "in_flight", "level", "light", "owner",
        "priority", "reads", "since_s",
    )  # fmt: skip

    def __init__(
        self, reads: Sequence[DiskRead], done: Done, *, owner: Hashable = None, light: bool = False
    ) -> None:
        assert reads and all(len(read.view) for read in reads), "nothing to read"
        self.reads = tuple(reads)
        self.done = done
        self.owner = owner
        self.light = light
        self.priority = Priority.GUESS  # as it was asked for
        self.level = Priority.GUESS  # where it waits
        self.aged = False
        self.since_s = 0.0
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

    def take(self, most_bytes: int) -> "Part":
        """The next part, of at most `most_bytes`."""
        read, begin = self.reads[self._index], self._at
        self._at = min(begin + most_bytes, len(read.view))
        part = Part(self, read, begin, self._at)
        if self._at == len(read.view):
            self._index, self._at = self._index + 1, 0
        return part

    @property
    def exhausted(self) -> bool:
        """Whether `take` has given everything."""
        return self._index == len(self.reads)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [begin, end) of one read of a ticket."""

    ticket: Ticket
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
class Request:
    """One contiguous range of a file, and the views that it fills, one after the other.

    begun_s   when it was taken
    """

    path: Path
    offset: int
    views: list[memoryview]
    parts: list[Part]
    nbytes: int
    priority: Priority
    begun_s: float = 0.0

    def split(self) -> "list[Request]":
        """The same in requests that hold one ticket and no gap; one, when it is that already."""
        runs: list[Request] = []
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
                    Request(self.path, part.offset, [view], [part], len(view), self.priority)
                )
        return runs

    def tickets(self) -> Iterator[Ticket]:
        """Each ticket once, in order."""
        return iter(dict.fromkeys(part.ticket for part in self.parts))


class _Flow:
    """Tickets of one owner on one level, or all that have aged into it."""

    __slots__ = ("cost", "key", "served", "tickets")

    def __init__(self, key: Hashable, served: float, cost: float) -> None:
        self.key = key
        self.served = served  # bytes, times `cost`
        self.cost = cost
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()


class _Level:
    """Flows that wait, by start-time fair queueing (Goyal, Vin and Cheng, 1996)."""

    _AGED = object()

    def __init__(self) -> None:
        self.flows: dict[Hashable, _Flow] = {}
        self.again: deque[Request] = deque()  # parts of requests that failed as a whole
        self._now = 0.0  # virtual time: `served` of the flow that was served last
        self._left_at: dict[Hashable, float] = {}  # `served` of flows that ran empty

    def add(self, ticket: Ticket) -> None:
        key = self._AGED if ticket.aged else (ticket.owner,)
        flow = self.flows.get(key)
        if flow is None:
            served = max(self._now, self._left_at.pop(key, 0.0))
            flow = self.flows[key] = _Flow(key, served, 1 / AGED_SHARE if ticket.aged else 1.0)
        flow.tickets[ticket] = None
        ticket.flow = flow

    def remove(self, ticket: Ticket) -> None:
        flow = ticket.flow
        assert flow is not None
        del flow.tickets[ticket]
        ticket.flow = None
        if flow.tickets:
            return
        del self.flows[flow.key]
        self._left_at[flow.key] = flow.served
        if not self.flows:
            self._now = 0.0
            self._left_at.clear()
        elif len(self._left_at) > 2 * len(self.flows) + 16:
            # An owner that was served no more than the others has nothing to be remembered for.
            self._left_at = {k: at for k, at in self._left_at.items() if at > self._now}

    def begin(self) -> _Flow | None:
        """The flow that is served next, from now on."""
        flow = min(self.flows.values(), key=lambda flow: flow.served, default=None)
        if flow is not None:
            self._now = flow.served
        return flow


class Schedule:
    """Tickets that wait, and the order in which they are cut into requests.  For one thread."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._levels = {priority: _Level() for priority in Priority}
        self._ageing: dict[Priority, deque[tuple[float, Ticket]]] = {p: deque() for p in AGE_S}
        # The only memory of the queue's own.  Reads into it overlap; nobody looks.
        self._scrap = memoryview(mmap.mmap(-1, GAP_BYTES))

    def add(self, ticket: Ticket, priority: Priority, now_s: float) -> None:
        """Let `ticket` wait on the level of `priority`."""
        ticket.priority = ticket.level = priority
        ticket.aged = False
        ticket.since_s = now_s
        self._levels[priority].add(ticket)
        if priority in self._ageing:
            self._ageing[priority].append((now_s, ticket))

    def promote(self, ticket: Ticket, priority: Priority, now_s: float) -> None:
        """Make what waits of `ticket` at least as urgent as `priority`, behind what is already."""
        if priority >= ticket.priority:
            return
        ticket.priority = priority
        if ticket.waiting:
            self.remove(ticket)
            self.add(ticket, priority, now_s)
        for level in list(self._levels.values())[priority + 1 :]:
            for piece in [p for p in level.again if p.parts[0].ticket is ticket]:
                level.again.remove(piece)
                self._levels[priority].again.append(piece)

    def remove(self, ticket: Ticket) -> None:
        """Forget what waits of `ticket`."""
        if ticket.waiting:
            self._levels[ticket.level].remove(ticket)

    def retry(self, request: Request) -> bool:
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

    def clear(self) -> list[Ticket]:
        """Forget everything that waits; the tickets that waited, and those of retries."""
        dropped: dict[Ticket, None] = {}
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
        for entries in self._ageing.values():
            entries.clear()
        return list(dropped)

    def take(self, now_s: float, least: Priority = Priority.GUESS) -> Request | None:
        """The next request, from the levels down to `least`; None when nothing waits there."""
        self._age(now_s)
        for priority, level in self._levels.items():
            if priority > least:
                break
            if level.again:
                request = level.again.popleft()
            elif (flow := level.begin()) is not None:
                request = self._cut(level, flow, priority)
            else:
                continue
            request.begun_s = now_s
            return request
        return None

    def _age(self, now_s: float) -> None:
        for priority, entries in self._ageing.items():
            while entries:
                since_s, ticket = entries[0]
                stays = ticket.waiting and not ticket.aged and ticket.level is priority
                stays = stays and ticket.since_s == since_s
                if stays and since_s + AGE_S[priority] > now_s:
                    break
                entries.popleft()
                if stays:
                    self._levels[priority].remove(ticket)
                    ticket.aged = True
                    ticket.level = Priority(priority - 1)
                    self._levels[ticket.level].add(ticket)

    def _cut(self, level: _Level, flow: _Flow, priority: Priority) -> Request:
        following: Ticket | None = next(iter(flow.tickets))
        assert following is not None
        path, offset = following.position()
        request = Request(path, offset, [], [], 0, priority)
        while following is not None:
            before = request.nbytes
            self._extend(request, following)
            flow.served += (request.nbytes - before) * flow.cost
            if following.exhausted:
                level.remove(following)
            following = next(iter(flow.tickets), None)
            if following is not None and not self._adjoins(request, following):
                break
        return request

    def _extend(self, request: Request, ticket: Ticket) -> None:
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

    def _adjoins(self, request: Request, ticket: Ticket) -> bool:
        """Whether the next part of `ticket` can be read with `request`."""
        path, offset = ticket.position()
        gap = offset - (request.offset + request.nbytes)
        return (
            path == request.path
            and 0 <= gap < GAP_BYTES
            and request.nbytes + gap < self.block_bytes
            and len(request.views) + 2 <= _MOST_VIEWS
        )

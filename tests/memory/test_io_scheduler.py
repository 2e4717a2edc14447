"""The order of reads: priorities, ageing, shares, coalescing, as properties of a disk by hand."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from manual_issuer import PAGE, Ended, ManualReader, content

from hmt.base.errors import Cancelled, DiskReadError
from hmt.base.trace import Tracer
from hmt.contracts.store import Priority
from hmt.memory import DiskRead, ReadQueue
from hmt.memory.disk.read_scheduler import AGE_S, AGED_SHARE, GAP_BYTES

FILE = Path("weights")
NEED, SURE, GUESS = Priority.DEMAND, Priority.PREFETCH, Priority.SPECULATIVE


def opened(depth: int, pages: int) -> tuple[ManualReader, ReadQueue]:
    drive = ManualReader()
    queue = ReadQueue(drive, Tracer(), depth=depth, chunk_bytes=pages * PAGE, clock=drive.clock)
    return drive, queue


def read_of(first: int, pages: int, path: Path = FILE) -> DiskRead:
    view = memoryview(bytearray(pages * PAGE))
    return DiskRead(path, first * PAGE, view, (first + pages) * PAGE)


def is_right(read: DiskRead) -> bool:
    first = read.offset // PAGE
    expected = b"".join(content(read.path, first + n) for n in range(len(read.view) // PAGE))
    return bytes(read.view) == expected


class Known:
    """A ticket as the test knows it."""

    def __init__(self, reads: list[DiskRead], priority: Priority, owner: int, now_s: float) -> None:
        self.reads = reads
        self.priority = priority
        self.owner = owner
        self.since_s = now_s
        self.done = Ended()
        self.cancelled = False
        self.touched_bad = False


READS = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 9)), min_size=1, max_size=4)


class QueueMachine(RuleBasedStateMachine):
    """Tickets come, are promoted and cancelled while reads begin, end and fail in any order."""

    DEPTH, BLOCK = 3, 4

    def __init__(self) -> None:
        super().__init__()
        self.drive, self.queue = opened(self.DEPTH, self.BLOCK)
        self.tickets: list[Known] = []

    def waiting(self) -> list[Known]:
        return [
            t for t in self.tickets
            if t.done.ticket is not None and t.done.ticket.waiting
        ]  # fmt: skip

    @rule(
        ranges=READS,
        priority=st.sampled_from(Priority),
        owner=st.integers(0, 2),
        joined=st.booleans(),
    )
    def submit(
        self, ranges: list[tuple[int, int]], priority: Priority, owner: int, joined: bool
    ) -> None:
        reads = []
        for first, pages in ranges:
            if joined and reads:
                first += reads[-1].end // PAGE
            reads.append(read_of(first, pages, FILE if joined else Path(str(first % 2))))
        known = Known(reads, priority, owner, self.drive.time_s)
        known.done.ticket = self.queue.submit(reads, priority, known.done, owner=owner)
        self.tickets.append(known)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), priority=st.sampled_from(Priority))
    def promote(self, data: st.DataObject, priority: Priority) -> None:
        known = data.draw(st.sampled_from(self.tickets))
        self.queue.promote(known.done.ticket, priority)
        if priority < known.priority:
            known.priority, known.since_s = priority, self.drive.time_s

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.tickets))
        waits = known in self.waiting()
        assert self.queue.cancel(known.done.ticket) == waits
        known.cancelled |= waits

    @rule(page=st.integers(0, 90), path=st.sampled_from([FILE, Path("0"), Path("1")]))
    def break_page(self, page: int, path: Path) -> None:
        self.drive.bad.add((path, page))

    @rule()
    def mend(self) -> None:
        if not self.drive.flying:
            self.drive.bad.clear()

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0]))
    def pass_time(self, seconds: float) -> None:
        self.drive.time_s += seconds

    @rule()
    def begin(self) -> None:
        waiting = self.waiting()
        in_flight = sum(request.nbytes for request in self.drive.flying)
        request = self.drive.begin()
        if request is None:
            room = in_flight + self.BLOCK * PAGE <= self.DEPTH * self.BLOCK * PAGE
            assert not waiting or not room or all(t.priority is GUESS for t in waiting)
            return
        assert request.nbytes <= self.BLOCK * PAGE
        levels = [t.priority for t in waiting]
        taken = {id(part.ticket) for part in request.parts}
        for known in waiting:
            if id(known.done.ticket) in taken:
                # A ticket goes only when no other stands on a higher level for certain.
                assert self.level_at_best(known) <= min(levels)
                assert not (known.priority is GUESS and NEED in levels), "a guess delays a need"

    def level_at_best(self, known: Known) -> Priority:
        old = self.drive.time_s - known.since_s >= AGE_S.get(known.priority, 1e9)
        return Priority(known.priority - old)

    @precondition(lambda self: self.drive.flying)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.drive.flying) - 1))
        self.note_bad(self.drive.flying[index])
        self.drive.finish(index)

    def note_bad(self, request: object) -> None:
        for part in request.parts:  # type: ignore[attr-defined]
            known = next(t for t in self.tickets if t.done.ticket is part.ticket)
            first = part.offset // PAGE
            count = (part.end - part.begin) // PAGE
            known.touched_bad |= any(
                (part.read.path, first + n) in self.drive.bad for n in range(count)
            )

    @invariant()
    def bounded(self) -> None:
        in_flight = sum(request.nbytes for request in self.drive.flying)
        assert in_flight <= self.queue.bound_bytes

    @invariant()
    def told_once_and_truly(self) -> None:
        for known in self.tickets:
            assert len(known.done.calls) <= 1
            for error in known.done.calls:
                if error is None:
                    assert not known.cancelled
                    assert all(is_right(read) for read in known.reads)
                elif isinstance(error, Cancelled):
                    assert known.cancelled
                else:
                    assert known.touched_bad, "failed for somebody else's page"

    def teardown(self) -> None:
        for _ in range(10_000):
            if self.drive.flying:
                self.note_bad(self.drive.flying[0])
                self.drive.finish()
            elif self.drive.begin() is None:
                break
        assert not self.waiting() and not self.drive.flying
        self.told_once_and_truly()
        assert all(len(known.done.calls) == 1 for known in self.tickets)
        counters = self.queue.counters().by_priority.values()
        assert sum(c.tickets for c in counters) == len(self.tickets)
        self.queue.close()


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 12), min_size=40, max_size=40), min_size=2, max_size=4),
    priority=st.sampled_from(Priority),
)
def test_owners_that_always_wait_get_equal_bytes(
    sizes: list[list[int]], priority: Priority
) -> None:
    block = 4
    drive, queue = opened(2, block)
    owners: dict[int, int] = {}
    for owner, pages in enumerate(sizes):
        for n, count in enumerate(pages):
            ticket = queue.submit([read_of(100 * n, count)], priority, Ended(), owner=owner)
            owners[id(ticket)] = owner
    served = [0] * len(sizes)
    total = min(sum(pages) for pages in sizes)
    while max(served) < total - block:  # while all of them still wait
        request = drive.begin()
        if request is None:
            drive.finish()
            continue
        for part in request.parts:
            served[owners[id(part.ticket)]] += (part.end - part.begin) // PAGE
        assert max(served) - min(served) <= block
    drive.run()
    queue.close()


def test_an_owner_that_comes_late_saves_nothing_up() -> None:
    drive, queue = opened(1, 1)
    queue.submit([read_of(0, 1000)], SURE, Ended(), owner="old")
    for _ in range(400):
        drive.begin()
        drive.finish()
    for _ in range(3):  # it ends, and comes again
        drive.order.clear()
        late = queue.submit([read_of(0, 50)], SURE, Ended(), owner="late")
        for number in range(1, 100):
            drive.begin()
            drive.finish()
            share = sum(request.parts[0].ticket is late for request in drive.order)
            assert abs(share - number / 2) <= 1
    queue.close()


@pytest.mark.parametrize("others", [1, 3])
def test_an_owner_that_asks_for_one_thing_at_a_time_gets_no_more_than_its_share(
    others: int,
) -> None:
    drive, queue = opened(1, 4)
    for owner in range(others):
        queue.submit([read_of(0, 1000)], SURE, Ended(), owner=owner)
    pages = {"one": 0, "all": 0}
    one = None
    for _ in range(200):
        if one is None or one.ended:
            one = queue.submit([read_of(0, 4)], SURE, Ended(), owner="one")
        request = drive.begin()
        assert request is not None
        drive.finish()
        count = request.nbytes // PAGE
        pages["all"] += count
        pages["one"] += count if request.parts[0].ticket is one else 0
    assert pages["one"] <= pages["all"] / (others + 1) + 8
    queue.close()


@settings(max_examples=60, deadline=None)
@given(needs=st.integers(2, 4), blocks=st.integers(1, 60), kind=st.sampled_from([SURE, GUESS]))
def test_what_has_waited_long_moves_on_and_costs_the_urgent_a_ninth(
    needs: int, blocks: int, kind: Priority
) -> None:
    """Above it, somebody always waits: for a sure read those that need, for a guess sure ones."""
    above = Priority(kind - 1)
    drive, queue = opened(4, 1)
    done = Ended()
    old = queue.submit([read_of(0, blocks)], kind, done)
    urgent = [queue.submit([read_of(0, 3000)], above, Ended(), owner=n) for n in range(needs)]
    drive.order.clear()

    def serve(requests: int) -> int:
        before = len(drive.order)
        while len(drive.order) - before < requests:
            if drive.begin() is None:
                drive.finish()
        return sum(request.parts[0].ticket is old for request in drive.order[before:])

    assert serve(50) == 0, "young, it waits"
    drive.time_s = AGE_S[kind]
    shares = needs / AGED_SHARE + 1
    count = 450
    assert min(blocks, count / shares - 2) <= serve(count) <= count / shares + 1
    assert all(ticket.waiting for ticket in urgent)
    queue.cancel(old)
    for ticket in urgent:
        queue.cancel(ticket)
    drive.run()
    queue.close()


def test_a_guess_never_goes_before_a_need_however_old_it_is() -> None:
    drive, queue = opened(4, 1)
    guess = queue.submit([read_of(0, 5)], GUESS, Ended())
    need = queue.submit([read_of(0, 500)], NEED, Ended())
    while need.waiting:
        drive.time_s += 10.0
        if drive.begin() is None:
            drive.finish()
        assert all(request.parts[0].ticket is not guess for request in drive.flying)
    drive.run()
    assert guess.ended
    queue.close()


def test_an_urgent_read_waits_for_no_more_than_the_bound() -> None:
    for kind, share in ((SURE, 1.0), (GUESS, 0.5)):
        drive, queue = opened(8, 4)
        queue.submit([read_of(0, 1000)], kind, Ended())
        while drive.begin() is not None:
            pass
        flying = sum(request.nbytes for request in drive.flying)
        assert flying == share * queue.bound_bytes
        need = queue.submit([read_of(0, 4)], NEED, Ended())
        while need.waiting:
            drive.finish()
            drive.begin()
        first = next(n for n, r in enumerate(drive.order) if r.parts[0].ticket is need)
        assert sum(request.nbytes for request in drive.order[:first]) <= queue.bound_bytes
        queue.close()


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), min_size=1, max_size=12),
    tickets=st.integers(1, 4),
    block=st.sampled_from([1, 8, 64, 512]),
)
def test_neighbours_are_one_request_and_gaps_go_nowhere(
    steps: list[tuple[int, int]], tickets: int, block: int
) -> None:
    drive, queue = opened(1, block)
    reads, at = [], 0
    for gap, pages in steps:
        reads.append(read_of(at + gap, pages))
        at += gap + pages
    ends = []
    queue.submit([read_of(0, 1, Path("other"))], NEED, Ended())
    drive.begin()
    for n in range(tickets):
        if part := reads[n * len(reads) // tickets : (n + 1) * len(reads) // tickets]:
            ends.append(Ended())
            queue.submit(part, NEED, ends[-1])
    drive.run()
    assert all(done.calls == [None] for done in ends)
    assert all(is_right(read) for read in reads)
    requests = drive.order[1:]
    for before, after in pairwise(requests):
        gap = after.offset - before.offset - before.nbytes
        assert gap >= GAP_BYTES or before.nbytes + gap >= block * PAGE, "could have been one"
    counters = queue.counters()
    assert counters.requests == len(drive.order)
    assert counters.useful_bytes == PAGE + sum(len(read.view) for read in reads)
    assert counters.read_bytes == sum(request.nbytes for request in drive.order)
    queue.close()


def test_reads_of_different_owners_are_not_one_request() -> None:
    drive, queue = opened(1, 8)
    for owner in range(3):
        queue.submit([read_of(owner, 1)], NEED, Ended(), owner=owner)
    drive.run()
    assert [request.nbytes for request in drive.order] == [PAGE] * 3
    queue.close()


def test_a_bad_page_in_a_gap_harms_nobody_and_in_a_neighbour_only_that_one() -> None:
    for bad, harmed in ((2, []), (4, [1]), (0, [0])):
        drive, queue = opened(2, 64)
        drive.bad.add((FILE, bad))
        reads = [read_of(0, 2), read_of(3, 2), read_of(5, 2)]
        ends = [Ended() for _ in reads]
        queue.submit([read_of(0, 1, Path("a"))], NEED, Ended())
        queue.submit([read_of(0, 1, Path("b"))], NEED, Ended())
        for read, done in zip(reads, ends, strict=True):
            queue.submit([read], NEED, done)
        drive.run()
        for n, (read, done) in enumerate(zip(reads, ends, strict=True)):
            if n in harmed:
                assert isinstance(done.calls[0], DiskReadError)
            else:
                assert done.calls == [None] and is_right(read)
        queue.close()


def test_what_is_read_again_is_as_urgent_as_its_ticket_has_become() -> None:
    drive, queue = opened(1, 64)
    drive.bad.add((FILE, 0))
    tickets = [queue.submit([read_of(n, 1)], GUESS, Ended()) for n in range(3)]
    drive.begin()
    drive.finish()  # as one; each is to be read again
    sure = queue.submit([read_of(50, 1, Path("other"))], SURE, Ended())
    queue.promote(tickets[2], NEED)
    drive.order.clear()
    drive.run()
    order = [request.parts[0].ticket for request in drive.order]
    assert order == [tickets[2], sure, tickets[0], tickets[1]]
    queue.close()


def test_a_failed_ticket_reads_no_more() -> None:
    drive, queue = opened(1, 1)
    drive.bad.add((FILE, 2))
    done = Ended()
    queue.submit([read_of(0, 100)], SURE, done)
    drive.run()
    assert len(drive.order) == 3 and isinstance(done.calls[0], DiskReadError)
    assert queue.counters().by_priority[SURE].failed == 1
    queue.close()


def test_what_is_useful_is_told_by_who_reads() -> None:
    drive, queue = opened(1, 2)
    padded = read_of(0, 5)
    with_end = DiskRead(FILE, 0, padded.view, 5 * PAGE - 100)
    told = DiskRead(FILE, 0, padded.view, 5 * PAGE - 100, useful_bytes=3 * PAGE)
    for read, useful in ((with_end, 5 * PAGE - 100), (told, 3 * PAGE)):
        before = queue.counters().useful_bytes
        queue.submit([read], NEED, Ended())
        drive.run()
        assert queue.counters().useful_bytes - before == useful
    queue.close()


def test_time_in_the_queue_and_at_the_drive_is_counted() -> None:
    drive, queue = opened(1, 1)
    queue.submit([read_of(0, 2)], SURE, Ended())
    drive.time_s = 2.0
    drive.begin()
    drive.time_s = 5.0
    assert queue.counters().busy_s == 3.0
    drive.finish()
    drive.time_s = 6.0
    drive.begin()
    drive.time_s = 7.0
    drive.finish()
    counters = queue.counters()
    assert counters.busy_s == 4.0
    assert counters.by_priority[SURE].queued_s == 2.0 + 6.0
    queue.close()


def test_cancelling_drops_what_has_not_begun() -> None:
    drive, queue = opened(2, 1)
    done = Ended()
    ticket = queue.submit([read_of(0, 5)], GUESS, done)
    drive.begin()
    assert queue.cancel(ticket) and not done.calls, "the part that is being read has to end"
    assert not queue.cancel(ticket)
    drive.finish()
    assert isinstance(done.calls[0], Cancelled)
    whole = Ended()
    assert queue.cancel(queue.submit([read_of(0, 5)], GUESS, whole))
    assert isinstance(whole.calls[0], Cancelled), "nothing had begun: told at once"
    begun = queue.submit([read_of(0, 1)], NEED, Ended())
    drive.begin()
    assert not queue.cancel(begun)
    drive.run()
    assert len(drive.order) == 2
    assert queue.counters().by_priority[GUESS].cancelled == 2
    queue.close()


@pytest.mark.parametrize("flying", [0, 1, 2])
def test_closing_tells_everybody(flying: int) -> None:
    drive, queue = opened(2, 1)
    ends = [Ended() for _ in range(4)]
    for done in ends:
        queue.submit([read_of(0, 1)], NEED, done, owner=done)
    for _ in range(flying):
        drive.begin()
    queue.close()
    assert [done.calls[0] is None for done in ends] == [n < flying for n in range(4)]
    late = Ended()
    queue.submit([read_of(0, 1)], NEED, late)
    assert isinstance(late.calls[0], DiskReadError)
    queue.close()

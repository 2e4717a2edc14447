"""The ring against plain reads of the file: any size, depth and order, and what goes wrong."""

import errno
import logging
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base import extension, log
from hmt.base.errors import DiskReadError
from hmt.base.trace import Tracer
from hmt.contracts.store import Priority
from hmt.memory import DiskRead, PreadReader, ReadQueue
from hmt.memory.disk import uring as uring_module
from hmt.memory.disk.readers import OpenFiles
from hmt.memory.disk.uring import UringBackend, UringReader

PAGE = 4096
SIZE = 300 * PAGE + 777

if (reason := uring_module.unavailable()) is not None:
    pytest.skip(f"no io_uring here: {reason}", allow_module_level=True)

Ring = extension.find().Ring


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ring") / "data"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def opened(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    yield descriptor
    os.close(descriptor)


def memory(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def all_of(ring: Any, wanted: int) -> dict[int, int]:
    """Results of `wanted` reads by tag."""
    results: dict[int, int] = {}
    while len(results) < wanted:
        for tag, result in ring.wait():
            assert tag not in results
            results[tag] = result
    return results


READS = st.lists(
    st.tuples(st.integers(0, 310), st.lists(st.integers(1, 40), min_size=1, max_size=5)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(
    reads=READS,
    depth=st.integers(1, 9),
    direct=st.booleans(),
    files=st.booleans(),
    registered=st.booleans(),
)
def test_reads_bring_what_the_file_holds(
    file: Path,
    reads: list[tuple[int, list[int]]],
    depth: int,
    direct: bool,
    files: bool,
    registered: bool,
) -> None:
    whole = file.read_bytes()
    descriptor = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    ring = Ring(depth)
    if files:
        assert ring.add_file(descriptor)
    places = [memory(sum(pages) * PAGE) for _, pages in reads]
    if registered:
        for place in places:
            ring.add_memory(place)
    waiting, flying, results = list(enumerate(reads)), 0, {}
    while len(results) < len(reads):
        while waiting and flying < depth:
            tag, (first, pages) = waiting.pop(0)
            views, at = [], 0
            for count in pages:
                views.append(places[tag][at : at + count * PAGE])
                at += count * PAGE
            ring.read(tag, descriptor, first * PAGE, views, direct)
            flying += 1
        for tag, result in ring.wait():
            results[tag] = result
            flying -= 1
    for tag, (first, _) in enumerate(reads):
        expected = whole[first * PAGE :][: len(places[tag])]
        assert results[tag] == len(expected)
        assert bytes(places[tag][: len(expected)]) == expected
        assert not any(places[tag][len(expected) :])
    if registered:
        for place in places:
            ring.remove_memory(place)
    ring.remove_file(descriptor)
    os.close(descriptor)


def test_offsets_of_buffered_reads_may_be_odd(file: Path) -> None:
    dice = random.Random(1)
    whole = file.read_bytes()
    with file.open("rb") as plain:
        ring = Ring(4)
        for _ in range(50):
            at, count = dice.randrange(SIZE), dice.randrange(1, 9000)
            place = memory(count)
            ring.read(7, plain.fileno(), at, [place], False)
            expected = whole[at : at + count]
            assert all_of(ring, 1) == {7: len(expected)}
            assert bytes(place[: len(expected)]) == expected


def test_short_reads_are_continued() -> None:
    """A pipe brings what is there: here in pieces that fit no view."""
    ring = Ring(2)
    read_end, write_end = os.pipe()
    data = os.urandom(5000)
    places = [memory(n) for n in (100, 1900, 2500, 500)]
    ring.read(1, read_end, 0, places, False)
    for begin in range(0, len(data), 700):
        os.write(write_end, data[begin : begin + 700])
    assert all_of(ring, 1) == {1: 5000}
    assert b"".join(bytes(place) for place in places) == data
    ring.read(2, read_end, 0, places, False)
    os.write(write_end, b"the end")
    os.close(write_end)
    assert all_of(ring, 1) == {2: 7}
    os.close(read_end)


def test_what_cannot_be_read_ends_with_its_number(file: Path, opened: int) -> None:
    ring = Ring(8)
    place = memory(PAGE)
    closed = os.open(file, os.O_RDONLY)
    os.close(closed)
    write_only = os.open(file, os.O_WRONLY)
    folder = os.open(file.parent, os.O_RDONLY)
    cases = {
        -1: errno.EBADF,
        closed: errno.EBADF,
        write_only: errno.EBADF,
        folder: errno.EISDIR,
    }
    for descriptor, number in cases.items():
        ring.read(3, descriptor, 0, [place], False)
        assert all_of(ring, 1) == {3: -number}
    ring.read(4, opened, 1, [place], True)  # O_DIRECT at an odd offset
    assert all_of(ring, 1) == {4: -errno.EINVAL}
    ring.read(5, opened, 0, [place], True)
    assert all_of(ring, 1) == {5: PAGE}
    os.close(write_only)
    os.close(folder)


def test_a_removed_file_is_another_when_its_number_comes_back(tmp_path: Path) -> None:
    ring, place = Ring(2), memory(PAGE)
    for content in (b"a", b"b", b"c"):
        path = tmp_path / content.decode()
        path.write_bytes(content * PAGE)
        descriptor = os.open(path, os.O_RDONLY)
        assert ring.add_file(descriptor)
        ring.read(1, descriptor, 0, [place], False)
        assert all_of(ring, 1) == {1: PAGE}
        assert bytes(place) == content * PAGE
        ring.remove_file(descriptor)
        os.close(descriptor)


def test_more_files_and_memory_than_the_tables_hold(file: Path, opened: int) -> None:
    ring = Ring(1)
    assert sum(ring.add_file(opened) for _ in range(300)) == 256
    place = memory(PAGE)
    assert ring.add_memory(place) and not ring.add_memory(place), "once is enough"
    ring.remove_memory(place)
    ring.remove_memory(place)
    assert ring.add_memory(place)
    ring.read(1, opened, 0, [place], True)
    assert all_of(ring, 1) == {1: PAGE}
    assert bytes(place) == file.read_bytes()[:PAGE]


def test_memory_in_pieces_is_read_into_across_their_borders(file: Path, opened: int) -> None:
    ring = Ring(1)
    place = memory(40 * PAGE)
    assert ring.add_memory(place, 16 * PAGE)
    assert not ring.add_memory(place[:PAGE]) and not ring.add_memory(place[30 * PAGE :])
    for first, pages in ((0, 40), (0, 16), (15, 2), (16, 16), (39, 1)):
        part = place[first * PAGE : (first + pages) * PAGE]
        ring.read(1, opened, 50 * PAGE, [part], True)
        assert all_of(ring, 1) == {1: pages * PAGE}
        assert bytes(part) == file.read_bytes()[50 * PAGE : (50 + pages) * PAGE]
    ring.remove_memory(place)
    assert ring.add_memory(place)


def test_more_pieces_than_there_is_room_for_leave_none() -> None:
    ring = Ring(1)
    assert not ring.add_memory(memory(5000 * PAGE), PAGE)
    assert ring.add_memory(memory(1000 * PAGE), PAGE)


def test_memory_that_may_not_be_locked_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_warned", set())
    reader = FaultyUring()
    queue = ReadQueue(reader, Tracer(), depth=2)
    monkeypatch.setattr(reader.ring, "add_memory", lambda memory: False, raising=False)
    with caplog.at_level(logging.WARNING, logger="hmt"):
        assert not queue.register(memory(PAGE)) and not queue.register(memory(PAGE))
    assert len(caplog.records) == 1 and "ulimit" in caplog.text
    queue.close()
    threads = ReadQueue(PreadReader(), Tracer(), depth=2)
    assert not threads.register(memory(PAGE))
    threads.unregister(memory(PAGE))
    threads.close()


def test_a_full_ring_takes_no_more(opened: int) -> None:
    ring = Ring(2)
    places = [memory(PAGE) for _ in range(3)]
    for tag in range(2):
        ring.read(tag, opened, 0, [places[tag]], True)
    with pytest.raises(RuntimeError, match="full"):
        ring.read(2, opened, 0, [places[2]], True)
    assert all_of(ring, 2) == {0: PAGE, 1: PAGE}


def test_a_ring_that_goes_waits_for_its_reads(file: Path, opened: int) -> None:
    place = memory(200 * PAGE)
    ring = Ring(1)
    ring.read(1, opened, 0, [place], True)
    del ring
    assert bytes(place) == file.read_bytes()[: 200 * PAGE]


def test_memory_must_be_writable(opened: int) -> None:
    ring = Ring(1)
    with pytest.raises(BufferError):
        ring.read(1, opened, 0, [bytes(PAGE)], True)
    assert ring.in_flight == 0


def test_waking_ends_a_wait_from_any_thread() -> None:
    ring = Ring(1)
    ring.wake()
    ring.wake()
    assert ring.wait() == []
    for _ in range(20):
        thread = threading.Timer(0.001, ring.wake)
        thread.start()
        assert ring.wait() == []  # and lets other threads of Python run meanwhile
        thread.join()


class FaultyRing:
    """A real ring whose calls and results can be made to fail."""

    def __init__(self) -> None:
        self.inner = Ring(8)
        self.results: dict[int, int] = {}  # by number of the completion
        self.refuses = False
        self.broken = False
        self.seen = 0

    def read(self, *arguments: Any) -> None:
        if self.refuses:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        self.inner.read(*arguments)

    def wait(self) -> list[tuple[int, int]]:
        completions = self.inner.wait()
        if self.broken:
            raise OSError(errno.EBADF, "Bad file descriptor")
        told = []
        for tag, result in completions:
            self.seen += 1
            told.append((tag, self.results.get(self.seen, result)))
        return told

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FaultyUring(UringReader):
    def __init__(self) -> None:
        super().__init__()
        self.ring = FaultyRing()

    def issuer(self, depth: int) -> UringBackend:
        return UringBackend(OpenFiles(direct=True), self.ring, 8)


@pytest.fixture
def faulty() -> FaultyUring:
    return FaultyUring()


def read_of(file: Path, first: int, pages: int) -> DiskRead:
    return DiskRead(file, first * PAGE, memory(pages * PAGE), (first + pages) * PAGE)


def assert_reads(queue: ReadQueue, file: Path, first: int, pages: int) -> None:
    read = read_of(file, first, pages)
    queue.read([read])
    assert bytes(read.view) == file.read_bytes()[first * PAGE : (first + pages) * PAGE]


def test_a_failed_completion_fails_one_read(file: Path, faulty: FaultyUring) -> None:
    queue = ReadQueue(faulty, Tracer(), depth=2, chunk_bytes=4 * PAGE)
    faulty.ring.results = {1: -errno.EIO, 3: PAGE}
    with pytest.raises(DiskReadError, match="Input/output error; check the disk"):
        queue.read([read_of(file, 0, 2)])
    assert_reads(queue, file, 5, 2)
    with pytest.raises(DiskReadError, match="ended 4096 bytes early"):
        queue.read([read_of(file, 0, 2)])
    assert_reads(queue, file, 5, 20)
    queue.close()


def test_a_read_that_cannot_begin_fails_alone(file: Path, faulty: FaultyUring) -> None:
    queue = ReadQueue(faulty, Tracer(), depth=2, chunk_bytes=4 * PAGE)
    for _ in range(10):  # more than there are places in the ring
        with pytest.raises(DiskReadError, match="cannot open"):
            queue.read([read_of(file.parent / "nothing", 0, 2)])
    faulty.ring.refuses = True
    with pytest.raises(DiskReadError, match="Cannot allocate"):
        queue.read([read_of(file, 0, 2)])
    faulty.ring.refuses = False
    assert_reads(queue, file, 5, 20)
    queue.close()


def test_a_ring_that_breaks_fails_every_read_and_hangs_none(
    file: Path, faulty: FaultyUring
) -> None:
    queue = ReadQueue(faulty, Tracer(), depth=2, chunk_bytes=4 * PAGE)
    assert_reads(queue, file, 5, 20)
    faulty.ring.broken = True
    for _ in range(3):
        with pytest.raises(DiskReadError, match="Bad file descriptor"):
            queue.read([read_of(file, 0, 20)])
    queue.close()


def test_registered_memory_is_read_into_until_it_is_given_back(file: Path) -> None:
    queue = ReadQueue(UringReader(), Tracer(), depth=2, chunk_bytes=4 * PAGE)
    place = memory(16 * PAGE)
    taken = queue.register(place)
    for first in (0, 100):
        queue.read([DiskRead(file, first * PAGE, place, (first + 16) * PAGE)])
        assert bytes(place) == file.read_bytes()[first * PAGE : (first + 16) * PAGE]
    if taken:
        queue.unregister(place)
    queue.read([DiskRead(file, 7 * PAGE, place, 23 * PAGE)])
    assert bytes(place) == file.read_bytes()[7 * PAGE : 23 * PAGE]
    queue.close()
    queue.unregister(place)  # a pool may outlive the queue


def test_small_reads_run_deeper_than_large_ones(file: Path) -> None:
    """Sixteen pages in flight are two large reads, or sixteen of a page."""

    class Slow(FaultyRing):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Ring(64)
            self.deepest = 0
            self.gate = threading.Event()

        def wait(self) -> list[tuple[int, int]]:
            if self.inner.in_flight:
                self.gate.wait(20)
            self.deepest = max(self.deepest, self.inner.in_flight)
            return super().wait()

    for pages, deepest in ((1, 9), (8, 2)):
        reader = FaultyUring()
        ring = reader.ring = Slow()
        reader.issuer = lambda depth, ring=ring: UringBackend(OpenFiles(direct=True), ring, 64)
        queue = ReadQueue(reader, Tracer(), depth=2, chunk_bytes=8 * PAGE)
        ends = [threading.Event() for _ in range(16)]
        for n, end in enumerate(ends):
            read = read_of(file, 10 * n, pages)
            queue.submit([read], Priority.DEMAND, lambda error, end=end: end.set(), owner=n)
        ring.gate.set()
        assert all(end.wait(20) for end in ends)
        assert ring.deepest <= deepest
        queue.close()

"""Readers and the transfer queue: right bytes, right order, and errors that reach who waits."""

import errno
import logging
import mmap
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base import extension, log
from hmt.base.errors import ConfigError, DiskReadError, HMTError
from hmt.base.trace import Tracer
from hmt.contracts.plan import Tier
from hmt.contracts.store import Priority
from hmt.memory import (
    READERS,
    DiskRead,
    HostPool,
    Ledger,
    PreadReader,
    ReadGroup,
    ReadQueue,
    open_reader,
)

PAGE = 4096


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("disk") / "data"
    path.write_bytes(os.urandom(100 * PAGE + 123))
    return path


@pytest.fixture
def pool() -> HostPool:
    ledger = Ledger({Tier.HOST: 1 << 24})
    return HostPool(ledger.open(Tier.HOST, "test", 1 << 24))


class Waiter:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: HMTError | None = None

    def __call__(self, error: HMTError | None) -> None:
        assert not self.ended.is_set(), "called twice"
        self.error = error
        self.ended.set()

    def wait(self) -> HMTError | None:
        assert self.ended.wait(20)
        return self.error


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=25, deadline=None)
@given(first=st.integers(0, 100), pages=st.integers(1, 110), chunk=st.integers(1, 9))
def test_every_reader_brings_the_bytes(
    file: Path, kind: str, first: int, pages: int, chunk: int
) -> None:
    whole = file.read_bytes()
    expected = whole[first * PAGE : (first + pages) * PAGE]
    ledger = Ledger({Tier.HOST: 1 << 24})
    buffer = HostPool(ledger.open(Tier.HOST, "test", 1 << 24)).allocate(pages * PAGE)
    queue = ReadQueue(open_reader(kind), Tracer(), depth=3, chunk_bytes=chunk * PAGE)
    done = Waiter()
    read = DiskRead(file, first * PAGE, buffer.view, first * PAGE + len(expected))
    queue.submit([read], Priority.DEMAND, done)
    assert done.wait() is None
    assert bytes(buffer.view[: len(expected)]) == expected
    queue.close()


def test_a_range_behind_the_end_is_an_error(file: Path, pool: HostPool) -> None:
    queue = ReadQueue(open_reader("direct"), Tracer(), depth=2, chunk_bytes=PAGE)
    done = Waiter()
    useful_end = 100 * PAGE + 124
    queue.submit(
        [DiskRead(file, 99 * PAGE, pool.allocate(2 * PAGE).view, useful_end)], Priority.DEMAND, done
    )
    error = done.wait()
    assert isinstance(error, DiskReadError) and "ended 1 bytes early" in str(error)
    queue.close()


def test_a_missing_file_is_an_error(tmp_path: Path, pool: HostPool) -> None:
    queue = ReadQueue(open_reader("direct"), Tracer(), depth=1)
    done = Waiter()
    queue.submit(
        [DiskRead(tmp_path / "no", 0, pool.allocate(PAGE).view, PAGE)], Priority.DEMAND, done
    )
    assert isinstance(done.wait(), DiskReadError)
    queue.close()


def test_an_unknown_reader_is_refused() -> None:
    with pytest.raises(ConfigError, match="io_uring, direct, buffered, mmap"):
        open_reader("carrier pigeon")


class GatedReader:
    """Records the order of reads; holds all of them until the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.began = threading.Semaphore(0)
        self.order: list[int] = []

    def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        self.began.release()
        assert self.gate.wait(20)
        self.order.append(offset // PAGE)
        return len(view)

    def close(self) -> None:
        pass


def test_urgent_reads_go_first_and_promotion_works(pool: HostPool) -> None:
    reader = GatedReader()
    queue = ReadQueue(reader, Tracer(), depth=1, chunk_bytes=PAGE)

    def submit(page: int, priority: Priority) -> tuple[Waiter, ReadGroup]:
        done = Waiter()
        read = DiskRead(Path("f"), page * PAGE, pool.allocate(PAGE).view, 0)
        return done, queue.submit([read], priority, done)

    first = submit(0, Priority.SPECULATIVE)  # the only worker takes it and waits at the gate
    assert reader.began.acquire(timeout=20)
    guess, _ = submit(1, Priority.SPECULATIVE)
    sure, _ = submit(2, Priority.PREFETCH)
    promoted, ticket = submit(3, Priority.SPECULATIVE)
    need, _ = submit(4, Priority.DEMAND)
    queue.promote(ticket, Priority.DEMAND)
    reader.gate.set()
    for done in (first[0], guess, sure, promoted, need):
        assert done.wait() is None
    assert reader.order == [0, 4, 3, 2, 1]
    queue.close()


def test_close_ends_what_has_not_begun(pool: HostPool) -> None:
    reader = GatedReader()
    queue = ReadQueue(reader, Tracer(), depth=1, chunk_bytes=PAGE)
    waiters = []
    for page in range(4):
        done = Waiter()
        queue.submit(
            [DiskRead(Path("f"), page * PAGE, pool.allocate(PAGE).view, 0)],
            Priority.PREFETCH,
            done,
            owner=page,
        )
        waiters.append(done)
    assert reader.began.acquire(timeout=20)
    threading.Timer(0.05, reader.gate.set).start()
    queue.close()
    assert waiters[0].wait() is None
    assert all(isinstance(done.wait(), DiskReadError) for done in waiters[1:])


def test_a_reader_that_raises_anything_is_survived(pool: HostPool) -> None:
    class Broken(GatedReader):
        def read_into(self, path: Path, offset: int, view: memoryview) -> int:
            raise ValueError("surprise")

    queue = ReadQueue(Broken(), Tracer(), depth=1)
    for _ in range(3):
        done = Waiter()
        queue.submit([DiskRead(Path("f"), 0, pool.allocate(PAGE).view, 0)], Priority.DEMAND, done)
        assert "surprise" in str(done.wait())
    queue.close()


@pytest.mark.parametrize("kind", [*READERS, "one by one"])
@pytest.mark.parametrize("end", [100, 101, 102])
def test_several_views_are_filled_by_one_request(
    file: Path, pool: HostPool, kind: str, end: int
) -> None:
    """Neighbouring reads, a gap among them, up to the end of the file and past it."""

    class OneByOne:
        inner = PreadReader()

        def read_into(self, path: Path, offset: int, view: memoryview) -> int:
            return self.inner.read_into(path, offset, view)

        def close(self) -> None:
            self.inner.close()

    whole = file.read_bytes()
    reader = OneByOne() if kind == "one by one" else open_reader(kind)
    tracer = Tracer()
    queue = ReadQueue(reader, tracer, depth=1, chunk_bytes=1 << 20)
    ranges = [(90, 93), (93, 94), (97, end)]
    reads = [
        DiskRead(file, a * PAGE, pool.allocate((b - a) * PAGE).view, min(b * PAGE, len(whole)))
        for a, b in ranges
    ]
    queue.read(reads)
    for read in reads:
        expected = whole[read.offset : read.end]
        assert bytes(read.view[: len(expected)]) == expected
    assert tracer.total("read", "disk").count == 1
    assert tracer.total("read", "disk").nbytes == min(end * PAGE, len(whole)) - 90 * PAGE
    queue.close()


@pytest.mark.parametrize("kind", READERS)
def test_files_that_refuse_o_direct_are_read_through_the_page_cache(
    file: Path, pool: HostPool, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(log, "_warned", set())
    real = os.open

    def refuse(path: Path, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    queue = ReadQueue(open_reader(kind), Tracer(), depth=2, chunk_bytes=3 * PAGE)
    buffer = pool.allocate(101 * PAGE)
    size = file.stat().st_size
    with caplog.at_level(logging.WARNING, logger="hmt"):
        for _ in range(2):
            queue.read([DiskRead(file, 0, buffer.view, size)])
    assert bytes(buffer.view[:size]) == file.read_bytes()
    said = [record for record in caplog.records if "refuses O_DIRECT" in record.message]
    assert len(said) == (kind in ("direct", "io_uring"))
    queue.close()


@pytest.mark.parametrize("reason", ["import", errno.ENOSYS, errno.EPERM, errno.ENOMEM, errno.EIO])
def test_without_io_uring_threads_read_and_it_is_said_once(
    reason: int | str, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def ring(reads: int) -> None:
        assert isinstance(reason, int)
        raise OSError(reason, os.strerror(reason))

    def find() -> SimpleNamespace:
        if reason == "import":
            raise ImportError("no such file")
        return SimpleNamespace(Ring=ring)

    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setattr(extension, "find", find)
    with caplog.at_level(logging.WARNING, logger="hmt"):
        readers = [open_reader("io_uring") for _ in range(2)]
    assert len(caplog.records) == 1 and "io_uring cannot be used" in caplog.text
    assert {"import": "does not load", errno.EPERM: "seccomp"}.get(reason, "") in caplog.text
    assert all(isinstance(reader, PreadReader) for reader in readers)
    view = memoryview(mmap.mmap(-1, PAGE))
    assert readers[0].read_into(file, PAGE, view) == PAGE
    assert bytes(view) == file.read_bytes()[PAGE : 2 * PAGE]
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("kind", READERS)
def test_single_reads_need_no_queue(file: Path, kind: str) -> None:
    reader = open_reader(kind)
    view = memoryview(mmap.mmap(-1, 2 * PAGE))
    assert reader.read_into(file, 100 * PAGE, view) == 123
    assert bytes(view[:123]) == file.read_bytes()[100 * PAGE :]
    reader.close()


@pytest.mark.parametrize("kind", READERS)
def test_every_callback_runs_on_a_thread_that_was_prepared(
    file: Path, pool: HostPool, kind: str
) -> None:
    prepared: set[int] = set()
    queue = ReadQueue(
        open_reader(kind),
        Tracer(),
        depth=2,
        worker_starts=lambda: prepared.add(threading.get_ident()),
    )
    for light in (True, False) * 5:
        seen: list[int] = []
        ended = threading.Event()

        def done(error: HMTError | None, seen: list[int] = seen, ended: Any = ended) -> None:
            seen.append(threading.get_ident())
            ended.set()

        read = DiskRead(file, 0, pool.allocate(PAGE).view, PAGE)
        queue.submit([read], Priority.DEMAND, done, light=light)
        assert ended.wait(20) and set(seen) <= prepared
    queue.close()

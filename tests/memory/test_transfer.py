"""Readers and the transfer queue: right bytes, right order, and errors that reach who waits."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import ConfigError, DiskReadError, HMTError
from hmt.base.trace import Tracer
from hmt.contracts.plan import Tier
from hmt.contracts.store import Priority
from hmt.memory import READERS, DiskRead, HostPool, Ledger, TransferQueue, open_reader

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
    queue = TransferQueue(open_reader(kind), Tracer(), depth=3, chunk_bytes=chunk * PAGE)
    done = Waiter()
    read = DiskRead(file, first * PAGE, buffer.view, first * PAGE + len(expected))
    queue.submit([read], Priority.NEED, done)
    assert done.wait() is None
    assert bytes(buffer.view[: len(expected)]) == expected
    queue.close()


def test_a_range_behind_the_end_is_an_error(file: Path, pool: HostPool) -> None:
    queue = TransferQueue(open_reader("direct"), Tracer(), depth=2, chunk_bytes=PAGE)
    done = Waiter()
    useful_end = 100 * PAGE + 124
    queue.submit(
        [DiskRead(file, 99 * PAGE, pool.allocate(2 * PAGE).view, useful_end)], Priority.NEED, done
    )
    error = done.wait()
    assert isinstance(error, DiskReadError) and "ended 1 bytes early" in str(error)
    queue.close()


def test_a_missing_file_is_an_error(tmp_path: Path, pool: HostPool) -> None:
    queue = TransferQueue(open_reader("direct"), Tracer(), depth=1)
    done = Waiter()
    queue.submit(
        [DiskRead(tmp_path / "no", 0, pool.allocate(PAGE).view, PAGE)], Priority.NEED, done
    )
    assert isinstance(done.wait(), DiskReadError)
    queue.close()


def test_an_unknown_reader_is_refused() -> None:
    with pytest.raises(ConfigError, match="direct, buffered, mmap"):
        open_reader("carrier pigeon")


class GatedReader:
    """Records the order of reads; holds all of them until the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.order: list[int] = []

    def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        assert self.gate.wait(20)
        self.order.append(offset // PAGE)
        return len(view)

    def close(self) -> None:
        pass


def test_urgent_reads_go_first_and_promotion_works(pool: HostPool) -> None:
    reader = GatedReader()
    queue = TransferQueue(reader, Tracer(), depth=1, chunk_bytes=PAGE)

    def submit(page: int, priority: Priority) -> tuple[Waiter, object]:
        done = Waiter()
        read = DiskRead(Path("f"), page * PAGE, pool.allocate(PAGE).view, 0)
        return done, queue.submit([read], priority, done)

    first = submit(0, Priority.GUESS)  # the only worker takes it and waits at the gate
    while queue._heap:
        pass
    guess, _ = submit(1, Priority.GUESS)
    sure, _ = submit(2, Priority.SURE)
    promoted, ticket = submit(3, Priority.GUESS)
    need, _ = submit(4, Priority.NEED)
    queue.promote(ticket, Priority.NEED)  # type: ignore[arg-type]
    reader.gate.set()
    for done in (first[0], guess, sure, promoted, need):
        assert done.wait() is None
    assert reader.order == [0, 4, 3, 2, 1]
    queue.close()


def test_close_ends_what_has_not_begun(pool: HostPool) -> None:
    reader = GatedReader()
    queue = TransferQueue(reader, Tracer(), depth=1, chunk_bytes=PAGE)
    waiters = []
    for page in range(4):
        done = Waiter()
        queue.submit(
            [DiskRead(Path("f"), page * PAGE, pool.allocate(PAGE).view, 0)], Priority.SURE, done
        )
        waiters.append(done)
    while len(queue._heap) == 4:
        pass
    threading.Timer(0.05, reader.gate.set).start()
    queue.close()
    assert waiters[0].wait() is None
    assert all(isinstance(done.wait(), DiskReadError) for done in waiters[1:])


def test_a_reader_that_raises_anything_is_survived(pool: HostPool) -> None:
    class Broken(GatedReader):
        def read_into(self, path: Path, offset: int, view: memoryview) -> int:
            raise ValueError("surprise")

    queue = TransferQueue(Broken(), Tracer(), depth=1)
    for _ in range(3):
        done = Waiter()
        queue.submit([DiskRead(Path("f"), 0, pool.allocate(PAGE).view, 0)], Priority.NEED, done)
        assert "surprise" in str(done.wait())
    queue.close()

"""A disk moved by hand: no threads, a clock of its own, pages that cannot be read."""

from collections.abc import Callable
from pathlib import Path

from hmt.base.errors import DiskReadError, HMTError
from hmt.memory.disk.io_backends import ReadWork
from hmt.memory.disk.read_scheduler import IoRequest, ReadGroup

PAGE = 4096


def content(path: Path, page: int) -> bytes:
    """What a page of a file holds."""
    return (f"{path}:{page};".encode() * PAGE)[:PAGE]


class ManualReader:
    """Implements BackendReader; `begin` and `finish` do what an issuer's threads would do."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.bad: set[tuple[Path, int]] = set()  # pages that cannot be read
        self.flying: list[IoRequest] = []
        self.order: list[IoRequest] = []
        self.wakes = 0
        self.work: ReadWork

    def clock(self) -> float:
        return self.time_s

    def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        raise AssertionError("the issuer reads")

    def issuer(self, depth: int) -> "ManualReader":
        return self

    def start(self, work: ReadWork, thread_starts: Callable[[], None]) -> None:
        thread_starts()
        self.work = work

    def wake(self) -> None:
        self.wakes += 1

    def begin(self) -> IoRequest | None:
        """Take the next request, if one may begin."""
        request = self.work.take(wait=False)
        if request is not None:
            self.flying.append(request)
            self.order.append(request)
        return request

    def finish(self, index: int = 0, error: HMTError | None = None) -> None:
        """End the flying request `index`: with `error`, its bad page's, or its bytes."""
        request = self.flying.pop(index)
        for ticket in self.work.finish(request, error or self._read(request)):
            self.work.end(ticket)

    def run(self) -> None:
        """Serve until nothing waits or flies."""
        while self.begin() is not None or self.flying:
            if self.flying:
                self.finish()

    def join(self) -> None:
        while self.flying:
            self.finish()

    def close(self) -> None:
        pass

    def register(self, memory: memoryview) -> bool:
        return False

    def unregister(self, memory: memoryview) -> None:
        pass

    def _read(self, request: IoRequest) -> int | HMTError:
        first = request.offset // PAGE
        pages = [(request.path, first + n) for n in range(request.nbytes // PAGE)]
        assert sum(map(len, request.views)) == request.nbytes
        broken = [page for page in pages if page in self.bad]
        if broken:
            return DiskReadError(f"bad page {broken[0][1]}")
        data = b"".join(content(*page) for page in pages)
        at = 0
        for view in request.views:
            view[:] = data[at : at + len(view)]
            at += len(view)
        return at


class Ended:
    """What a ticket's `done` was told."""

    def __init__(self) -> None:
        self.calls: list[HMTError | None] = []
        self.ticket: ReadGroup | None = None

    def __call__(self, error: HMTError | None) -> None:
        self.calls.append(error)

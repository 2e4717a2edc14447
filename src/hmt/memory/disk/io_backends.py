"""Who asks the operating system for the queue's requests: threads, each with a blocking read.

The other issuer is `hmt.memory.disk.uring`, where one thread keeps many reads going.
"""

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from typing_extensions import override

from hmt.base.errors import DiskReadError, HMTError
from hmt.memory.disk.read_scheduler import IoRequest, ReadGroup
from hmt.memory.disk.readers import DiskReader, VectorReader


class ReadWork(Protocol):
    """What an issuer serves; see ReadQueue, which is one.  Thread-safe."""

    @property
    def closed(self) -> bool:
        """Whether nothing more will be taken."""
        ...

    def take(self, *, wait: bool) -> IoRequest | None:
        """What to read next."""
        ...

    def finish(self, request: IoRequest, got: int | HMTError) -> list[ReadGroup]:
        """Say what a request brought; the tickets that have ended."""
        ...

    def end(self, ticket: ReadGroup) -> None:
        """Tell a ticket's owner."""
        ...


class IoBackend(Protocol):
    """Serves one queue with threads of its own."""

    def start(self, work: ReadWork, thread_starts: Callable[[], None]) -> None:
        """Begin to serve; `thread_starts` is called on each thread that will end tickets."""
        ...

    def wake(self) -> None:
        """There may be more to take.  Called with the queue's lock held."""
        ...

    def join(self) -> None:
        """Wait until all that was taken from a closed queue has ended."""
        ...

    def register(self, memory: memoryview) -> bool:
        """See ReadQueue."""
        ...

    def unregister(self, memory: memoryview) -> None:
        """See ReadQueue."""
        ...


@runtime_checkable
class BackendReader(Protocol):
    """A DiskReader that brings its own issuer."""

    def issuer(self, depth: int) -> IoBackend:
        """One that keeps `depth` reads going, of whole blocks, and more smaller ones."""
        ...


def backend_of(reader: DiskReader, depth: int) -> IoBackend:
    """The reader's own issuer, or `depth` threads that call it."""
    if isinstance(reader, BackendReader):
        return reader.issuer(depth)
    return ThreadBackend(reader, depth)


class ThreadBackend(IoBackend):
    """`threads` threads that read, and end the tickets whose last read they did."""

    def __init__(self, reader: DiskReader, threads: int) -> None:
        self._reader = reader
        self._count = threads
        self._threads: list[threading.Thread] = []

    @override
    def start(self, work: ReadWork, thread_starts: Callable[[], None]) -> None:
        self._threads = start_threads(
            self._count, "hmt-disk", thread_starts, lambda: self._run(work)
        )

    def wake(self) -> None:
        """See Issuer.  Threads wait in `take`."""

    @override
    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def register(self, memory: memoryview) -> bool:
        """See Issuer.  There is nothing to register with."""
        return False

    @override
    def unregister(self, memory: memoryview) -> None:
        """Nothing to do."""

    def _run(self, work: ReadWork) -> None:
        while (request := work.take(wait=True)) is not None:
            for ticket in work.finish(request, self._read(request)):
                work.end(ticket)

    def _read(self, request: IoRequest) -> int | HMTError:
        try:
            if len(request.views) == 1:
                return self._reader.read_into(request.path, request.offset, request.views[0])
            if isinstance(self._reader, VectorReader):
                return self._reader.read_vector(request.path, request.offset, request.views)
            done = 0
            for view in request.views:
                got = self._reader.read_into(request.path, request.offset + done, view)
                done += got
                if got < len(view):
                    break
            return done
        except HMTError as error:
            return error
        except Exception as error:  # a thread must survive whatever a reader does
            return DiskReadError(f"reading {request.path} at {request.offset} failed: {error!r}")


def start_threads(
    count: int, name: str, starts: Callable[[], None], run: Callable[[], None]
) -> list[threading.Thread]:
    """Daemon threads that `run`; returns when `starts` has been called on each."""
    started = threading.Barrier(count + 1)

    def work() -> None:
        starts()
        started.wait()
        run()

    threads = [threading.Thread(target=work, name=f"{name}-{i}", daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    started.wait()
    return threads

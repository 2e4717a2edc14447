"""Jobs that run ahead on the disk workers, handed over in their order."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from typing_extensions import override

from hmt.base.errors import HMTError
from hmt.contracts.checkpoint import FileRange
from hmt.contracts.store import Priority
from hmt.memory import DiskRead, HostBuffer, ReadQueue

Finished = Callable[[HMTError | None], None]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory of one job: where its result comes to lie, and what it needs on the way."""

    slot: HostBuffer
    staging: HostBuffer | None = None


class Job(Protocol):
    """Something that fills a buffer."""

    def start(self, buffers: Buffers, queue: ReadQueue, finished: Finished) -> None:
        """Begin, without waiting.  `finished` is called once, on a disk worker."""
        ...


J = TypeVar("J", bound=Job)


@dataclass(slots=True)
class Result(Generic[J]):
    """A job that has ended.  Its buffers are used again when the next result is asked for."""

    job: J
    buffers: Buffers
    error: HMTError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def finish(self, error: HMTError | None) -> None:
        """The job's own report."""
        self.error = error
        self.ended.set()


def in_order(
    jobs: Iterable[J], buffers: Sequence[Buffers], queue: ReadQueue
) -> Generator[Result[J], None, None]:
    """Results of `jobs` in their order, while as many of the next ones run as there are `buffers`.

    Close it before the buffers are freed: that waits for what still runs.
    """
    free, running = deque(buffers), deque[Result[J]]()
    waiting = iter(jobs)
    try:
        while True:
            while free and (job := next(waiting, None)) is not None:
                result = Result(job, free.popleft())
                job.start(result.buffers, queue, result.finish)
                running.append(result)
            if not running:
                return
            running[0].ended.wait()
            result = running.popleft()
            yield result
            free.append(result.buffers)
    finally:
        for result in running:
            result.ended.wait()


@dataclass(frozen=True, slots=True)
class ExtentChunk(Job):
    """Reads a piece of an extent.

    owner   number of the extent among those that are read
    at      offset of the piece in its extent
    last    whether the extent ends with it
    """

    owner: int
    file: FileRange
    at: int
    last: bool

    @override
    def start(self, buffers: Buffers, queue: ReadQueue, finished: Finished) -> None:
        view = buffers.slot.view[: self.file.nbytes]
        end = self.file.offset + self.file.nbytes
        read = DiskRead(self.file.path, self.file.offset, view, end)
        queue.submit([read], Priority.PREFETCH, finished)


def extent_chunks(owner: int, extent: FileRange, piece_bytes: int) -> list[ExtentChunk]:
    """An extent in pieces of at most `piece_bytes`."""
    return [
        ExtentChunk(
            owner,
            FileRange(extent.path, extent.offset + at, min(piece_bytes, extent.nbytes - at)),
            at,
            at + piece_bytes >= extent.nbytes,
        )
        for at in range(0, extent.nbytes, piece_bytes)
    ]

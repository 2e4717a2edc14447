"""Reads through io_uring: one thread keeps the disk's queue full, and no thread waits per read.

The kernel's interface is in the extension (csrc/disk/ring.h).
"""

import errno
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from hmt.base import extension
from hmt.base.errors import DiskReadError, HMTError
from hmt.base.log import warn_once
from hmt.memory.disk.io_backends import BackendReader, IoBackend, ReadWork, start_threads
from hmt.memory.disk.read_scheduler import IoRequest, ReadGroup
from hmt.memory.disk.readers import OpenFiles, PreadReader, read_failed

_MOST_READS = 64  # at once; what limits large ones is the queue's bound on bytes
_MOST_ENDERS = 8

_REASONS = {
    errno.ENOSYS: "the kernel has none, or one from before Linux 5.5",
    errno.EPERM: "the system forbids it (kernel.io_uring_disabled, or a container's seccomp rules)",
    errno.ENOMEM: "too little memory may be locked (ulimit -l)",
}


def unavailable() -> str | None:
    """Why this process cannot use io_uring; None when it can."""
    try:
        extension.find().Ring(1)
    except ImportError as error:
        return f"the compiled extension does not load ({error})"
    except OSError as error:
        return _REASONS.get(error.errno or 0, str(error))
    return None


class UringReader(PreadReader, BackendReader):
    """Implements DiskReader and BackendReader; single reads are plain `preadv`."""

    @override
    def issuer(self, depth: int) -> IoBackend:
        capacity = max(depth, _MOST_READS)
        return UringBackend(self._files, extension.find().Ring(capacity), capacity)


class UringBackend(IoBackend):
    """One thread that submits and reaps, and a few that end tickets which take long."""

    def __init__(self, files: OpenFiles, ring: Any, capacity: int) -> None:
        """`ring` does what hmt._native.Ring does, with room for `capacity` reads at once."""
        self._files = files
        self._ring = ring
        self._idle = list(range(capacity))
        self._flying: dict[int, IoRequest] = {}
        self._registered: set[int] = set()  # descriptors
        self._broken: OSError | None = None
        self._to_end: queue.SimpleQueue[ReadGroup | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._enders: list[threading.Thread] = []

    @override
    def start(self, work: ReadWork, thread_starts: Callable[[], None]) -> None:
        enders = min(_MOST_ENDERS, len(os.sched_getaffinity(0)))
        self._enders = start_threads(enders, "hmt-loaded", thread_starts, lambda: self._end(work))
        self._threads = start_threads(1, "hmt-disk", thread_starts, lambda: self._run(work))

    @override
    def wake(self) -> None:
        self._ring.wake()

    @override
    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        for _ in self._enders:
            self._to_end.put(None)
        for thread in self._enders:
            thread.join()
        for descriptor in self._registered:
            self._ring.remove_file(descriptor)
        self._ring = None  # its memory and descriptors go now, not when somebody collects us

    @override
    def register(self, memory: memoryview) -> bool:
        taken = self._ring is not None and bool(self._ring.add_memory(memory))
        if not taken:
            warn_once(
                "registered memory",
                "memory cannot be registered with io_uring (ulimit -l says how much may be "
                "locked); reads work without, and take a little more time of the CPUs",
            )
        return taken

    @override
    def unregister(self, memory: memoryview) -> None:
        if self._ring is not None:
            self._ring.remove_memory(memory)

    def _run(self, work: ReadWork) -> None:
        ended: list[ReadGroup] = []
        while True:
            # The disk first: what has ended is told while the next reads run.
            while self._idle and (request := work.take(wait=False)) is not None:
                ended += self._begin(work, request)
            for ticket in ended:
                if ticket.light:
                    work.end(ticket)
                else:
                    self._to_end.put(ticket)
            if work.closed and not self._flying:
                return
            if self._broken is None:
                ended = self._reap(work)
            else:
                request = work.take(wait=True)
                ended = [] if request is None else self._begin(work, request)

    def _begin(self, work: ReadWork, request: IoRequest) -> list[ReadGroup]:
        """Start reading; the tickets that end because that was not possible."""
        tag = self._idle.pop()
        try:
            if self._broken is not None:
                raise self._broken
            descriptor, direct = self._files.descriptor(request.path)
            if descriptor not in self._registered and self._ring.add_file(descriptor):
                self._registered.add(descriptor)
            self._ring.read(tag, descriptor, request.offset, request.views, direct)
        except (HMTError, OSError, BufferError) as error:
            self._idle.append(tag)
            return work.finish(request, _as_error(request, error))
        self._flying[tag] = request
        return []

    def _reap(self, work: ReadWork) -> list[ReadGroup]:
        try:
            completions = self._ring.wait()
        except OSError as error:
            self._broken = error
            completions = [(tag, -(error.errno or errno.EIO)) for tag in self._flying]
        ended: list[ReadGroup] = []
        for tag, result in completions:
            request = self._flying.pop(tag)
            self._idle.append(tag)
            got = (
                _as_error(request, OSError(-result, os.strerror(-result))) if result < 0 else result
            )
            ended += work.finish(request, got)
        return ended

    def _end(self, work: ReadWork) -> None:
        while (ticket := self._to_end.get()) is not None:
            work.end(ticket)


def _as_error(request: IoRequest, error: Exception) -> HMTError:
    """What the owners of a request are told."""
    if isinstance(error, OSError):
        return read_failed(request.path, request.offset, request.nbytes, error)
    if isinstance(error, HMTError):
        return error
    return DiskReadError(f"reading {request.path} at {request.offset} failed: {error!r}")

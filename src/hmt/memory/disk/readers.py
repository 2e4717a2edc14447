"""Reading byte ranges of files: O_DIRECT, io_uring, and buffered, behind one interface.

Offsets, lengths and destinations are multiples of 4 KiB, which every local file system accepts for
O_DIRECT.  Only a range that reaches past the end of the file may come back short.

No reader touches a mapping of a file: one that becomes shorter meanwhile, or a disk that fails,
would be a SIGBUS, which ends the process.  Through a descriptor it is an error of one read.
"""

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from typing_extensions import override

from hmt.base.errors import DiskReadError, os_reason
from hmt.base.log import warn_once


class DiskReader(Protocol):
    """Reads aligned ranges of files into memory.  Thread-safe."""

    def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        """Fill `view` from `path` at `offset`; the bytes read, fewer only at the file's end.

        Raises DiskReadError when the disk fails or the file has become shorter.
        """
        ...

    def close(self) -> None:
        """Close all files."""
        ...


@runtime_checkable
class VectorReader(Protocol):
    """A DiskReader that fills several views with one call."""

    def read_vector(self, path: Path, offset: int, views: Sequence[memoryview]) -> int:
        """Like `read_into`, for `views` one after the other."""
        ...


class OpenFiles:
    """Descriptors by path, opened once and kept.  Thread-safe."""

    def __init__(self, *, direct: bool) -> None:
        """With `direct` files are opened with O_DIRECT, where they allow it."""
        self._flag = getattr(os, "O_DIRECT", 0) if direct else 0
        self._open: dict[Path, tuple[int, bool]] = {}
        self._lock = threading.Lock()

    def descriptor(self, path: Path) -> tuple[int, bool]:
        """The descriptor of `path`, and whether it is past the page cache.  DiskReadError."""
        with self._lock:
            if path not in self._open:
                self._open[path] = self._open_file(path)
            return self._open[path]

    def _open_file(self, path: Path) -> tuple[int, bool]:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | self._flag), bool(self._flag)
        except OSError as error:
            if self._flag and error.errno == errno.EINVAL:  # tmpfs and some network mounts
                warn_once(
                    f"buffered {path.parent}",
                    f"{path.parent} refuses O_DIRECT; reading through the page cache instead",
                )
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
            raise DiskReadError(f"cannot open {path}: {os_reason(error)}") from error

    def close(self) -> None:
        """Close them all."""
        with self._lock:
            for descriptor, _ in self._open.values():
                os.close(descriptor)
            self._open.clear()


def read_failed(path: Path, offset: int, nbytes: int, error: OSError) -> DiskReadError:
    """What to say when the system could not read."""
    return DiskReadError(
        f"reading {nbytes} bytes at {offset} of {path} failed: {os_reason(error)}; "
        "check the disk (dmesg, smartctl)"
    )


class PreadReader(DiskReader, VectorReader):
    """`preadv` from descriptors opened with O_DIRECT, or through the page cache."""

    def __init__(self, *, direct: bool = True) -> None:
        self._files = OpenFiles(direct=direct)

    @override
    def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        return self.read_vector(path, offset, [view])

    @override
    def read_vector(self, path: Path, offset: int, views: Sequence[memoryview]) -> int:
        descriptor, direct = self._files.descriptor(path)
        left = list(views)
        done = 0
        try:
            while left:
                got = os.preadv(descriptor, left, offset + done)
                done += got
                if got == 0 or (direct and got % mmap.PAGESIZE):  # the end of the file
                    break
                _skip(left, got)
        except OSError as error:
            nbytes = sum(map(len, views))
            raise read_failed(path, offset, nbytes, error) from error
        return done

    @override
    def close(self) -> None:
        self._files.close()


def _skip(views: list[memoryview], nbytes: int) -> None:
    """Take `nbytes` off the front of `views`."""
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.pop(0))
    if nbytes:
        views[0] = views[0][nbytes:]

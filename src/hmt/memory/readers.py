"""Reading byte ranges of files: O_DIRECT, buffered, and mmap, behind one interface.

Offsets, lengths and destinations are multiples of 4 KiB, which every local file system accepts for
O_DIRECT.  Only a range that reaches past the end of the file may come back short.
"""

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Protocol

from hmt.base.errors import ConfigError, DiskReadError
from hmt.base.log import warn_once


class DiskReader(Protocol):
    """Reads aligned ranges of files into memory.  Thread-safe."""

    def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        """Fill `view` from `path` at `offset`; the bytes read, fewer only at the file's end.

        Raises DiskReadError when the drive fails or the file has become shorter.
        """
        ...

    def close(self) -> None:
        """Close all files."""
        ...


class _OpenFiles:
    """Descriptors by path, opened once and kept."""

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = self._open_file(path)
            return self._open[path]

    def _open_file(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | self._flags)
        except OSError as error:
            if self._flags and error.errno == errno.EINVAL:  # tmpfs and some network mounts
                warn_once(
                    f"buffered {path.parent}",
                    f"{path.parent} refuses O_DIRECT; reading through the page cache instead",
                )
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            raise DiskReadError(f"cannot open {path}: {error.strerror}") from error

    def close(self) -> None:
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()


class PreadReader:
    """`preadv` from descriptors opened with O_DIRECT, or through the page cache."""

    def __init__(self, *, direct: bool = True) -> None:
        self._direct = direct
        self._files = _OpenFiles(getattr(os, "O_DIRECT", 0) if direct else 0)

    def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        """See DiskReader."""
        descriptor = self._files.descriptor(path)
        done = 0
        try:
            while done < len(view):
                got = os.preadv(descriptor, [view[done:]], offset + done)
                done += got
                if got == 0 or (self._direct and done % mmap.PAGESIZE):  # the end of the file
                    break
        except OSError as error:
            raise DiskReadError(
                f"reading {len(view)} bytes at {offset} of {path} failed: {error.strerror}; "
                "check the drive (dmesg, smartctl)"
            ) from error
        return done

    def close(self) -> None:
        """See DiskReader."""
        self._files.close()


class MmapReader:
    """Copies out of memory-mapped files; the kernel's page cache decides what stays."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def read_into(self, path: Path, offset: int, view: memoryview) -> int:
        """See DiskReader.  A drive error under mmap is a SIGBUS: prefer the other readers."""
        mapped = self._map(path)
        got = max(0, min(len(view), len(mapped) - offset))
        view[:got] = memoryview(mapped)[offset : offset + got]
        return got

    def close(self) -> None:
        """See DiskReader."""
        with self._lock:
            self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        with self._lock:
            if path not in self._maps:
                try:
                    with path.open("rb") as file:
                        self._maps[path] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                except (OSError, ValueError) as error:
                    raise DiskReadError(f"cannot map {path}: {error}") from error
            return self._maps[path]


READERS = ("direct", "buffered", "mmap")


def open_reader(kind: str) -> DiskReader:
    """The reader named `kind` (one of READERS).  Raises ConfigError for another name."""
    if kind == "mmap":
        return MmapReader()
    if kind in ("direct", "buffered"):
        return PreadReader(direct=kind == "direct")
    raise ConfigError(f"unknown disk reader {kind!r}; choose one of {', '.join(READERS)}")

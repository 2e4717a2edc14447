"""Writing the data files of a pack, past the page cache."""

import contextlib
import errno
import os
from pathlib import Path

from hmt.base.errors import DiskWriteError, os_reason
from hmt.base.units import format_bytes
from hmt.weights.pack.extents import file_name

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DIRECT = getattr(os, "O_DIRECT", 0)


class DataFiles:
    """The data files in a folder, written in any order.

    With O_DIRECT, because hundreds of gigabytes would otherwise push everything else out of the
    page cache; through it where the file system refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._flags = _DIRECT
        self._open: dict[int, int] = {}
        self._unsynced: set[int] = set()

    def write(self, number: int, offset: int, view: memoryview) -> None:
        """Write whole pages from an aligned buffer.  Raises DiskWriteError."""
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._descriptor(number), view[done:], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._flags:
                    self._give_up_direct()
                    continue
                raise self._failed(number, error) from error
            if self._flags and done % 4096:  # the disk took a part of a page: it is nearly full
                done -= done % 4096
                self._give_up_direct()
            self._unsynced.add(number)

    def sync(self) -> None:
        """Make everything that was written durable.  Raises DiskWriteError."""
        for number in sorted(self._unsynced):
            try:
                os.fdatasync(self._open[number])
            except OSError as error:
                raise self._failed(number, error) from error
            if not self._flags:
                os.posix_fadvise(self._open[number], 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced.clear()

    def finish(self, sizes: dict[str, int]) -> None:
        """Cut every file to its size and make all of it durable.  Raises DiskWriteError."""
        for number, size in enumerate(sizes.values()):
            try:
                os.ftruncate(self._descriptor(number), size)
                os.fsync(self._descriptor(number))
            except OSError as error:
                raise self._failed(number, error) from error
        self._unsynced.clear()

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            path = self._folder / file_name(number)
            create = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            try:
                self._open[number] = os.open(path, create | self._flags, 0o644)
            except OSError as error:
                if not self._flags or error.errno != errno.EINVAL:
                    raise
                self._flags = 0  # tmpfs and some network mounts
                self._open[number] = os.open(path, create, 0o644)
        return self._open[number]

    def _give_up_direct(self) -> None:
        self.sync()
        self.close()
        self._flags = 0

    def _failed(self, number: int, error: OSError) -> DiskWriteError:
        path = self._folder / file_name(number)
        if error.errno not in _FULL:
            return DiskWriteError(
                f"writing {path} failed: {os_reason(error)}; check the disk (dmesg, smartctl)"
            )
        free = "little"
        with contextlib.suppress(OSError):
            room = os.statvfs(self._folder)
            free = format_bytes(room.f_bavail * room.f_frsize)
        return DiskWriteError(
            f"writing {path} failed: {os_reason(error)} ({free} free); make room and run the same "
            "command again: it goes on where it stopped"
        )

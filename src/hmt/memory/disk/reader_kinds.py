"""The ways to read a disk, by name."""

from hmt.base.errors import ConfigError
from hmt.base.log import warn_once
from hmt.memory.disk import uring
from hmt.memory.disk.readers import DiskReader, PreadReader

READERS = ("io_uring", "direct", "buffered", "mmap")


def open_reader(kind: str) -> DiskReader:
    """The reader named `kind` (one of READERS).  Raises ConfigError for another name.

    Where io_uring cannot be used, says so once and returns the reader called "direct".  "mmap" is
    another name of "buffered": both copy from the page cache, a mapping page by page.
    """
    if kind in ("direct", "buffered", "mmap"):
        return PreadReader(direct=kind == "direct")
    if kind != "io_uring":
        raise ConfigError(f"unknown disk reader {kind!r}; choose one of {', '.join(READERS)}")
    reason = uring.unavailable()
    if reason is None:
        return uring.UringReader()
    warn_once("io_uring", f"io_uring cannot be used ({reason}); threads read the disk instead")
    return PreadReader()

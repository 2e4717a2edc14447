"""Folders of the user's that HMT keeps things in, and what writing there can end with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hmt.base import flags
from hmt.base.errors import DiskWriteError, os_reason


def cache_folder() -> Path:
    """HMT's own folder: HMT_CACHE, else hmt in the user's cache folder.  It may not exist yet."""
    folder = flags.read(flags.CACHE)
    if folder:
        return Path(folder)
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "hmt"


def sync_folder(folder: Path) -> None:
    """Make the names of its files durable.  Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise DiskWriteError for an OSError, saying `what` failed and that nothing is lost."""
    try:
        yield
    except OSError as error:
        raise DiskWriteError(
            f"{what} failed: {os_reason(error)}; see to that and run the same command again: it "
            "goes on where it stopped"
        ) from error

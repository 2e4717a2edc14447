"""Folders of the user's that HMT keeps things in."""

import os
from pathlib import Path

from hmt.base import flags


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

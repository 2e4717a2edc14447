"""Files that only one model may write at a time."""

import fcntl
from pathlib import Path
from typing import BinaryIO

from hmt.base.errors import ConfigError, os_reason


def open_locked(path: Path, what: str) -> BinaryIO:
    """An empty file at `path`, replacing what was there; locked until it is closed.

    `what` it is to hold, for the message.  Raises ConfigError where it cannot be written, or
    another model writes it.
    """
    try:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
        except OSError:
            file.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written to {path} ({os_reason(error)}): name a file that is yours "
            "and that no other model writes"
        ) from error
    return file

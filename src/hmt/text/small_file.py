"""Reading the small files that lie beside a tokenizer, which may be anything but small files."""

import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError
from hmt.base.units import format_bytes

# The largest published tokenizer.json have 33 MB, configurations and templates below 2 MB.
MAX_BYTES: Final = 256 << 20
_SMALL_BYTES: Final = 32 << 20
# The largest vocabularies have 260,000 tokens and 580,000 merges, each a list or an entry.  Python
# takes 60 bytes for an empty list, which the file has in 3.
_MOST_LISTS: Final = 4_000_000


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; empty without the file.  Raises CheckpointError for all else."""
    data = read_bytes(file)
    if data is None:
        return {}
    return parse_object(file, data)


def parse_object(file: Path, data: bytes) -> dict[str, Any]:
    """The JSON object that `data` of `file` is, whose size in memory has a bound.

    Raises CheckpointError.
    """
    lists = data.count(b"[") + data.count(b"{")
    if lists > _MOST_LISTS:
        raise CheckpointError(
            f"{file} has {lists} lists and objects; {_MOST_LISTS} are the most that is read of "
            "such a file: download it again"
        )
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file} holds a JSON {type(value).__name__} where an object is wanted: "
            "download it again"
        )
    return value


def read_text(file: Path) -> str | None:
    """The UTF-8 text in `file`; None without the file.  Raises CheckpointError for all else."""
    data = read_bytes(file)
    try:
        return None if data is None else data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} cannot be read ({error}): download it again") from error


def read_bytes(file: Path, most: int = _SMALL_BYTES) -> bytes | None:
    """What is in `file`; None without the file.

    Raises CheckpointError where it has more than `most` bytes, cannot be read, or is no regular
    file: a device or a pipe may be read for ever.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for a process that writes to it.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}): download it again") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise CheckpointError(
            f"{file} is no regular file but a {_kind(found.st_mode)}: download it again"
        )
    with open(descriptor, "rb") as opened:
        if found.st_size > most:
            raise CheckpointError(
                f"{file} has {format_bytes(found.st_size)}; {format_bytes(most)} is the most that "
                "is read of such a file: download it again"
            )
        try:
            return opened.read(found.st_size)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error}): download it again") from error


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "device")

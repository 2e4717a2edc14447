"""The journal of a conversion: which extents are complete, so that it can go on after a kill.

Append-only; each line begins with the checksum of what follows on it, so that a torn line is seen.
The first line says what is being converted into what.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hmt.base.errors import ConfigError, DiskWriteError, os_reason
from hmt.weights.checksum import as_text, checksum


class Journal:
    """An open journal, locked against other processes.

    identity   what is converted, as its first line says; None in a new or unreadable journal
    seals      checksum of each complete extent, by its number
    """

    def __init__(self, path: Path) -> None:
        """Open or create `path`.  Raises ConfigError while another process has it open."""
        self.path = path
        self.seals: dict[int, int] = {}
        self.identity: dict[str, Any] | None = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise ConfigError(
                f"another conversion is writing in {path.parent}: wait for it, or end it"
            ) from None
        self._end = self._read()

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Start anew: nothing is complete.  Raises DiskWriteError."""
        self.seals.clear()
        self.identity = dict(identity)
        self._end = 0
        self._append([json.dumps(identity)])

    def add(self, seals: Mapping[int, int]) -> None:
        """Record extents that are complete on the disk.  Durable on return."""
        if seals:
            self._append([json.dumps([number, as_text(seal)]) for number, seal in seals.items()])
            self.seals |= seals

    def close(self) -> None:
        """Unlock and close."""
        os.close(self._file)

    def _append(self, texts: list[str]) -> None:
        content = "".join(f"{as_text(checksum(text.encode()))} {text}\n" for text in texts).encode()
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(self._file, content[done:], self._end + done)
            os.ftruncate(self._file, self._end + done)
            os.fdatasync(self._file)
        except OSError as error:
            raise DiskWriteError(f"writing {self.path} failed: {os_reason(error)}") from error
        self._end += len(content)

    def _read(self) -> int:
        """Take in all lines up to the first that is torn or damaged; returns where that begins."""
        end = 0
        for line in self._content().splitlines(keepends=True):
            seal, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or as_text(checksum(text)).encode() != seal:
                break
            value = json.loads(text)
            if self.identity is None:
                self.identity = value
            else:
                self.seals[value[0]] = int(value[1], 16)
            end += len(line)
        return end

    def _content(self) -> bytes:
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            return file.read()

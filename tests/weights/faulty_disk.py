"""Drives that fail, fall short and stall as a seed says, with threads and with io_uring."""

import errno
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hmt.base import extension
from hmt.base.errors import DiskReadError
from hmt.memory import PAGE_BYTES, PreadReader
from hmt.memory.disk.uring import UringBackend


@dataclass
class Faults:
    """Which reads go wrong, and a note of each: (path, first byte, end)."""

    seed: int
    errors: float = 0.0  # share of reads that fail
    short: float = 0.0  # that bring fewer bytes than there are
    late: float = 0.0  # that stall
    stall_s: float = 1e-3
    harmed: list[tuple[Path, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def draw(self, path: Path, offset: int, nbytes: int) -> str:
        """What happens to a read: "error", "short", "late" or nothing."""
        dice = self._dice.random()
        for name in ("error", "short", "late"):
            share = getattr(self, {"error": "errors"}.get(name, name))
            if dice < share:
                if name != "late":
                    self.harmed.append((path, offset, offset + nbytes))
                return name
            dice -= share
        return ""

    def part(self, nbytes: int) -> int:
        """What a short read of `nbytes` brings."""
        return self._dice.randrange(max(1, nbytes // PAGE_BYTES)) * PAGE_BYTES


class FaultyPread(PreadReader):
    """Threads whose reads go wrong."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def read_vector(self, path: Path, offset: int, views: Any) -> int:
        nbytes = sum(map(len, views))
        fault = self._faults.draw(path, offset, nbytes)
        if fault == "late":
            time.sleep(self._faults.stall_s)
        if fault == "error":
            views[0][: len(views[0]) // 2] = b"\xff" * (len(views[0]) // 2)
            raise DiskReadError(f"injected: {path} at {offset}")
        got = super().read_vector(path, offset, views)
        return min(got, self._faults.part(nbytes)) if fault == "short" else got


class FaultyRing:
    """A ring that reports what did not happen, and holds reports back."""

    def __init__(self, faults: Faults, paths: Callable[[int], Path]) -> None:
        self._ring = extension.find().Ring(16)
        self._faults = faults
        self._paths = paths
        self._fates: dict[int, tuple[str, int]] = {}
        self._held: list[tuple[int, int]] = []

    def read(self, tag: int, file: int, offset: int, views: Any, direct: bool) -> None:
        nbytes = sum(map(len, views))
        self._fates[tag] = self._faults.draw(self._paths(file), offset, nbytes), nbytes
        self._ring.read(tag, file, offset, views, direct)

    def wait(self) -> list[tuple[int, int]]:
        if self._held:  # reported late, when everything else has to wait for it
            held, self._held = self._held, []
            time.sleep(self._faults.stall_s)
            return held
        told = []
        for tag, result in self._ring.wait():
            fault, nbytes = self._fates.pop(tag)
            if fault == "late":
                self._held.append((tag, result))
            elif fault == "error":
                told.append((tag, -errno.EIO))
            else:
                short = min(result, self._faults.part(nbytes)) if fault == "short" else result
                told.append((tag, short))
        return told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


class FaultyUring(PreadReader):
    """One thread whose ring goes wrong."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def issuer(self, depth: int) -> UringBackend:
        def path_of(descriptor: int) -> Path:
            return Path(os.readlink(f"/proc/self/fd/{descriptor}"))

        return UringBackend(self._files, FaultyRing(self._faults, path_of), 16)

"""One safetensors file of known tensors, written in any order, complete or not there at all."""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hmt.base.folders import sync_folder, writing
from hmt.formats.safetensors import DTYPE_BITS

Entries = Mapping[str, tuple[str, tuple[int, ...]]]  # (dtype as in safetensors, shape) by name

_PARTIAL: Final = ".partial"
_SYNC_BYTES: Final = 64 << 20  # that may wait for the disk: dirty pages count as a limit's memory


class ShardWriter:
    """A file `path` of `entries`, which appears once it is complete and durable."""

    def __init__(self, path: Path, entries: Entries) -> None:
        """Begin it anew.  Raises DiskWriteError.  Must be finished or closed."""
        self._path = path
        self._partial = path.with_name(path.name + _PARTIAL)
        header, self._at, end = _layout(entries)
        self._unsynced = 0
        with writing(f"writing {self._partial}"):
            self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                write_at(self._file, memoryview(header), 0)
                os.ftruncate(self._file, end)
            except BaseException:
                os.close(self._file)
                raise

    def write(self, name: str, numbers: Tensor) -> None:
        """All of tensor `name`.  Raises DiskWriteError."""
        content = bytes_of(numbers)
        self.write_bytes(name, 0, content)

    def write_bytes(self, name: str, at: int, content: memoryview) -> None:
        """Some bytes of tensor `name`, from its byte `at` on.  Raises DiskWriteError."""
        place, nbytes = self._at[name]
        if at + len(content) > nbytes:
            raise AssertionError(f"{name} has {nbytes} bytes, not {at + len(content)}")
        with writing(f"writing {self._partial}"):
            write_at(self._file, content, place + at)
            self._unsynced += len(content)
            if self._unsynced >= _SYNC_BYTES:
                sync_and_forget(self._file)
                self._unsynced = 0

    def finish(self) -> None:
        """Make it durable and let it appear.  Raises DiskWriteError."""
        with writing(f"writing {self._path}"):
            sync_and_forget(self._file)
            self._partial.rename(self._path)
            sync_folder(self._path.parent)

    def close(self) -> None:
        """Close the file; one that is not finished stays, and is begun anew the next time."""
        os.close(self._file)


def file_bytes(entries: Entries) -> int:
    """What a file of `entries` takes."""
    return _layout(entries)[2]


def _layout(entries: Entries) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The header, (first byte, bytes) of each tensor, and the file's end.

    Wide numbers come first, so that all are aligned.
    """
    ordered = sorted(entries, key=lambda name: (-DTYPE_BITS[entries[name][0]], name))
    said: dict[str, Any] = {}
    end = 0
    for name in ordered:
        dtype, shape = entries[name]
        begin, end = end, end + prod(shape) * DTYPE_BITS[dtype] // 8
        said[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}} | said).encode()
    text += b" " * (-len(text) % 64 + 56)  # numbers begin at a multiple of 64
    first = 8 + len(text)
    places = {}
    for name, entry in said.items():
        begin, stop = entry["data_offsets"]
        places[name] = (first + begin, stop - begin)
    return len(text).to_bytes(8, "little") + text, places, first + end


def write_at(file: int, content: memoryview, at: int) -> None:
    """Write all of `content` from byte `at` of a file on.  Raises OSError."""
    while content:
        done = os.pwrite(file, content, at)
        content, at = content[done:], at + done


def read_at(file: int, content: memoryview, at: int) -> None:
    """Fill `content` with what a file has from byte `at` on.  Raises OSError."""
    while content:
        done = os.preadv(file, [content], at)
        if not done:
            raise OSError("it ends too early")
        content, at = content[done:], at + done


def bytes_of(numbers: Tensor) -> memoryview:
    """The bytes of a tensor: its own, where it is contiguous and in host memory."""
    return numbers.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def sync_and_forget(file: int) -> None:
    """Make a file's bytes durable, and drop them from the page cache.  Raises OSError."""
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

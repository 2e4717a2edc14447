"""Checksums of what packs hold: xxh3_64, which is faster than any disk.

One thread of a current server sums 24 GB/s, 10 GB/s of rows of 4 KiB; the GIL is free meanwhile.
"""

import array
import sys

import xxhash

Bytes = bytes | bytearray | memoryview

SUM_BYTES = 8


def checksum(content: Bytes) -> int:
    """The xxh3_64 of `content`."""
    return xxhash.xxh3_64_intdigest(content)


def as_text(seal: int) -> str:
    """A checksum as 16 hexadecimal digits."""
    return f"{seal:016x}"


def from_text(text: str) -> int:
    """The checksum that `as_text` wrote.  Raises ValueError."""
    if len(text) != 2 * SUM_BYTES or text != text.lower():
        raise ValueError(f"{text!r} is not a checksum")
    return int(text, 16)


class StreamSum:
    """The checksum of bytes that come in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def add(self, piece: Bytes) -> None:
        """Count the bytes that follow."""
        self._state.update(piece)

    @property
    def seal(self) -> int:
        """Of everything so far."""
        return self._state.intdigest()


class RunSums:
    """Checksums of runs of equal length within an extent that comes in pieces, in order."""

    def __init__(self, begin: int, end: int, run_bytes: int) -> None:
        """Runs of `run_bytes` from `begin` to `end` of the extent; the last may be shorter."""
        self._end = end
        self._run_bytes = run_bytes
        self._run_end = min(begin + run_bytes, end)
        self._at = begin
        self._state = StreamSum()
        self.sums: list[int] = []

    def add(self, at: int, piece: memoryview) -> None:
        """Count the bytes of the extent from `at` on.  Pieces follow each other."""
        stop = min(self._end, at + len(piece))
        while self._at < stop:
            part_end = min(stop, self._run_end)
            self._state.add(piece[self._at - at : part_end - at])
            self._at = part_end
            if part_end == self._run_end:
                self.sums.append(self._state.seal)
                self._state = StreamSum()
                self._run_end = min(part_end + self._run_bytes, self._end)


def pack_sums(sums: list[int]) -> bytes:
    """Checksums as they lie in a pack: u64, little-endian."""
    packed = array.array("Q", sums)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def sum_at(packed: memoryview, index: int) -> int:
    """Checksum number `index` of those that `pack_sums` packed."""
    return int.from_bytes(packed[SUM_BYTES * index : SUM_BYTES * (index + 1)], "little")

"""Reading GGUF headers: metadata, and where every tensor lies, checked before it is believed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.  The `gguf`
package knows the types; its own reader maps the whole file, believes every count, and takes seconds
for a vocabulary, so that a damaged file can hold it up for ever.
"""

import re
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from hmt.base.errors import CheckpointError, HeaderError, MissingFileError, os_reason
from hmt.base.units import format_bytes
from hmt.contracts.checkpoint import TensorRecord

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
# The largest vocabularies take 20 MB with their merges; headers of 1000 experts' tensors 10 MB.
MAX_HEADER_BYTES: Final = 128 << 20
MAX_ITEMS: Final = 4 << 20  # of an array, of keys, and of tensors: a Python object each
MAX_NAME_BYTES: Final = 65535
MAX_DIMS: Final = 4
MAX_INT: Final = (1 << 63) - 1

_STRING, _ARRAY = 8, 9
_NUMBERS: Final = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

_quote = reprlib.Repr()
_quote.maxlevel, _quote.maxlist, _quote.maxstring, _quote.maxother = 2, 8, 200, 200
_brief = _quote.repr


@dataclass(frozen=True)
class GgufHeader:
    """What one file says.

    metadata   values by key: int, float, bool, str, or a list of one of these
    records    tensors by name; dtype is ggml's name of the type; shape as PyTorch has it
    """

    path: Path
    metadata: Mapping[str, Any]
    records: Mapping[str, TensorRecord]


def read_gguf(path: Path) -> GgufHeader:
    """The header of one file.  Reads nothing behind it.

    Nothing is allocated on the word of the file: counts are compared with the bytes that are left.
    Raises MissingFileError without the file, CheckpointError where it cannot be read, HeaderError
    where the header is malformed or contradicts the file.
    """
    try:
        with path.open("rb", buffering=1 << 20) as file:
            size = file.seek(0, 2)
            file.seek(0)
            return _read(_Cursor(path, file, size))
    except FileNotFoundError:
        raise MissingFileError(f"{path} does not exist: download it") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({os_reason(error)}): check its permissions and the disk"
        ) from error


class _Cursor:
    """Reads a header from its beginning, never beyond the file or MAX_HEADER_BYTES."""

    def __init__(self, path: Path, file: BinaryIO, file_bytes: int) -> None:
        self.path, self.file_bytes, self.at = path, file_bytes, 0
        self._file = file
        self._end = min(file_bytes, MAX_HEADER_BYTES)

    def damaged(self, problem: str) -> HeaderError:
        return HeaderError(
            f"{self.path}: {problem}; the file is damaged or is not GGUF: download it again"
        )

    def need(self, count: int, each: int, what: str) -> None:
        """Refuse `count` things of at least `each` bytes where so many cannot follow."""
        if count > MAX_ITEMS and each:
            raise self.damaged(f"it states {count} {what}, more than {MAX_ITEMS}")
        if count * each > self._end - self.at:
            raise self.damaged(
                f"its header needs {count * each} bytes for {count} {what} at byte {self.at}, and "
                f"{self._end - self.at} are left"
            )

    def take(self, nbytes: int) -> bytes:
        if nbytes > self._end - self.at:
            raise self.damaged(
                f"its header needs {nbytes} bytes at byte {self.at}, and {self._end - self.at} are "
                "left"
            )
        self.at += nbytes
        content = self._file.read(nbytes)
        if len(content) < nbytes:
            raise self.damaged("it became shorter while it was read")
        return content

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self) -> str:
        raw = self.take(self.u64())
        # Tokens of some vocabularies are not valid on their own.
        return raw.decode("utf-8", errors="replace")

    def name(self, what: str) -> str:
        length = self.u64()
        if length > MAX_NAME_BYTES:
            raise self.damaged(f"{what} has a name of {length} bytes")
        raw = self.take(length)
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} has the name {_brief(raw)}, which is not text") from None
        if not name.isprintable() or not name:
            raise self.damaged(f"{what} has the name {_brief(name)}, which cannot be printed")
        return name

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0]
        if kind != _ARRAY:
            raise self.damaged(f"a value at byte {self.at} is of type {kind}, which is unknown")
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            self.need(count, 8, "strings")
            return [self.text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise self.damaged(f"an array at byte {self.at} has items of type {kind}")
        self.need(count, np.dtype(_NUMBERS[kind]).itemsize, "numbers")
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        raw = self.take(count * dtype.itemsize)
        numbers: list[Any] = np.frombuffer(raw, np.uint8 if kind == 7 else dtype).tolist()
        return [bool(number) for number in numbers] if kind == 7 else numbers


def _read(cursor: _Cursor) -> GgufHeader:
    _check_magic(cursor)
    tensors, pairs = cursor.u64(), cursor.u64()
    cursor.need(pairs, 13, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.name("a metadata entry")
        if key in metadata:
            raise cursor.damaged(f"the key {_brief(key)} occurs twice")
        metadata[key] = cursor.value(cursor.u32())
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.damaged(f"its alignment is {_brief(alignment)}, which is no power of two")
    cursor.need(tensors, 32, "tensors")
    records: dict[str, TensorRecord] = {}
    for _ in range(tensors):
        record = _tensor(cursor, alignment)
        if record.name in records:
            raise cursor.damaged(f"tensor {_brief(record.name)} is described twice")
        records[record.name] = record
    start = -(-cursor.at // alignment) * alignment
    return GgufHeader(cursor.path, metadata, _placed(cursor, records, start))


def _check_magic(cursor: _Cursor) -> None:
    magic = cursor.take(4) if cursor.file_bytes >= 4 else b""
    if magic == b"vers":  # how a Git LFS pointer begins
        raise HeaderError(
            f"{cursor.path}: this is a Git LFS pointer of {cursor.file_bytes} bytes, not the model "
            "itself: run `git lfs pull`, or download it again"
        )
    if not cursor.file_bytes:
        raise HeaderError(f"{cursor.path} is empty: download it again")
    if magic != MAGIC:
        raise cursor.damaged(f"it begins with {magic!r}, not with {MAGIC!r}")
    version = cursor.u32()
    if version not in VERSIONS:
        big = version in (number << 24 for number in VERSIONS)
        what = "big-endian numbers" if big else f"version {version}"
        raise HeaderError(
            f"{cursor.path} is GGUF with {what}; HMT reads versions {VERSIONS[0]} and "
            f"{VERSIONS[1]}, little-endian: convert it again with a current llama.cpp"
        )


@cache
def _types() -> dict[int, tuple[str, int, int]]:
    """ggml's types by number: name, numbers in a block, bytes of a block."""
    # The package takes 0.15 s to import, which most models do not need.
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return {
        int(kind): (kind.name, *GGML_QUANT_SIZES[kind])
        for kind in GGMLQuantizationType
        if kind in GGML_QUANT_SIZES
    }


def _tensor(cursor: _Cursor, alignment: int) -> TensorRecord:
    """One tensor; its offset counts from the first byte of the numbers."""
    name = cursor.name("a tensor")
    label = f"tensor {_brief(name)}"
    dims = cursor.u32()
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.damaged(f"{label} has {dims} dimensions; wanted are 1 to {MAX_DIMS}")
    sizes = struct.unpack(f"<{dims}Q", cursor.take(8 * dims))
    kind, offset = cursor.u32(), cursor.u64()
    if any(not 0 < size <= MAX_INT for size in sizes) or prod(sizes) > MAX_INT >> 6:
        raise cursor.damaged(f"{label} has the shape {sizes}, which no memory can hold")
    if kind not in _types():
        raise cursor.damaged(f"{label} is of type {kind}, which is unknown")
    ggml, block, block_bytes = _types()[kind]
    if sizes[0] % block:
        raise cursor.damaged(
            f"{label} has rows of {sizes[0]} numbers, and {ggml} has blocks of {block}"
        )
    if offset % alignment:
        raise cursor.damaged(f"{label} begins at {offset}, no multiple of {alignment}")
    nbytes = prod(sizes) // block * block_bytes
    return TensorRecord(name, ggml, tuple(reversed(sizes)), cursor.path, offset, nbytes)


def _placed(
    cursor: _Cursor, records: Mapping[str, TensorRecord], start: int
) -> dict[str, TensorRecord]:
    """Records with offsets in the file, which must hold them, and none twice."""
    held = cursor.file_bytes - start
    # Without tensors nothing need follow, and the file may end before the next aligned byte.
    missing = max((r.offset + r.nbytes for r in records.values()), default=held) - held
    if missing > 0:
        cut = [r.name for r in records.values() if r.offset + r.nbytes > held]
        raise HeaderError(
            f"{cursor.path} is truncated: {missing} bytes ({format_bytes(missing)}) are missing; "
            f"{len(cut)} of {len(records)} tensors are incomplete, the first is {_brief(cut[0])}: "
            "download it again"
        )
    in_order = sorted(records.values(), key=lambda record: record.offset)
    for before, after in pairwise(in_order):
        if after.offset < before.offset + before.nbytes:
            raise cursor.damaged(f"tensors {_brief(before.name)} and {_brief(after.name)} overlap")
    return {
        r.name: TensorRecord(r.name, r.dtype, r.shape, r.file, start + r.offset, r.nbytes)
        for r in records.values()
    }


SPLIT: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")

"""One file of pages on the disk: a header with their keys and checksums, then the pages.

    header   magic, model, page_bytes, first, pages; 16 bytes of key and 8 of checksum for each
             page; the xxh3_64 of all that; zeros up to a multiple of 4 KiB
    pages    page_bytes each, in the order of the text

All numbers are little-endian.  A page's key is the BLAKE2b of the key before it and its 16 tokens,
so it stands for everything up to it, and no text can be made to look like another.
"""

import hashlib
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS

KEY_BYTES = 16
SUFFIX = ".hmtkv"

_MAGIC = b"HMTKV\x00\x001"
_FIXED = struct.Struct("<8s16sQQQ")
_NAME = re.compile(r"[0-9a-f]{32}-([0-9]{8})-[0-9a-f]{32}(?:-([0-9a-f]{16}))?" + re.escape(SUFFIX))
_ALIGNED = 4096
_MOST_PAGES = 1 << 24


class DamagedSegmentError(Exception):
    """Not the bytes that were written; never leaves the prefix cache."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive pages of a text.

    model        digest of what their bytes depend on, 16 bytes
    page_bytes   of one page of all layers
    first        number of the first page in the text
    keys, sums   of each page: its key, and the xxh3_64 of its bytes
    owner        `owner_tag` of the owner it counts for; it stands in the file's name only
    """

    model: bytes
    page_bytes: int
    first: int
    keys: tuple[bytes, ...]
    sums: tuple[int, ...]
    owner: str = ""

    @property
    def name(self) -> str:
        """Of its file: the same for the same pages of an owner, whichever process writes it."""
        owner = f"-{self.owner}" if self.owner else ""
        return f"{self.model.hex()}-{self.first:08d}-{self.keys[-1].hex()}{owner}{SUFFIX}"

    @property
    def header_bytes(self) -> int:
        """Where the pages begin."""
        return _header_bytes(len(self.keys))

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.header_bytes + len(self.keys) * self.page_bytes

    def header(self) -> bytes:
        """As it lies in the file."""
        fixed = (_MAGIC, self.model, self.page_bytes, self.first, len(self.keys))
        sums = np.array(self.sums, dtype="<u8").tobytes()
        content = _FIXED.pack(*fixed) + b"".join(self.keys) + sums
        content += xxhash.xxh3_64_intdigest(content).to_bytes(8, "little")
        return content.ljust(self.header_bytes, b"\0")


def segment_bytes(pages: int, page_bytes: int) -> int:
    """Of a file of so many pages."""
    return _header_bytes(pages) + pages * page_bytes


def pages_within(nbytes: int, page_bytes: int) -> int:
    """How many pages a file of at most so many bytes has."""
    at_most = max(0, nbytes // (KEY_BYTES + 8 + page_bytes))
    while at_most and segment_bytes(at_most, page_bytes) > nbytes:  # a header has an end, too
        at_most -= 1
    return at_most


def read_name(name: str) -> tuple[int, str] | None:
    """Number of the first page in a segment's file, and its owner's tag; None for other files."""
    parts = _NAME.fullmatch(name)
    return (int(parts[1]), parts[2] or "") if parts else None


def owner_tag(owner: str) -> str:
    """What stands for an owner in the names of files: 16 hexadecimal digits, "" for no owner.

    A keyed hash: the same in every process, and the owner's name cannot be read from it.
    """
    if not owner:
        return ""
    name = owner.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=8, key=b"hmt prefix owner").hexdigest()


def root_key(model: bytes, salt: str) -> bytes:
    """The key before the first page of a text."""
    return hashlib.blake2b(model + salt.encode(), digest_size=KEY_BYTES).digest()


def page_keys(root: bytes, tokens: Sequence[int] | np.ndarray) -> list[bytes]:
    """Keys of the whole pages of `tokens`: 1 us for each."""
    whole = len(tokens) // PAGE_TOKENS * PAGE_TOKENS
    content = np.asarray(tokens[:whole], dtype="<i8").tobytes()
    step, key, keys = 8 * PAGE_TOKENS, root, []
    for at in range(0, len(content), step):
        key = hashlib.blake2b(content[at : at + step], digest_size=KEY_BYTES, key=key).digest()
        keys.append(key)
    return keys


def read_header(path: Path) -> Segment:
    """Of a file that is complete.  Raises DamagedSegmentError, OSError."""
    with open(path, "rb") as file:
        fixed = file.read(_FIXED.size)
        if len(fixed) < _FIXED.size:
            raise DamagedSegmentError("it ends in its header")
        magic, model, page_bytes, first, pages = _FIXED.unpack(fixed)
        if magic != _MAGIC or not 0 < pages <= _MOST_PAGES:
            raise DamagedSegmentError("its header is none")
        rest = file.read(pages * (KEY_BYTES + 8) + 8)
        nbytes = os.fstat(file.fileno()).st_size
    content, seal = fixed + rest[:-8], rest[-8:]
    if xxhash.xxh3_64_intdigest(content).to_bytes(8, "little") != seal:
        raise DamagedSegmentError("its header is not what was written")
    if nbytes != segment_bytes(pages, page_bytes):
        raise DamagedSegmentError(f"it has {nbytes} bytes")
    keys = tuple(rest[at : at + KEY_BYTES] for at in range(0, pages * KEY_BYTES, KEY_BYTES))
    sums = np.frombuffer(rest, "<u8", pages, pages * KEY_BYTES)
    _, owner = read_name(path.name) or (0, "")
    return Segment(model, page_bytes, first, keys, tuple(sums.tolist()), owner)


def page_sums(content: memoryview, page_bytes: int) -> list[int]:
    """The xxh3_64 of each page."""
    return [
        xxhash.xxh3_64_intdigest(content[at : at + page_bytes])
        for at in range(0, len(content), page_bytes)
    ]


def _header_bytes(pages: int) -> int:
    return round_up(_FIXED.size + pages * (KEY_BYTES + 8) + 8, _ALIGNED)

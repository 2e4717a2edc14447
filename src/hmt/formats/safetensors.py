"""Reading safetensors headers: where every tensor of a shard lies, checked before it is believed.

Format: https://github.com/huggingface/safetensors#format.  Eight bytes of little-endian header
length, the header (a JSON object), then the numbers, without holes.
"""

import json
import reprlib
from collections import Counter
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from hmt.base.errors import CheckpointError, HeaderError, MissingFileError, os_reason
from hmt.base.units import format_bytes
from hmt.contracts.checkpoint import TensorRecord

PREFIX_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000  # the format document's own limit
MAX_DIMS: Final = 64  # as torch
MAX_INT: Final = (1 << 63) - 1

DTYPE_BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}

# Quotes what a header says in bounded length and depth; repr() itself can overflow the stack.
_quote = reprlib.Repr()
_quote.maxlevel, _quote.maxlist, _quote.maxstring, _quote.maxother = 2, 8, 200, 200
_brief = _quote.repr


class _Entry(NamedTuple):
    """One tensor as the header states it; offsets count from the first byte of the numbers."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorRecord]:
    """Every tensor of one shard by name, in the order of its bytes.  Reads the header only.

    Nothing is allocated on the word of the file: lengths, shapes and ranges are checked against
    the file's size, dtypes against the known ones, and the ranges must cover the numbers exactly.
    Raises MissingFileError without the file, CheckpointError where it cannot be read, and
    HeaderError where the header is malformed or contradicts the file.
    """
    raw, file_bytes = _read_raw(path)
    tensors, _ = _tensors(path, raw)
    entries = sorted(_entry(path, name, fields) for name, fields in tensors.items())
    data_start = PREFIX_BYTES + len(raw)
    _check_coverage(path, entries, file_bytes - data_start)
    return {
        entry.name: TensorRecord(
            entry.name,
            entry.dtype,
            entry.shape,
            path,
            data_start + entry.begin,
            entry.end - entry.begin,
        )
        for entry in entries
    }


def read_metadata(path: Path) -> dict[str, str]:
    """What a shard says of itself and its tensors (`__metadata__`); raises as `read_header`."""
    raw, _ = _read_raw(path)
    return _tensors(path, raw)[1]


def _read_raw(path: Path) -> tuple[bytes, int]:
    """The header, and how many bytes the file has."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            length = _header_length(path, file.read(PREFIX_BYTES), file_bytes)
            raw = file.read(length)
    except FileNotFoundError:
        raise MissingFileError(f"{path} does not exist: download this shard") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({os_reason(error)}): check its permissions and the disk"
        ) from error
    if len(raw) < length:
        raise _damaged(path, f"the header ends after {len(raw)} of {length} bytes")
    return raw, file_bytes


def _damaged(path: Path, problem: str) -> HeaderError:
    return HeaderError(
        f"{path}: {problem}; the file is damaged or is not safetensors: download this shard again"
    )


def _header_length(path: Path, prefix: bytes, file_bytes: int) -> int:
    if prefix == b"version ":  # how a Git LFS pointer begins
        raise HeaderError(
            f"{path}: this is a Git LFS pointer of {file_bytes} bytes, not the shard "
            "itself: run `git lfs pull`, or download the shard again"
        )
    if len(prefix) < PREFIX_BYTES:
        raise _damaged(
            path,
            f"the file holds {file_bytes} bytes, {PREFIX_BYTES - len(prefix)} too few "
            "for the header's length",
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise _damaged(
            path, f"it states a header of {length} bytes; the format allows {MAX_HEADER_BYTES}"
        )
    missing_bytes = PREFIX_BYTES + length - file_bytes
    if missing_bytes > 0:
        raise _damaged(
            path,
            f"its header needs {length} bytes and the file ends {missing_bytes} bytes before that",
        )
    return length


def _tensors(path: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The header's JSON object without `__metadata__`, and that."""
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise _damaged(path, "its header is nested too deeply") from None
    except ValueError as error:  # malformed UTF-8 or JSON, repeated keys, endless integers
        raise _damaged(path, f"its header is not valid JSON ({error})") from None
    if not isinstance(header, dict) or raw[:1] != b"{":
        raise _damaged(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, "its __metadata__ is not a map of strings")
    return header, metadata


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        key, times = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {_brief(key)} occurs {times} times in one object")
    return unique


def _entry(path: Path, name: str, fields: Any) -> _Entry:
    """Check one tensor's own fields: types, signs, and that bytes = elements x element size."""
    label = f"tensor {_brief(name)}"
    if not name.isprintable():
        raise _damaged(path, f"{label} has a name that cannot be printed")
    if not isinstance(fields, dict):
        raise _damaged(path, f"{label} is described by a {type(fields).__name__}, not by an object")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _damaged(path, f"{label} has the dtype {_brief(dtype)}, which is unknown")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise _damaged(
            path,
            f"{label} has the shape {_brief(shape)}; wanted is a list of at most {MAX_DIMS} "
            f"integers from 0 to {MAX_INT}",
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(
            path,
            f"{label} has the data_offsets {_brief(offsets)}; wanted is [begin, end], begin <= end",
        )
    begin, end = offsets
    if bits * prod(max(size, 1) for size in shape) > MAX_INT:
        raise _damaged(path, f"{label} has the shape {_brief(shape)}, which no memory can hold")
    needed_bits = bits * prod(shape)
    if needed_bits != 8 * (end - begin):
        raise _damaged(
            path,
            f"{label} ({dtype} {_brief(shape)}) needs {needed_bits / 8:.15g} bytes "
            f"and its data_offsets [{begin}, {end}] hold {end - begin}",
        )
    return _Entry(begin, end, name, str(dtype), tuple(shape))


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    """True for a list of integers that fit 63 bits without sign."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= MAX_INT for v in value)


def _check_coverage(path: Path, entries: list[_Entry], data_bytes: int) -> None:
    """The sorted ranges must follow each other without gap or overlap, up to the file's end."""
    stated_bytes = max((entry.end for entry in entries), default=0)
    if stated_bytes > data_bytes:
        cut = [entry.name for entry in entries if entry.end > data_bytes]
        missing_bytes = stated_bytes - data_bytes
        raise HeaderError(
            f"{path} is truncated: {missing_bytes} bytes ({format_bytes(missing_bytes)}) "
            f"are missing of the {stated_bytes} that its header describes; {len(cut)} of "
            f"{len(entries)} tensors are incomplete, the first is {_brief(cut[0])}: "
            "download this shard again"
        )
    start = _Entry(0, 0, "", "", ())
    for before, after in pairwise((start, *entries)):
        if after.begin < before.end:
            raise _damaged(
                path,
                f"tensors {_brief(before.name)} [{before.begin}, {before.end}] "
                f"and {_brief(after.name)} [{after.begin}, {after.end}] overlap",
            )
        if after.begin > before.end:
            raise _damaged(
                path,
                f"the {after.begin - before.end} bytes before tensor {_brief(after.name)} "
                "belong to no tensor",
            )
    if stated_bytes < data_bytes:
        raise _damaged(path, f"{data_bytes - stated_bytes} bytes at its end belong to no tensor")

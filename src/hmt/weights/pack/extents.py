"""Where everything goes in a pack: extents one after the other, in data files of bounded size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hmt.base.units import GIB, round_up
from hmt.memory import PAGE_BYTES

# Small enough to copy, to resume an upload of, and for every file system in use.
FILE_BYTES: Final = 4 * GIB


@dataclass(frozen=True, slots=True)
class ExtentPlace:
    """Bytes [offset, offset + nbytes) of data file number `file`; multiples of 4 KiB."""

    file: int
    offset: int
    nbytes: int


def arrange(sizes: Iterable[int], file_bytes: int = FILE_BYTES) -> list[ExtentPlace]:
    """A place for each extent, in order.  One that is larger than a file has a file of its own."""
    places = []
    file = end = 0
    for size in sizes:
        nbytes = round_up(size, PAGE_BYTES)
        if end and end + nbytes > file_bytes:
            file, end = file + 1, 0
        places.append(ExtentPlace(file, end, nbytes))
        end += nbytes
    return places


def file_sizes(places: Sequence[ExtentPlace]) -> dict[str, int]:
    """Bytes of every data file by name, in order."""
    sizes: dict[str, int] = {}
    for place in places:
        sizes[file_name(place.file)] = place.offset + place.nbytes
    return sizes


def file_name(number: int) -> str:
    """The name of data file `number`, from 0."""
    return f"data-{number + 1:05}.hmt"


def run_rows(row_bytes: int) -> int:
    """Rows of a table that share a checksum: as many as fit in a page, at least one.

    So a checked row costs no more pages than an unchecked one, and checksums at most 0.4% of the
    table.
    """
    return max(1, PAGE_BYTES // row_bytes)

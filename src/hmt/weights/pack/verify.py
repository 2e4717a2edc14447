"""Reading a whole pack and comparing every checksum."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hmt.base.errors import DamagedPackError, HMTError
from hmt.contracts.checkpoint import FileRange
from hmt.memory import ReadQueue
from hmt.weights.checksum import StreamSum, as_text
from hmt.weights.pack.manifest import Manifest
from hmt.weights.pack.pipeline import Buffers, extent_chunks, in_order
from hmt.weights.pack.reader import check_copy, check_size


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in a pack that is not what was written.

    offset, nbytes   of the bytes within which the damage lies
    """

    file: str
    what: str
    offset: int
    nbytes: int
    problem: str


def verify_pack(
    folder: Path,
    manifest: Manifest,
    queue: ReadQueue,
    buffers: Sequence[Buffers],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Damage]:
    """Everything that is damaged in the pack in `folder`; reads all of it.

    Data comes in pieces as large as the smallest of the `buffers`, all of which are kept busy.
    """
    damages = [*_small_files(folder, manifest), *_wrong_sizes(folder, manifest)]
    extents = manifest.extents()
    piece_bytes = min(pair.slot.nbytes for pair in buffers)
    pieces = (
        piece
        for number, (_, extent) in enumerate(extents)
        for piece in extent_chunks(
            number,
            FileRange(folder / manifest.file_name(extent), extent.offset, extent.nbytes),
            piece_bytes,
        )
    )
    done, stream, error = 0, StreamSum(), None
    with contextlib.closing(in_order(pieces, buffers, queue)) as results:
        for result in results:
            piece = result.job
            if piece.at == 0:
                stream, error = StreamSum(), None
            error = error or result.error
            stream.add(result.buffers.slot.view[: piece.file.nbytes])
            done += piece.file.nbytes
            if piece.last:
                what, extent = extents[piece.owner]
                problem = str(error) if error else _problem(stream.seal, extent.seal)
                if problem:
                    name = manifest.file_name(extent)
                    damages.append(Damage(name, what, extent.offset, extent.nbytes, problem))
            progress(done, manifest.data_bytes)
    return damages


def _problem(found: int, written: int) -> str:
    if found == written:
        return ""
    return f"checksum {as_text(found)} instead of {as_text(written)}"


def _small_files(folder: Path, manifest: Manifest) -> list[Damage]:
    damages = []
    for name, copy in manifest.copies.items():
        try:
            check_size(folder / name, copy.nbytes)
            check_copy(folder / name, copy.seal)
        except (HMTError, OSError) as error:
            damages.append(Damage(name, "copied file", 0, copy.nbytes, str(error)))
    return damages


def _wrong_sizes(folder: Path, manifest: Manifest) -> list[Damage]:
    """Data files that are too long; in those that are too short, extents cannot be read."""
    damages = []
    for name, size in manifest.files.items():
        with contextlib.suppress(OSError):
            found = (folder / name).stat().st_size
            if found > size:
                try:
                    check_size(folder / name, size)
                except DamagedPackError as error:
                    damages.append(Damage(name, "data file", size, found - size, str(error)))
    return damages

"""Making a pack: block by block, in bounded memory, resumable at any time.

Extents are converted on the disk workers, a few ahead, and written here in their order.  Every so
often what was written is made durable, and then recorded in the journal; so whatever the journal
says is true even after the power has failed.  A run that goes on after a kill reads what the
journal names, checks it, and makes the rest; extents depend on the checkpoint alone, so the result
is the same to the byte.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import HMTError
from hmt.base.trace import Tracer
from hmt.base.units import MIB
from hmt.contracts.blocks import BlockId
from hmt.contracts.checkpoint import FileRange
from hmt.contracts.encoding import PACKING_VERSION, Activations
from hmt.memory import PAGE_BYTES, ReadQueue
from hmt.weights.checksum import SUM_BYTES, RunSums, StreamSum, checksum, pack_sums
from hmt.weights.layout import BlockLayout, PlacedParam, Table
from hmt.weights.pack.data_files import DataFiles
from hmt.weights.pack.extents import (
    FILE_BYTES,
    ExtentPlace,
    arrange,
    file_name,
    file_sizes,
    run_rows,
)
from hmt.weights.pack.jobs import ConversionJob, is_table, jobs_for, shards_of
from hmt.weights.pack.manifest import (
    CopiedFile,
    Extent,
    Manifest,
    PackedBlock,
    PackedParam,
    PackedSums,
)
from hmt.weights.pack.partial_pack import PartialPack
from hmt.weights.pack.pipeline import Buffers, extent_chunks, in_order
from hmt.weights.pack.source import Subject, check_unchanged

# What a kill costs at most: this much time, or this many bytes, are spent again.
_SYNC_S: Final = 5.0
_SYNC_BYTES: Final = 256 * MIB
_PIECE_BYTES: Final = 8 * MIB

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class _SummedTable:
    """A table, and the numbers of the extents that hold its rows, with the rows' place in each."""

    block: BlockId
    name: str
    run_rows: int
    spans: tuple[tuple[int, int, int, int], ...]  # extent, begin, end, run bytes

    @property
    def runs(self) -> int:
        """Checksums that it has."""
        return sum(-(-(end - begin) // run) for _, begin, end, run in self.spans)


class PackWriter:
    """One conversion of a checkpoint to a pack in folder `out`.

    slot_bytes, staging_bytes   buffers that each block on its way takes
    """

    def __init__(
        self,
        subject: Subject,
        out: Path,
        *,
        force: bool = False,
        file_bytes: int = FILE_BYTES,
        sync_bytes: int = _SYNC_BYTES,
    ) -> None:
        """Look at `out`, and at what an earlier, unfinished conversion has left beside it.

        With `force` a pack in `out` is replaced, once the new one is complete.  Data files have at
        most `file_bytes`; a kill costs at most `sync_bytes`, or some seconds of work.  Raises
        ConfigError where `out` cannot be, CheckpointError where the checkpoint is not the one that
        the earlier conversion has read, DiskWriteError without room on the disk.  Must be closed.
        """
        self._subject = subject
        self._layouts = [layout for layout in subject.layouts.values() if layout.slot_bytes]
        self._tables = list(_summed_tables(subject, self._layouts))
        sums = [SUM_BYTES * table.runs for table in self._tables]
        sizes = [layout.slot_bytes for layout in self._layouts] + sums
        self._places = arrange(sizes, file_bytes)
        self._sync_bytes = sync_bytes
        self._run_sums: dict[int, list[RunSums]] = {}
        self._read_total = sum(map(_work_bytes, self._layouts))
        blocks = [layout for layout in self._layouts if not is_table(layout)]
        tables = [layout.slot_bytes for layout in self._layouts if is_table(layout)]
        self._piece_bytes = min(_PIECE_BYTES, max(layout.slot_bytes for layout in self._layouts))
        piece = min(self._piece_bytes, max(tables, default=PAGE_BYTES))
        # A piece of a table may lie in several shards, each of which is read in whole pages.
        shards = max((shards_of(layout) for layout in self._layouts), default=1)
        self.slot_bytes = max([self._piece_bytes, *(layout.slot_bytes for layout in blocks)])
        self.staging_bytes = max(
            [piece + 2 * PAGE_BYTES * shards, *(layout.staging_bytes for layout in blocks)]
        )
        self._draft = PartialPack(out, force=force)
        try:
            self._identity = self._now()
            self._begin_or_resume()
        except BaseException:
            self._draft.close()
            raise
        self._files = DataFiles(self._draft.pack)
        self._unrecorded: dict[int, int] = {}
        self._unrecorded_bytes = 0
        self._synced_at = time.monotonic()

    def run(
        self,
        queue: ReadQueue,
        tracer: Tracer,
        buffers: Sequence[Buffers],
        progress: Progress = lambda what, done, total: None,
    ) -> Manifest:
        """Convert, write and publish; returns the manifest.

        As many blocks are on their way at once as there are `buffers`.  `progress(what, bytes done,
        bytes in all)` is told of the checkpoint's bytes; what it raises ends the conversion, and
        so does Ctrl-C: what is complete stays for the next time.  Raises DiskReadError,
        DiskWriteError, NumericsError, and CheckpointError where the checkpoint changed meanwhile.
        """
        seals = self._checked(queue, buffers, progress)
        try:
            self._convert(seals, queue, tracer, buffers, progress)
            self._record()
        except BaseException:
            with contextlib.suppress(HMTError):
                self._record()
            raise
        self._write_sums(seals, buffers[0])
        copies = self._copy_files()
        check_unchanged(self._identity, self._now(), self._anew())
        self._files.finish(file_sizes(self._places))
        manifest = self._manifest(seals, copies)
        self._draft.publish(manifest)
        return manifest

    def close(self) -> None:
        """Close all files; an unfinished pack stays where it is."""
        self._files.close()
        self._draft.close()

    def _now(self) -> dict[str, Any]:
        """What is converted into what."""
        return self._subject.identity() | {"data": file_sizes(self._places)}

    def _anew(self) -> str:
        return f"delete {self._draft.folder} and convert again"

    def _begin_or_resume(self) -> None:
        journal = self._draft.journal
        if journal.identity is None:
            self._draft.clear()
            journal.begin(self._identity)
        else:
            check_unchanged(journal.identity, self._identity, self._anew())
        wanted = sum(place.nbytes for place in self._places)
        there = sum(self._places[number].nbytes for number in journal.seals)
        self._draft.check_room(wanted - there)

    def _checked(
        self, queue: ReadQueue, buffers: Sequence[Buffers], progress: Progress
    ) -> dict[int, int]:
        """Extents of an earlier run that are still what they were, with their checksums."""
        recorded = dict(self._draft.journal.seals)
        total, done = sum(self._places[number].nbytes for number in recorded), 0
        good: dict[int, int] = {}
        damaged: set[int] = set()
        pieces = (
            piece
            for number in recorded
            for piece in extent_chunks(number, self._range(number), self._piece_bytes)
        )
        stream = StreamSum()
        with contextlib.closing(in_order(pieces, buffers, queue)) as results:
            for result in results:
                number, view = result.job.owner, result.buffers.slot.view
                if result.job.at == 0:
                    stream = StreamSum()
                if result.error is not None:
                    damaged.add(number)
                stream.add(view[: result.job.file.nbytes])
                self._sum_runs(number, result.job.at, view[: result.job.file.nbytes])
                if result.job.last and number not in damaged and stream.seal == recorded[number]:
                    good[number] = recorded[number]
                done += result.job.file.nbytes
                progress("checking what is there", done, total)
        return good

    def _convert(
        self,
        seals: dict[int, int],
        queue: ReadQueue,
        tracer: Tracer,
        buffers: Sequence[Buffers],
        progress: Progress,
    ) -> None:
        """Make all extents that are not in `seals`, and put their checksums there."""
        missing = [number for number in range(len(self._layouts)) if number not in seals]
        done = self._read_total - sum(_work_bytes(self._layouts[number]) for number in missing)
        jobs: Iterator[ConversionJob] = (
            job
            for number in missing
            for job in jobs_for(number, self._layouts[number], tracer, self._piece_bytes)
        )
        stream = StreamSum()
        with contextlib.closing(in_order(jobs, buffers, queue)) as results:
            for result in results:
                if result.error is not None:
                    raise result.error
                job = result.job
                if job.at == 0:
                    stream = StreamSum()
                content = result.buffers.slot.view[: job.nbytes]
                self._write(job.owner, job.at, content)
                stream.add(content)
                self._sum_runs(job.owner, job.at, content)
                if job.last:
                    seals[job.owner] = stream.seal
                    self._note(job.owner, stream.seal)
                done += job.read_bytes
                progress("converting", done, self._read_total)

    def _write(self, number: int, at: int, content: memoryview) -> None:
        place = self._places[number]
        self._files.write(place.file, place.offset + at, content)

    def _note(self, number: int, seal: int) -> None:
        """Remember a complete extent, and record all of them every now and then."""
        self._unrecorded[number] = seal
        self._unrecorded_bytes += self._places[number].nbytes
        late = time.monotonic() - self._synced_at > _SYNC_S
        if late or self._unrecorded_bytes > self._sync_bytes:
            self._record()

    def _record(self) -> None:
        self._files.sync()
        self._draft.journal.add(self._unrecorded)
        self._unrecorded, self._unrecorded_bytes = {}, 0
        self._synced_at = time.monotonic()

    def _sum_runs(self, number: int, at: int, content: memoryview) -> None:
        if at == 0:
            self._run_sums[number] = [
                RunSums(begin, end, run)
                for table in self._tables
                for extent, begin, end, run in table.spans
                if extent == number
            ]
        for sums in self._run_sums[number]:
            sums.add(at, content)

    def _write_sums(self, seals: dict[int, int], buffers: Buffers) -> None:
        """Write the checksums of the tables' rows, behind all blocks."""
        left = {number: list(sums) for number, sums in self._run_sums.items()}
        for number, table in enumerate(self._tables, len(self._layouts)):
            sums = [s for extent, *_ in table.spans for s in left[extent].pop(0).sums]
            content = pack_sums(sums)
            content += bytes(self._places[number].nbytes - len(content))
            for at in range(0, len(content), buffers.slot.nbytes):
                piece = content[at : at + buffers.slot.nbytes]
                buffers.slot.view[: len(piece)] = piece
                self._write(number, at, buffers.slot.view[: len(piece)])
            seals[number] = checksum(content)

    def _copy_files(self) -> dict[str, CopiedFile]:
        copies = {}
        contents = {file.name: file.read_bytes() for file in self._subject.copied_files()}
        for name, content in (contents | self._subject.said_files()).items():
            self._draft.write_file(name, content)
            copies[name] = CopiedFile(len(content), checksum(content))
        return copies

    def _range(self, number: int) -> FileRange:
        place = self._places[number]
        return FileRange(self._draft.pack / file_name(place.file), place.offset, place.nbytes)

    def _manifest(self, seals: dict[int, int], copies: dict[str, CopiedFile]) -> Manifest:
        extents = [_extent(place, seals[n]) for n, place in enumerate(self._places)]
        numbers = {layout.id: number for number, layout in enumerate(self._layouts)}
        blocks = tuple(
            _packed(layout, extents[numbers[layout.id]] if layout.id in numbers else None)
            for layout in self._subject.layouts.values()
        )
        sums = tuple(
            PackedSums(table.block, table.name, table.run_rows, extent)
            for table, extent in zip(self._tables, extents[len(self._layouts) :], strict=True)
        )
        return Manifest(
            packing=PACKING_VERSION,
            scheme=self._subject.scheme,
            architecture=self._subject.architecture,
            name=self._subject.name,
            headers=self._subject.headers,
            dtypes=self._subject.dtypes,
            published_bytes=self._subject.published_bytes,
            files=file_sizes(self._places),
            copies=copies,
            blocks=blocks,
            sums=sums,
        )


def _summed_tables(subject: Subject, layouts: Sequence[BlockLayout]) -> Iterator[_SummedTable]:
    numbers = {layout.id: number for number, layout in enumerate(layouts)}
    for layout in subject.layouts.values():
        for name, table in layout.tables.items():
            rows = run_rows(table.row_bytes)
            spans = []
            for holder in table.holders:
                placed = _placed(subject.layouts[holder.block], holder.name)
                begin = placed.at[0]
                end = begin + (holder.end - holder.first) * table.row_bytes
                spans.append((numbers[holder.block], begin, end, rows * table.row_bytes))
            yield _SummedTable(layout.id, name, rows, tuple(spans))


def _placed(layout: BlockLayout, name: str) -> PlacedParam:
    return next(placed for placed in layout.placed if placed.param.spec.name == name)


def _extent(place: ExtentPlace, seal: int) -> Extent:
    return Extent(place.file, place.offset, place.nbytes, seal)


def _packed(layout: BlockLayout, extent: Extent | None) -> PackedBlock:
    if extent is None:
        return PackedBlock(layout.id, None, tuple(map(_shared, layout.tables.values())))
    return PackedBlock(layout.id, extent, tuple(map(_packed_param, layout.placed)))


def _packed_param(placed: PlacedParam) -> PackedParam:
    spec = placed.param.spec
    form = replace(placed.format, activations=Activations.FLOAT)
    published = placed.param.format
    return PackedParam(
        spec.name, placed.param.source, spec.shape, spec.rows, published, form, placed.at
    )


def _shared(table: Table) -> PackedParam:
    """A table that other blocks hold."""
    spec, published = table.param.spec, table.param.format
    return PackedParam(
        spec.name, table.param.source, spec.shape, spec.rows, published, published, ()
    )


def _work_bytes(layout: BlockLayout) -> int:
    """Bytes of the checkpoint that are read for a block."""
    return layout.parameter_bytes if is_table(layout) else layout.read_bytes

"""The jobs of a conversion: a block that is read and converted, a piece of a table that is copied.

Both leave in their slot exactly the bytes that go into the pack from offset `at` of extent number
`owner`, padding zeroed; `last` says that the extent ends there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from hmt.base.errors import HMTError, NumericsError
from hmt.base.trace import Tracer
from hmt.base.units import round_down, round_up
from hmt.contracts.blocks import Role
from hmt.contracts.checkpoint import FileRange
from hmt.contracts.store import Priority
from hmt.memory import PAGE_BYTES, DiskRead, ReadQueue
from hmt.weights.layout import BlockLayout, PlacedParam
from hmt.weights.pack.pipeline import Buffers, Finished, Job
from hmt.weights.store.block_load import BlockLoad, is_finite


@dataclass(frozen=True, slots=True)
class BlockJob(Job):
    """Reads and converts a whole block."""

    owner: int
    layout: BlockLayout
    tracer: Tracer
    at = 0
    last = True

    @property
    def nbytes(self) -> int:
        """Bytes of the extent that it makes."""
        return self.layout.slot_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that it reads."""
        return self.layout.read_bytes

    @override
    def start(self, buffers: Buffers, queue: ReadQueue, finished: Finished) -> None:

        def done(error: HMTError | None) -> None:
            try:
                if error is None:
                    _clear_padding(self.layout, buffers.slot.view)
            except Exception as caught:  # whoever waits must hear of it, whatever it is
                error = HMTError(f"packing {self.layout.id} failed: {caught!r}")
            finished(error)

        load = BlockLoad(
            self.layout,
            buffers.slot,
            buffers.staging,
            queue,
            self.tracer,
            check=True,
            finished=done,
        )
        load.start(Priority.PREFETCH)


@dataclass(frozen=True, slots=True)
class TableJob(Job):
    """Copies a piece of a table, which may be larger than any block and is never converted.

    data_bytes   of the table in this piece; what follows up to the page's end is zeroed
    """

    owner: int
    placed: PlacedParam
    at: int
    data_bytes: int
    last: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the extent that it makes."""
        return round_up(self.data_bytes, PAGE_BYTES)

    @property
    def read_bytes(self) -> int:
        """Bytes that it reads, alignment left out."""
        return self.data_bytes

    @override
    def start(self, buffers: Buffers, queue: ReadQueue, finished: Finished) -> None:
        assert buffers.staging is not None
        staging, slot = buffers.staging.tensor, buffers.slot.tensor
        reads: list[DiskRead] = []
        places: list[int] = []  # of what each read is for, in the staging buffer
        room = 0
        for data in self._ranges():
            end = data.offset + data.nbytes
            aligned = round_down(data.offset, PAGE_BYTES)
            behind = room + round_up(end, PAGE_BYTES) - aligned
            view = buffers.staging.view[room:behind]
            reads.append(DiskRead(data.path, aligned, view, end))
            places.append(room + data.offset - aligned)
            room = behind

        def done(error: HMTError | None) -> None:
            try:
                if error is None:
                    at = 0
                    for data, place in zip(self._ranges(), places, strict=True):
                        slot[at : at + data.nbytes] = staging[place : place + data.nbytes]
                        at += data.nbytes
                    slot[at : self.nbytes] = 0
                    if not is_finite(slot[: self.data_bytes].view(self.placed.format.dtype)):
                        error = NumericsError(
                            f"{self.placed.param.source} holds NaN or infinite numbers; the "
                            f"checkpoint in {reads[0].path.parent} is damaged: download it again"
                        )
            except Exception as caught:  # whoever waits must hear of it, whatever it is
                error = HMTError(f"copying {self.placed.param.source} failed: {caught!r}")
            finished(error)

        queue.submit(reads, Priority.PREFETCH, done)

    def _ranges(self) -> Iterator[FileRange]:
        """Where the piece is published: a part of a file, or of several shards."""
        first, end, begin = self.at, self.at + self.data_bytes, 0
        for part in self.placed.param.parts:
            low, high = max(first - begin, 0), min(end - begin, part.file.nbytes)
            if low < high:
                yield FileRange(part.file.path, part.file.offset + low, high - low)
            begin += part.file.nbytes


ConversionJob = BlockJob | TableJob


def is_table(layout: BlockLayout) -> bool:
    """Whether a block is a table of numbers alone, which is copied in pieces."""
    if len(layout.placed) != 1:
        return False
    param = layout.placed[0].param
    return param.spec.role is Role.TABLE and param.form is None


def shards_of(layout: BlockLayout) -> int:
    """In how many parts a table is published; 1 of other blocks."""
    return len(layout.placed[0].param.parts) if is_table(layout) else 1


def jobs_for(
    owner: int, layout: BlockLayout, tracer: Tracer, piece_bytes: int
) -> Iterator[ConversionJob]:
    """What makes the extent of `layout`, in order."""
    if not is_table(layout):
        yield BlockJob(owner, layout, tracer)
        return
    (placed,) = layout.placed
    total = layout.parameter_bytes
    for at in range(0, total, piece_bytes):
        size = min(piece_bytes, total - at)
        yield TableJob(owner, placed, at, size, at + size == total)


def _clear_padding(layout: BlockLayout, slot: memoryview) -> None:
    """Zero what no parameter covers, so that equal parameters make equal extents."""
    end = 0
    for begin, behind in sorted(_covered(layout)):
        slot[end:begin] = bytes(begin - end)
        end = behind
    slot[end : layout.slot_bytes] = bytes(layout.slot_bytes - end)


def _covered(layout: BlockLayout) -> Iterator[tuple[int, int]]:
    for placed in layout.placed:
        parts = placed.format.components(placed.param.spec.shape)
        for part, at in zip(parts, placed.at, strict=True):
            yield at, at + part.nbytes

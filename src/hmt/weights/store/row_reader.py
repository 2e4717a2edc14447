"""Looking up rows of a table (an embedding) that need not be in memory whole."""

import bisect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hmt.base.errors import DamagedPackError
from hmt.base.units import round_down, round_up
from hmt.contracts.blocks import BlockId
from hmt.contracts.checkpoint import FileRange
from hmt.contracts.encoding import WeightTensor
from hmt.kernels import ops
from hmt.memory import PAGE_BYTES, DiskRead, HostBuffer, HostPool, ReadQueue
from hmt.quant import empty_weight
from hmt.weights.checksum import SUM_BYTES, checksum, sum_at
from hmt.weights.layout import BlockLayout, RowHolder, RowSums, Table, TablePart


def row_span_bytes(table: Table) -> int:
    """The most bytes that reading one row of `table` takes: its run and the pages it straddles.

    And behind these the page of its checksum, where the table's are not all in memory.
    """
    pages = 1 + (table.sums is not None and not table.sums.kept_bytes)
    return round_up(table.run_rows * table.row_bytes, PAGE_BYTES) + pages * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows that are read together.

    first    its first row
    number   among all runs of the table
    """

    first: int
    number: int
    file: FileRange


_PAGE_SUMS = PAGE_BYTES // SUM_BYTES  # checksums of a page
_FEW_ROWS = 16  # so many are found one by one in less time than all in a table of eight pieces


class RowReader:
    """Reads rows from the blocks that hold them, or straight from the file."""

    def __init__(self, queue: ReadQueue, pool: HostPool, *, verify: bool = True) -> None:
        """`pool` holds the buffer for rows on disk, and the checksums of a pack's rows.

        One batch of a lookup at a time uses all of it.  Without `verify` rows of packs are not
        checked.
        """
        self._queue = queue
        self._pool = pool
        self._verify = verify
        self._sums: dict[RowSums, HostBuffer] = {}
        self._lock = threading.Lock()

    @staticmethod
    def from_memory(
        layout: BlockLayout,
        name: str,
        ids: torch.Tensor,
        views: Callable[[BlockId], Mapping[str, WeightTensor]],
    ) -> torch.Tensor:
        """Rows `ids` [n] out of blocks that are all in memory: [n, width], f32 if of codes."""
        table = layout.tables[name]
        form = table.param.format
        if not form.encoding.is_float:
            distinct, back = torch.unique(ids, return_inverse=True)
            found = [_numbers(table.holders, index, views) for index in distinct.tolist()]
            return torch.cat(found)[back]
        if len(table.holders) == 1:
            only = table.holders[0]
            return views(only.block)[only.name].data[ids - only.first]
        if len(ids) <= _FEW_ROWS:
            return torch.stack([_row(table.holders, index, views) for index in ids.tolist()])
        rows = torch.empty(len(ids), table.width, dtype=form.dtype)
        firsts = torch.tensor([holder.first for holder in table.holders])
        order = torch.searchsorted(firsts, ids, right=True) - 1
        for number in sorted(set(order.tolist())):  # a table may have hundreds of shards
            here, holder = order == number, table.holders[number]
            rows[here] = views(holder.block)[holder.name].data[ids[here] - holder.first]
        return rows

    def from_disk(self, layout: BlockLayout, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [n], each distinct one read once: [n, width], f32 if of codes.

        Raises DiskReadError, and DamagedPackError for rows that are not those that were packed.
        """
        table = layout.tables[name]
        distinct, back = torch.unique(ids, return_inverse=True)
        parts, done = [], 0
        while done < len(distinct):
            with self._lock:  # of another lookup, a batch may come between
                sums = self._checksums(table)
                held = sum(buffer.nbytes for buffer in self._sums.values())
                room = self._pool.account.limit_bytes - held
                batch = distinct[done : done + max(1, room // row_span_bytes(table))]
                parts.append(self._read_batch(table, batch.tolist(), sums))
            done += len(batch)
        return torch.cat(parts)[back]

    def _read_batch(self, table: Table, ids: list[int], sums: memoryview | None) -> torch.Tensor:
        """Rows `ids`, which ascend: [n, width]."""
        parts = {part.name: self._read_part(table, part, ids, sums) for part in table.parts}
        form, own = table.param.form, table.param.format
        if form is None:
            return parts["data"].view(own.dtype)
        found = empty_weight(own, (len(ids), table.width))
        form.unpack({name: part.view(-1) for name, part in parts.items()}, found, 0)
        return ops.dequantize(found, torch.float32)

    def close(self) -> None:
        """Give back what is held between lookups."""
        while self._sums:
            self._pool.free(self._sums.popitem()[1])

    def _checksums(self, table: Table) -> memoryview | None:
        """The checksums of `table`'s runs, read and checked once; None where they are not kept."""
        sums = table.sums
        if sums is None or not sums.kept_bytes or not self._verify:
            return None
        if sums not in self._sums:
            buffer, file = self._pool.allocate(sums.file.nbytes), sums.file
            view = buffer.view[: file.nbytes]
            try:
                end = file.offset + file.nbytes
                self._queue.read([DiskRead(file.path, file.offset, view, end)])
                if checksum(view) != sums.seal:
                    raise _damaged(f"the checksums of {table.param.source}", file)
            except BaseException:
                self._pool.free(buffer)
                raise
            self._sums[sums] = buffer
        return self._sums[sums].view

    def _read_part(
        self, table: Table, part: TablePart, ids: list[int], sums: memoryview | None
    ) -> torch.Tensor:
        """Rows `ids`, which ascend, of one part: uint8 [n, row_bytes]."""
        runs = _runs_of(table, part, ids)
        span = row_span_bytes(table)
        paged = table.sums if self._verify and sums is None else None
        buffer = self._pool.allocate(span * len(runs))
        try:
            reads, starts = [], []
            for at, run in zip(range(0, span * len(runs), span), runs, strict=True):
                begin, end = run.file.offset, run.file.offset + run.file.nbytes
                aligned = round_down(begin, PAGE_BYTES)
                view = buffer.view[at : at + round_up(end, PAGE_BYTES) - aligned]
                reads.append(DiskRead(run.file.path, aligned, view, end))
                starts.append(at + begin - aligned)
                if paged is not None:
                    first = paged.file.offset + run.number // _PAGE_SUMS * PAGE_BYTES
                    view = buffer.view[at + span - PAGE_BYTES : at + span]
                    reads.append(DiskRead(paged.file.path, first, view, first + PAGE_BYTES))
            self._queue.read(reads)
            if sums is not None or paged is not None:
                for number, (run, start) in enumerate(zip(runs, starts, strict=True), 1):
                    content = buffer.view[start : start + run.file.nbytes]
                    page = buffer.view[number * span - PAGE_BYTES : number * span]
                    own = (page, run.number % _PAGE_SUMS) if sums is None else (sums, run.number)
                    if checksum(content) != sum_at(*own):
                        last = run.first + run.file.nbytes // part.row_bytes - 1
                        rows = f"rows {run.first} to {last} of {table.param.source}"
                        raise _damaged(rows, run.file)
            return self._pick(part, ids, runs, starts, buffer)
        finally:
            self._pool.free(buffer)

    @staticmethod
    def _pick(
        part: TablePart, ids: list[int], runs: list[_Run], starts: list[int], buffer: HostBuffer
    ) -> torch.Tensor:
        firsts = [run.first for run in runs]
        rows = []
        for row in ids:
            which = bisect.bisect_right(firsts, row) - 1
            begin = starts[which] + (row - firsts[which]) * part.row_bytes
            rows.append(buffer.tensor[begin : begin + part.row_bytes])
        return torch.stack(rows)


def _runs_of(table: Table, part: TablePart, ids: list[int]) -> list[_Run]:
    """The runs that hold rows `ids`, which ascend, of one part."""
    runs: list[_Run] = []
    end, before = 0, 0  # behind the last run; runs in the spans before this one
    spans = iter(part.spans)
    span = next(spans)
    for row in ids:
        if row < end:
            continue
        while row >= span.end:
            before += -(-(span.end - span.first) // table.run_rows)
            span = next(spans)
        number = (row - span.first) // table.run_rows
        first = span.first + number * table.run_rows
        end = min(first + table.run_rows, span.end)
        begin = span.file.offset + (first - span.first) * part.row_bytes
        where = FileRange(span.file.path, begin, (end - first) * part.row_bytes)
        runs.append(_Run(first, before + number, where))
    return runs


def _damaged(what: str, file: FileRange) -> DamagedPackError:
    return DamagedPackError(
        f"{file.path}: {what}, {file.nbytes} bytes at offset {file.offset}, are not those that "
        "were written: `hmt verify` lists all damage; convert the checkpoint again"
    )


def _row(
    holders: Sequence[RowHolder], index: int, views: Callable[[BlockId], Mapping[str, WeightTensor]]
) -> torch.Tensor:
    holder = next(holder for holder in holders if holder.first <= index < holder.end)
    return views(holder.block)[holder.name].data[index - holder.first]


def _numbers(
    holders: Sequence[RowHolder], index: int, views: Callable[[BlockId], Mapping[str, WeightTensor]]
) -> torch.Tensor:
    """One row of codes as numbers: f32 [1, width]."""
    holder = next(holder for holder in holders if holder.first <= index < holder.end)
    row = slice(index - holder.first, index - holder.first + 1)
    return ops.dequantize(views(holder.block)[holder.name], torch.float32, row)

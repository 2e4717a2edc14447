"""Looking up rows of a table (an embedding) that need not be in memory whole."""

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from hmt.base.units import round_down, round_up
from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.memory import PAGE_BYTES, DiskRead, HostPool, TransferQueue
from hmt.weights.binding import BoundParam
from hmt.weights.layout import BlockLayout, RowHolder, Table

_DTYPES = {
    Encoding.F32: torch.float32,
    Encoding.F16: torch.float16,
    Encoding.BF16: torch.bfloat16,
}


def row_span_bytes(param: BoundParam) -> int:
    """The most bytes that reading one row of `param` takes: the row and the pages it straddles."""
    row_bytes = param.data.nbytes // param.spec.shape[0]
    return round_up(row_bytes, PAGE_BYTES) + PAGE_BYTES


_FEW_ROWS = 16  # so many are found one by one in less time than all in a table of eight pieces


class RowReader:
    """Reads rows from the blocks that hold them, or straight from the file."""

    def __init__(self, queue: TransferQueue, pool: HostPool) -> None:
        """`pool` holds the buffer for rows on disk; one lookup at a time uses all of it."""
        self._queue = queue
        self._pool = pool
        self._lock = threading.Lock()

    @staticmethod
    def from_memory(
        layout: BlockLayout,
        name: str,
        ids: torch.Tensor,
        views: Callable[[BlockId], Mapping[str, WeightTensor]],
    ) -> torch.Tensor:
        """Rows `ids` [n] out of blocks that are all in memory: [n, width]."""
        table = layout.tables[name]
        if len(table.holders) == 1:
            only = table.holders[0]
            return views(only.block)[only.name].data[ids - only.first]
        if len(ids) <= _FEW_ROWS:
            return torch.stack([_row(table.holders, index, views) for index in ids.tolist()])
        rows = torch.empty(len(ids), table.width, dtype=_DTYPES[table.param.encoding])
        for holder in table.holders:
            here = (ids >= holder.first) & (ids < holder.end)
            rows[here] = views(holder.block)[holder.name].data[ids[here] - holder.first]
        return rows

    def from_disk(self, layout: BlockLayout, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [n], each distinct one read once: [n, width].  Raises DiskReadError."""
        table = layout.tables[name]
        distinct, back = torch.unique(ids, return_inverse=True)
        span = row_span_bytes(table.param)
        with self._lock:
            batch = max(1, self._pool.account.limit_bytes // span)
            parts = [self._read_batch(table, span, part.tolist()) for part in distinct.split(batch)]
        return torch.cat(parts)[back]

    def _read_batch(self, table: Table, span: int, ids: list[int]) -> torch.Tensor:
        data = table.param.data
        row_bytes = data.nbytes // table.param.spec.shape[0]
        buffer = self._pool.allocate(span * len(ids))
        try:
            reads, starts = [], []
            for at, row in enumerate(ids):
                begin = data.offset + row * row_bytes
                aligned = round_down(begin, PAGE_BYTES)
                length = round_up(begin + row_bytes, PAGE_BYTES) - aligned
                view = buffer.view[at * span : at * span + length]
                reads.append(DiskRead(data.path, aligned, view, begin + row_bytes))
                starts.append(at * span + begin - aligned)
            self._queue.read(reads)
            rows = torch.stack([buffer.tensor[start : start + row_bytes] for start in starts])
            return rows.view(_DTYPES[table.param.encoding])
        finally:
            self._pool.free(buffer)


def _row(
    holders: Sequence[RowHolder], index: int, views: Callable[[BlockId], Mapping[str, WeightTensor]]
) -> torch.Tensor:
    holder = next(holder for holder in holders if holder.first <= index < holder.end)
    return views(holder.block)[holder.name].data[index - holder.first]

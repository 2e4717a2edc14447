"""Rows of tables on disk that are asked for ahead: read while layers before them are computed."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from hmt.base.errors import RequestError
from hmt.base.trace import Tracer
from hmt.contracts.blocks import BlockId
from hmt.weights.layout import BlockLayout, Table
from hmt.weights.store.row_reader import RowReader


class RowLookup:
    """Looks rows up through a `RowReader`: when they are wanted, or from when they are known.

    A thread of its own reads what was asked for ahead, one lookup after the other; it is there from
    the first one on.
    """

    def __init__(self, reader: RowReader, tracer: Tracer) -> None:
        """`tracer` hears of waiting."""
        self._reader = reader
        self._tracer = tracer
        self._worker: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        # By block and table: the rows that are wanted next, and they.
        self._asked: dict[tuple[BlockId, str], tuple[torch.Tensor, Future[torch.Tensor]]] = {}

    def request(self, layout: BlockLayout, name: str, ids: torch.Tensor) -> None:
        """Begin to read rows `ids` of a table on disk.  Forget what was asked of it before."""
        if not_in(layout.tables[name], ids):
            return  # `rows` says so
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "rows of tables")
            self._forget(layout.id, name)
            found = self._worker.submit(self._reader.from_disk, layout, name, ids)
            self._asked[layout.id, name] = ids, found

    def rows(self, layout: BlockLayout, name: str, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Rows `ids` of a table on disk, and how many seconds it took to wait for them.

        Raises what reading them raised.
        """
        begin = time.perf_counter()
        with self._lock:
            wanted, found = self._asked.pop((layout.id, name), (None, None))
        if found is not None and wanted is not None and torch.equal(wanted, ids):
            rows = found.result()
        else:
            rows = self._reader.from_disk(layout, name, ids)
        end = time.perf_counter()
        self._tracer.record("wait", "disk", rows.nbytes, begin, end, layout.id)
        return rows, end - begin

    def abandon(self) -> None:
        """Forget what was asked for."""
        with self._lock:
            for block, name in list(self._asked):
                self._forget(block, name)

    def close(self) -> None:
        """End reading, and give back what is held between lookups."""
        self.abandon()
        if self._worker is not None:
            self._worker.shutdown()
        self._reader.close()

    def _forget(self, block: BlockId, name: str) -> None:
        _, found = self._asked.pop((block, name), (None, None))
        if found is not None:
            found.cancel()


def not_in(table: Table, ids: torch.Tensor) -> list[int]:
    """Those of `ids` that are no rows of `table`."""
    wrong: list[int] = ids[(ids < 0) | (ids >= table.param.spec.shape[0])].tolist()
    return wrong


def check_rows(table: Table, ids: torch.Tensor) -> None:
    """Raise RequestError unless all of `ids` are rows of `table`."""
    if wrong := not_in(table, ids):
        rows = table.param.spec.shape[0]
        raise RequestError(f"token ids {wrong[:8]} are not all in 0..{rows - 1}")

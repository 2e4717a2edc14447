"""Rows of a pack's table, whatever its sizes: right, read once, and any damaged byte found."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hmt.base.errors import DamagedPackError
from hmt.base.trace import Tracer
from hmt.base.units import round_up
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, ParamSpec, Role
from hmt.contracts.checkpoint import FileRange
from hmt.contracts.encoding import Encoding
from hmt.contracts.plan import Tier
from hmt.memory import HostPool, Ledger, PreadReader, ReadQueue
from hmt.quant import Format
from hmt.weights import layout
from hmt.weights.binding import BoundParam, BoundPart
from hmt.weights.checksum import RunSums, checksum, pack_sums
from hmt.weights.layout import BlockLayout, RowSpan, RowSums, Table, TablePart
from hmt.weights.pack.extents import run_rows
from hmt.weights.store.row_reader import RowReader, row_span_bytes

BLOCK = BlockId(TRUNK, BlockKind.EMBEDDING)


def write_table(
    file: Path, spans: list[int], width: int, gap_bytes: int
) -> tuple[Table, torch.Tensor]:
    """A table in `file`, its spans apart from each other, checksums of its rows behind it."""
    rows = torch.randn(sum(spans), width, generator=torch.Generator().manual_seed(width)).bfloat16()
    content, places, sums, first = b"", [], [], 0
    run = run_rows(2 * width)
    for count in spans:
        content += b"\xff" * gap_bytes
        raw = rows[first : first + count].view(torch.uint8).numpy().tobytes()
        places.append(RowSpan(first, first + count, FileRange(file, len(content), len(raw))))
        own = RunSums(0, len(raw), run * 2 * width)
        own.add(0, memoryview(raw))
        sums += own.sums
        content += raw
        first += count
    content += bytes(-len(content) % 4096)
    packed = pack_sums(sums)
    packed += bytes(-len(packed) % 4096)
    file.write_bytes(content + packed)
    spec = ParamSpec("weight", (first, width), ("table",), Role.TABLE)
    nowhere = BoundPart("data", FileRange(file, 0, 0), 2 * width)
    param = BoundParam(spec, "table", Format(Encoding.BF16), (nowhere,))
    stored = RowSums(run, FileRange(file, len(content), len(packed)), checksum(packed))
    return Table(param, (), (TablePart("data", 2 * width, tuple(places)),), stored), rows


class Lookup:
    """A RowReader over one table, with room for `batch` rows at a time."""

    def __init__(self, table: Table, batch: int) -> None:
        assert table.sums is not None
        self.layout = BlockLayout(BLOCK, 0, (), (), (), {"weight": table})
        room = round_up(batch * row_span_bytes(table), 4096) + table.sums.file.nbytes
        self.ledger = Ledger({Tier.HOST: room})
        self.pool = HostPool(self.ledger.open(Tier.HOST, "rows", room))
        self.queue = ReadQueue(PreadReader(), Tracer(), depth=2)
        self.reader = RowReader(self.queue, self.pool)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.reader.from_disk(self.layout, "weight", ids)

    def close(self) -> None:
        self.queue.close()
        self.reader.close()
        self.pool.close()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    spans=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    width=st.sampled_from([3, 64, 100, 700, 2048, 3000]),
    gap_bytes=st.sampled_from([0, 64, 4096]),
    batch=st.integers(1, 5),
    kept=st.booleans(),
    data=st.data(),
)
def test_rows_are_right_and_damage_is_found(
    tmp_path: Path,
    spans: list[int],
    width: int,
    gap_bytes: int,
    batch: int,
    kept: bool,
    data: st.DataObject,
) -> None:
    """Whether checksums are all kept in memory, or read with the rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MOST_KEPT_SUM_BYTES", 4096 * kept * len(spans))
        _check_rows(tmp_path, spans, width, gap_bytes, batch, data)


def _check_rows(
    tmp_path: Path, spans: list[int], width: int, gap_bytes: int, batch: int, data: st.DataObject
) -> None:
    file = tmp_path / "table"
    table, rows = write_table(file, spans, width, gap_bytes)
    ids = torch.tensor(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=50)))
    lookup = Lookup(table, batch)
    assert torch.equal(lookup.rows(ids), rows[ids])
    assert torch.equal(lookup.rows(ids), rows[ids])
    lookup.close()
    bad = data.draw(st.sampled_from(ids.tolist()))
    (span,) = [span for span in table.parts[0].spans if span.first <= bad < span.end]
    at = (
        span.file.offset + (bad - span.first) * 2 * width + data.draw(st.integers(0, 2 * width - 1))
    )
    content = bytearray(file.read_bytes())
    content[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    lookup = Lookup(table, batch)
    with pytest.raises(DamagedPackError, match=r"rows .* of table"):
        lookup.rows(ids)
    run = (bad - span.first) // table.run_rows
    good = [
        row
        for row in ids.tolist()
        if not (span.first <= row < span.end and (row - span.first) // table.run_rows == run)
    ]
    if good:
        assert torch.equal(lookup.rows(torch.tensor(good)), rows[good])
    lookup.close()

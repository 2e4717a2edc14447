"""Attention over pages that lie in host memory, for layers that compute elsewhere."""

from typing import Any

import torch

from hmt.base.units import MIB
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import ops
from hmt.kvcache.merging import Merged

# Tokens of a run from which its pages come to the device, since the CPU would compute for longer
# than the link copies: 16 rows a head make it compute about as long as it reads.
MANY = 16
_PIECE_BYTES = 64 * MIB  # of keys and values that are on their way to a device at once


class Query:
    """A step's queries, where attention is computed: here, and in host memory once asked for."""

    def __init__(self, query: torch.Tensor) -> None:
        self.here = query
        self._there: torch.Tensor | None = query if query.is_cpu else None

    @property
    def there(self) -> torch.Tensor:
        """In host memory."""
        if self._there is None:
            self._there = self.here.cpu()
        return self._there


def attend_far(
    pages: ops.Pages, layer: int, runs: ops.PagedRuns, query: Query, part: Merged, **options: Any
) -> None:
    """`ops.attend_part` of whole pages in host memory into `part`, which is where the query is.

    On the CPU, in place; but runs of many tokens have their pages brought to the device.
    """
    if query.here.is_cpu:
        ops.attend_part(pages, layer, runs, query.here, part.out, part.lse, **options)
        return
    few = [run for run in runs.runs if run.length < MANY]
    if few:
        rows = _rows(few)
        theirs = Merged(part.out.shape, torch.device("cpu"))
        ops.attend_part(
            pages, layer, ops.PagedRuns(few), query.there, theirs.out, theirs.lse, **options
        )
        at = rows.to(query.here.device)
        part.out[at] = theirs.out[rows].to(part.out.device)
        part.lse[at] = theirs.lse[rows].to(part.lse.device)
    for run in runs.runs:
        if run.length >= MANY:
            _attend_brought(pages, layer, run, query.here, part, **options)


def _attend_brought(
    pages: ops.Pages,
    layer: int,
    run: ops.PagedRun,
    query: torch.Tensor,
    part: Merged,
    **options: Any,
) -> None:
    """A run over copies of its pages, some at a time."""
    layout, device = pages.layout, query.device
    rows = slice(run.offset, run.offset + run.length)
    found = Merged(part.out[rows].shape, device)
    for table in run.table.split(max(1, _PIECE_BYTES // layout.page_bytes)):
        copied = ops.Pages(layout, pages.memory[table, layer].to(device)[:, None])
        tokens = PAGE_TOKENS * len(table)
        numbers = torch.arange(len(table), device=device)
        key, value = ops.read_pages(copied, 0, numbers, tokens)
        key, value = key.to(query.dtype), value.to(query.dtype)
        piece = found.like()
        out, lse = ops.attention(query[rows], key, value, start=tokens, **options)
        piece.out, piece.lse = out.float(), lse
        found.add(piece)
    part.out[rows], part.lse[rows] = found.out, found.lse


def _rows(runs: list[ops.PagedRun]) -> torch.Tensor:
    return torch.cat([torch.arange(run.offset, run.offset + run.length) for run in runs])

"""Attention over pages that lie in host memory, for layers that compute elsewhere."""

from collections.abc import Iterator
from typing import Any

import torch

from hmt.base.units import MIB
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import ops, page_copies
from hmt.kernels.backend_registry import backend_of
from hmt.kvcache.offload.attention_merge import LseMerge
from hmt.memory.device import wait_for_stream

# Tokens of a run from which its pages come to the device, since the CPU would compute for longer
# than the link copies: 16 rows a head make it compute about as long as it reads.
MANY_TOKENS = 16
_PIECE_BYTES = 64 * MIB  # of keys and values that are on their way to a device at once


class Query:
    """A step's queries, where attention is computed: here, and in host memory once asked for."""

    def __init__(self, query: torch.Tensor, there: torch.Tensor | None = None) -> None:
        """`there`: the same in host memory, if it is there already."""
        self.here = query
        self._there = query if backend_of(query).on_host else there

    @property
    def there(self) -> torch.Tensor:
        """In host memory."""
        if self._there is None:
            self._there = self.here.cpu()
        return self._there


PageChunks = Iterator[tuple[ops.Pages, int, ops.AttentionMetadata]]  # pages, layer in them, runs


def attend_on_host(chunks: PageChunks, query: Query, merged: LseMerge, **options: Any) -> None:
    """Add attention over whole pages in host memory to `merged`, which is where the query is.

    On the CPU, in place; but runs of many tokens have their pages brought to the device.
    """
    if backend_of(query.here).on_host:
        attend_in_chunks(chunks, query.here, merged, **options)
        return
    few: list[LseMerge] = []

    def left() -> PageChunks:
        for pages, layer, runs in chunks:
            for run in runs.runs:
                if run.length >= MANY_TOKENS:
                    _attend_copied(pages, layer, run, query.here, merged, **options)
            if some := [run for run in runs.runs if run.length < MANY_TOKENS]:
                if not few:
                    few.append(LseMerge(merged.out.shape, torch.device("cpu")))
                yield pages, layer, ops.AttentionMetadata(some)

    for piece in left():
        attend_in_chunks(iter([piece]), query.there, few[0], **options)
    for part in few:
        merged.add(part.to(merged.out.device))


def attend_in_chunks(
    chunks: PageChunks, query: torch.Tensor, merged: LseMerge, **options: Any
) -> None:
    """Add attention over whole pages to `merged`; all is in host memory, and computed there."""
    for pages, layer, runs in chunks:
        part = merged.like()
        ops.attend_part(pages, layer, runs, query, part.out, part.lse, **options)
        merged.add(part)


def attend_into(chunks: PageChunks, query: torch.Tensor, merged: LseMerge, **options: Any) -> None:
    """Attention over whole pages instead of what `merged` holds, in the same memory.

    All is in host memory, and computed there.
    """
    merged.out.zero_()
    merged.lse.fill_(-torch.inf)
    for number, (pages, layer, runs) in enumerate(chunks):
        part = merged.like() if number else merged
        ops.attend_part(pages, layer, runs, query, part.out, part.lse, **options)
        if number:
            merged.add_rows(slice(None), part)


def _attend_copied(
    pages: ops.Pages,
    layer: int,
    run: ops.PagedSegment,
    query: torch.Tensor,
    merged: LseMerge,
    **options: Any,
) -> None:
    """A run over copies of its pages, some at a time."""
    layout = pages.layout
    rows = slice(run.offset, run.offset + run.length)
    found = LseMerge(merged.out[rows].shape, query.device)
    for table in run.table.split(max(1, _PIECE_BYTES // layout.page_bytes)):
        key, value = _copied_to_host(pages, layer, table, query)
        piece = found.like()
        out, lse = ops.attention(query[rows], key, value, start=len(key), **options)
        piece.out, piece.lse = out.float(), lse
        found.add(piece)
    merged.add_rows(rows, found)
    wait_for_stream(query.device)  # the next pages may be read to where these are


def _copied_to_host(
    pages: ops.Pages, layer: int, table: torch.Tensor, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [16 * pages, heads, dim] of pages in host memory, where the query is."""
    layout, device = pages.layout, query.device
    tokens = PAGE_TOKENS * len(table)
    near = ops.PageLayout(
        ops.PageEncoding.of(query.dtype), layout.heads, layout.key_dim, layout.value_dim,
        layout.latent, rows=True,
    )  # fmt: skip
    if pages.memory.is_pinned() and page_copies.can_copy_pages(device, near, layout):
        key = query.new_empty(tokens, layout.heads, layout.key_dim)
        value = key[..., : layout.value_dim]
        if not layout.latent:
            value = query.new_empty(tokens, layout.heads, layout.value_dim)
        page_copies.fetch_rows(key, value, pages, layer, table)
        return key, value
    copied = ops.Pages(layout, pages.memory[table, layer].to(device)[:, None])
    numbers = torch.arange(len(table), device=device)
    key, value = ops.read_pages(copied, 0, numbers, tokens)
    return key.to(query.dtype), value.to(query.dtype)

"""Attention over pages through the compiled extension, which reads them where they lie.

Sums are f32.  bf16 queries meet bf16 pages in VDPBF16PS where the processor has it, with weights
rounded to bf16.  A row's result depends on its run's length, start and numbers only.

The extension computes on as many threads as torch would on the calling thread.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels.cpu.abi import DTYPES
from hmt.kernels.reference.kv_pages import (
    AttentionMetadata,
    PagedSegment,
    PageEncoding,
    PageLayout,
    Pages,
)


def append_pages(
    native: ModuleType,
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    key: Tensor,
    value: Tensor | None,
) -> None:
    """`reference.append_pages` by the extension, to the bit."""
    key = _side_by_side(key)
    value = key if value is None else _side_by_side(value)
    native.append_pages(
        native_pages(native, pages),
        layer,
        native_runs(native, runs),
        key.data_ptr(),
        DTYPES[key.dtype],
        *key.stride()[:2],
        value.data_ptr(),
        DTYPES[value.dtype],
        *value.stride()[:2],
        torch.get_num_threads(),
    )


def takes(key: Tensor, value: Tensor) -> bool:
    """Whether `attention` does: pages hold them as they are."""
    if key.dtype != value.dtype or not len(key):
        return False
    return key.shape[2] % (4 // key.element_size()) == 0


def attention(
    native: ModuleType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    start: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`reference.attention` by the extension, over pages that keys and values are copied to.

    As much memory as they take, in place of scores in f32.  Queries are rounded to the type of
    keys: f32 ones that were made of it change nothing.
    """
    queries, q_heads, _ = query.shape
    context, heads, key_dim = key.shape
    layout = PageLayout(PageEncoding.of(key.dtype), heads, key_dim, value.shape[2])
    count = -(-context // PAGE_TOKENS)
    pages = Pages(layout, torch.empty((count, 1, layout.page_bytes), dtype=torch.uint8))
    pages.memory[-1:].zero_()  # what stands behind the last position is multiplied with 0
    table = torch.arange(count)
    append_pages(
        native, pages, 0, AttentionMetadata([PagedSegment(0, context, 0, table)]), key, value
    )
    out = torch.empty(queries, q_heads, value.shape[2], dtype=query.dtype)
    lse = torch.empty(queries, q_heads)
    runs = AttentionMetadata([PagedSegment(0, queries, start, table, context)])
    attend_into(native, pages, 0, runs, query.to(key.dtype), out, lse, **options)
    return out, lse


def paged_attention(
    native: ModuleType,
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    query: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """`reference.paged_attention` by the extension: out [tokens, q_heads, value_dim].

    sinks   f32, contiguous
    lse     f32 [tokens, q_heads], contiguous, is written where it is given
    """
    tokens, heads, _ = query.shape
    out = query.new_empty(tokens, heads, pages.layout.value_dim)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    attend_into(native, pages, layer, runs, query, out, lse, **options)
    return out


def attend_into(
    native: ModuleType,
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    query: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """`reference.attend_part`; out may be of any float dtype, and lse left out."""
    query = _side_by_side(query)
    layout, heads = pages.layout, query.shape[1]
    assert heads % layout.heads == 0 and query.shape[2] == layout.key_dim
    assert out.is_contiguous() and (lse is None or lse.is_contiguous())
    native.attend_pages(
        native_pages(native, pages),
        layer,
        native_runs(native, runs),
        query.data_ptr(),
        DTYPES[query.dtype],
        *query.stride()[:2],
        heads,
        scale,
        window,
        softcap,
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        DTYPES[out.dtype],
        0 if lse is None else lse.data_ptr(),
        torch.get_num_threads(),
    )


def page_masses(
    native: ModuleType,
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    query: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
) -> list[Tensor]:
    """`reference.page_masses` by the extension, of runs that see whole pages."""
    query = _side_by_side(query)
    heads, found = query.shape[1], []
    for run in runs.runs:
        row, pages_seen = run.offset + run.length - 1, run.context // PAGE_TOKENS
        logs = lse[row].float().contiguous()
        masses = torch.empty(pages_seen)
        last = AttentionMetadata([run._replace(offset=row, length=1)])
        native.page_masses(
            native_pages(native, pages),
            layer,
            native_runs(native, last),
            pages_seen,
            query.data_ptr(),
            DTYPES[query.dtype],
            *query.stride()[:2],
            heads,
            scale,
            softcap,
            logs.data_ptr(),
            masses.data_ptr(),
            torch.get_num_threads(),
        )
        found.append(masses)
    return found


def append_attend_pages(
    native: ModuleType,
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    heads: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference.append_attend_pages` in one call; `heads` is contiguous."""
    tokens, _, dim = heads.shape
    dtype = heads.dtype
    queries = heads.shape[1] - 2 * pages.layout.heads
    out = torch.empty((tokens, queries * dim), dtype=dtype)
    native.append_attend_pages(
        native_pages(native, pages),
        layer,
        native_runs(native, runs),
        heads.data_ptr(),
        DTYPES[dtype],
        queries,
        scale,
        window,
        softcap,
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _side_by_side(rows: Tensor) -> Tensor:
    """Rows whose numbers lie one after the other."""
    return rows if rows.stride(2) == 1 else rows.contiguous()


def native_pages(native: ModuleType, pages: Pages) -> Any:
    """The extension's own description, made once, as the memory of pages does not move."""
    if pages.native is not None:
        return pages.native
    layout, memory = pages.layout, pages.memory
    assert not layout.rows, "compiled kernels take words"
    pages.native = native.make_pages(
        int(layout.encoding),
        layout.heads,
        layout.key_dim,
        layout.value_dim,
        layout.latent,
        memory.data_ptr(),
        memory.stride(0),
    )
    assert pages.native.layer_bytes == layout.page_bytes
    return pages.native


def native_runs(native: ModuleType, runs: AttentionMetadata) -> Any:
    """The extension's own description, made once for all layers of a step."""
    if runs.native is not None:
        return runs.native
    items = []
    for offset, length, start, table, seen in runs.runs:
        assert table.dtype == torch.int64 and table.is_contiguous()
        items.append((offset, length, start, table.data_ptr(), -1 if seen is None else seen))
    runs.native = native.make_runs(tuple(items))
    return runs.native

"""Attention over pages on the GPU: `reference.paged_attention` and what goes with it.

Sums are f32.  Queries and pages of one 16-bit type meet in tensor cores, with weights rounded to
that type; INT8 pages meet bf16 queries in bf16; any other pair is computed in f32, which is exact
and slow.  How a short run's context is cut depends on that run alone, so the number of its
neighbours changes no bit of it; sizes of tiles follow the longest short run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.kernels import reference
from hmt.kernels.reference.pages import PagedRuns, PageEncoding, Pages
from hmt.kernels.triton.attend_kernels import attend_kernel, merge_kernel
from hmt.kernels.triton.pages import append_pages, page_words
from hmt.kernels.triton.plans import MOST_PARTS, Plan, front_words, plan_of
from hmt.kernels.triton.runs import DeviceRuns, device_runs

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MERGED_NUMBERS = 32  # of a row, in a program of `merge_kernel`


def paged_attention(
    pages: Pages,
    layer: int,
    runs: PagedRuns,
    query: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.paged_attention`: out [tokens, q_heads, value_dim], lse f32 [tokens, q_heads].

    Rows of tokens that no run holds are not written.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if not can_attend(pages, query):
        return reference.paged_attention(pages, layer, runs, query, **options)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    return _attend(pages, layer, runs, query, **options, lse=lse), lse


def paged_attention_output(
    pages: Pages,
    layer: int,
    runs: PagedRuns,
    query: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` without the log-sum-exp."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if not can_attend(pages, query):
        return reference.paged_attention_output(pages, layer, runs, query, **options)
    return _attend(pages, layer, runs, query, **options, lse=None)


def append_attend_pages(
    pages: Pages,
    layer: int,
    runs: PagedRuns,
    heads: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `reference.append_attend_pages`: [tokens, q_heads * dim]."""
    kv_heads = pages.layout.heads
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    append_pages(pages, layer, runs, key, value)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    plain = not window and not softcap and sinks is None
    if not plain or pages.layout.encoding.dtype != heads.dtype or not can_attend(pages, query):
        return paged_attention_output(pages, layer, runs, query, **options).flatten(1)
    # Runs that begin a sequence see nothing but their own keys, and pages keep those as they are.
    # Torch's fused kernel reads them where they lie: 2048 tokens, 32 heads of 128 with keys of
    # their own take 83 us on an H200; out of pages, 8 KV heads, 259 us.
    out = _attend(pages, layer, runs, query, **options, lse=None, begun=False)
    for held in device_runs(runs, heads.device):
        for run in held.begun:
            rows = slice(run.offset, run.offset + run.length)
            out[rows] = reference.attention_output(
                query[rows], key[rows], value[rows], start=0, scale=scale
            )
    return out.flatten(1)


def can_attend(pages: Pages, query: Tensor) -> bool:
    """Whether there is a kernel: INT4 has none, nor have queries of other types than floats."""
    return pages.layout.encoding is not PageEncoding.INT4 and query.dtype in _TYPES


def _attend(
    pages: Pages,
    layer: int,
    runs: PagedRuns,
    query: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    lse: Tensor | None,
    begun: bool = True,
) -> Tensor:
    """Attention of all runs, or of all but those that begin a sequence."""
    tokens, q_heads, _ = query.shape
    layout = pages.layout
    assert q_heads % layout.heads == 0 and query.shape[2] == layout.key_dim
    if query.stride(2) != 1:
        query = query.contiguous()
    if sinks is not None:
        sinks = sinks.float().contiguous()
    out = query.new_empty(tokens, q_heads, layout.value_dim)
    for held in device_runs(runs, query.device):
        if held.begun and not begun:
            continue
        plan = plan_of(layout, q_heads // layout.heads, held, window, compute_type(pages, query))
        _launch(pages, layer, held, plan, query, out, lse, sinks, (scale, window, softcap))
    return out


def compute_type(pages: Pages, query: Tensor) -> torch.dtype:
    """What numbers are multiplied in."""
    encoding = pages.layout.encoding
    same = encoding.dtype == query.dtype
    codes = encoding is PageEncoding.INT8 and query.dtype == torch.bfloat16
    return query.dtype if same or codes else torch.float32


def _launch(
    pages: Pages,
    layer: int,
    held: DeviceRuns,
    plan: Plan,
    query: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    numbers: tuple[float, int, float],
) -> None:
    layout = pages.layout
    tokens, q_heads, _ = query.shape
    group = q_heads // layout.heads
    scale, window, softcap = numbers
    words = page_words(pages)
    compute = compute_type(pages, query)
    front, back = front_words(layout)
    value_padded = 0 if layout.latent else max(16, triton.next_power_of_2(layout.value_dim))
    parts = None
    if plan.parts > 1:
        shape = (plan.launched, tokens, q_heads)
        parts = (
            torch.empty((*shape, layout.value_dim), dtype=torch.float32, device=out.device),
            torch.empty(shape, dtype=torch.float32, device=out.device),
        )
    blocks = triton.cdiv(held.tokens * group, plan.rows)
    attend_kernel[(blocks * plan.launched, layout.heads, held.count)](
        query,
        *(parts or (out, lse)),
        words,
        held.spans,
        held.tables,
        sinks,
        tokens,
        query.stride(0),
        query.stride(1),
        words.stride(0),
        layer * (layout.page_bytes // 4),
        held.tables.stride(0),
        held.count,
        blocks,
        plan.parts,
        scale,
        window,
        softcap,
        SPLIT=parts is not None,
        LEAST=plan.least,
        ENCODING=int(layout.encoding),
        DTYPE=_TYPES[compute],
        PRECISION="ieee" if compute == torch.float32 else "tf32",
        HEADS=layout.heads,
        GROUP=group,
        KEY_DIM=layout.key_dim,
        VALUE_DIM=layout.value_dim,
        LATENT=layout.latent,
        PER_WORD=layout.per_word,
        KEY_FRONT=front,
        KEY_BACK=back,
        VALUE_PADDED=value_padded,
        MIXED=value_padded or front * layout.per_word,
        ROWS=plan.rows,
        TILE=plan.tile,
        WINDOW=window > 0,
        SOFTCAP=softcap != 0,
        SINKS=sinks is not None,
        LSE=lse is not None,
        AHEAD=plan.ahead,
        num_warps=plan.warps,
    )
    if parts is not None:
        _merge(held, plan, layout.value_dim, parts, out, lse, sinks, window)


def _merge(
    held: DeviceRuns,
    plan: Plan,
    dim: int,
    parts: tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    window: int,
) -> None:
    """Write the union of parts [parts, tokens, q_heads, dim] and [parts, tokens, q_heads]."""
    tokens, q_heads, _ = out.shape
    chunks = triton.cdiv(dim, _MERGED_NUMBERS)
    merge_kernel[(held.tokens * chunks, q_heads, held.count)](
        out,
        lse,
        *parts,
        held.spans,
        sinks,
        tokens,
        held.count,
        plan.parts,
        window,
        HEADS=q_heads,
        CHUNKS=chunks,
        LEAST=plan.least,
        TILE=plan.tile,
        VALUE_DIM=dim,
        CHUNK=_MERGED_NUMBERS,
        PADDED_PARTS=MOST_PARTS,
        WINDOW=window > 0,
        SINKS=sinks is not None,
        LSE=lse is not None,
    )

"""Attention on the GPU: `reference.paged_attention` and what goes with it.

Sums are f32.  Queries and keys of one 16-bit type meet in tensor cores, with weights rounded to
that type; INT8 pages meet bf16 queries in bf16, FP8 pages queries of 16 bits in their type; any
other pair is computed in f32, which is exact and slow.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.kernels import reference
from hmt.kernels.reference.kv_pages import AttentionMetadata, PageEncoding, Pages
from hmt.kernels.triton.attention.append import (
    append_held,
    append_pages,
    layer_numbers,
    page_numbers,
)
from hmt.kernels.triton.attention.combine_launch import Results, Scoring, Shapes, merge
from hmt.kernels.triton.attention.flash_decode import attend_kernel
from hmt.kernels.triton.attention.metadata import SHORT_TOKENS, DeviceRuns, device_runs
from hmt.kernels.triton.attention.tuning import Plan, key_widths, plain_plan, plan_of, value_width
from hmt.kernels.triton.gemm.unpack import INTERPRETED
from hmt.kernels.triton.pdl import dependent

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_ASKED = 2  # tiles


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    start: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.attention`: out in query.dtype, lse f32 [queries, q_heads].

    Queries are rounded to a 16-bit type of keys: f32 ones that were made of it change nothing.
    """
    if query.dtype not in _TYPES or key.dtype not in _TYPES or key.dtype != value.dtype:
        options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
        return reference.attention(query, key, value, start=start, scale=scale, **options)
    query, scale = _forward(query, scale)
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    queries, q_heads, key_dim = query.shape
    context, heads, value_dim = value.shape
    assert q_heads % heads == 0 and key.shape == (context, heads, key_dim)
    out = query.new_empty(queries, q_heads, value_dim)
    lse = torch.empty(queries, q_heads, dtype=torch.float32, device=query.device)
    if not queries:
        return out, lse
    shapes = Shapes(heads, key_dim, value_dim, PageEncoding.of(key.dtype))
    plan = plain_plan(key_dim, value_dim, key.dtype)
    scoring = Scoring(scale, window, softcap, sinks)
    group = q_heads // heads
    blocks = triton.cdiv(queries * group, plan.rows)
    attend_kernel[(blocks, heads, 1)](
        query,
        out,
        lse,
        None,
        None,
        key,
        key,
        value,
        None,
        key,
        scoring.sinks,
        queries,
        start,
        context,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        0,
        0,
        0,
        1,
        blocks,
        *_numbers(plan, scoring),
        **_constants(shapes, plan, scoring, key.dtype, group, wants_lse=True),
        PAGED=False,
        NEW=0,
        NEW_ROWS=0,
        **dependent(query.device),
    )
    return out, lse


def paged_attention(
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
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
    return _attend_all(pages, layer, runs, query, lse, **options), lse


def paged_attention_output(
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
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
    return _attend_all(pages, layer, runs, query, None, **options)


def attend_part(
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> None:
    """See `reference.attend_part`; kernels are for runs that see all up to their own tokens."""
    whole = all(run.seen is None for run in runs.runs)
    if not whole or not can_attend(pages, query):
        reference.attend_part(pages, layer, runs, query, out, lse, **options)
        return
    options = {"window": 0, "softcap": 0.0, "sinks": None} | options
    _attend_all(pages, layer, runs, query, lse, out, **options)


def append_attend_pages(
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
    """See `reference.append_attend_pages`: [tokens, q_heads * dim].

    Runs of few tokens are appended by the kernel that attends to them.
    """
    kv_heads = pages.layout.heads
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if not can_attend(pages, query):
        append_pages(pages, layer, runs, key, value)
        return paged_attention_output(pages, layer, runs, query, **options).flatten(1)
    same = pages.layout.encoding.dtype == heads.dtype
    plain = same and not window and not softcap and sinks is None
    turned, positive = _forward(query, scale)
    scoring = Scoring(positive, window, softcap, sinks)
    out = query.new_empty(len(query), query.shape[1], pages.layout.value_dim)
    for held in device_runs(runs, heads.device):
        # Programs of neighbouring tokens see each other's rows: these are written before.
        writes = held.tokens <= SHORT_TOKENS and not held.sequences
        fresh = (key, value) if writes and _is_aligned(pages, key) else None
        if fresh is None:
            append_held(pages, layer, held, key, value)
        if not held.begun or not plain:
            _attend(pages, layer, held, turned, out, None, scoring, fresh)
            continue
        # Runs that begin a sequence see nothing but their own keys, and pages keep those as they
        # are.  Torch's fused kernel reads them where they lie.
        for run in held.begun:
            if run.length == len(query):
                out = reference.attention_output(query, key, value, start=0, scale=scale)
                continue
            rows = slice(run.offset, run.offset + run.length)
            out[rows] = reference.attention_output(
                query[rows], key[rows], value[rows], start=0, scale=scale
            )
    return out.flatten(1)


def attend_held(
    pages: Pages, layer: int, held: DeviceRuns, query: Tensor, scale: float
) -> tuple[Plan, Tensor, Tensor | None, Tensor | None]:
    """`paged_attention_output` of some runs, whose parts are not merged.

    The plan, the result where a context is one part, and otherwise the parts' results and logs.
    """
    query, scale = _forward(query, scale)
    out = query.new_empty(*query.shape[:2], pages.layout.value_dim)
    scoring = Scoring(scale)
    plan, results = _attend(pages, layer, held, query, out, None, scoring, None, merged=False)
    return plan, out, results[2], results[3]


def can_attend(pages: Pages, query: Tensor) -> bool:
    """Whether there is a kernel: pages in words have none, nor queries of other types."""
    return pages.layout.rows and query.dtype in _TYPES


def _forward(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries with numbers side by side, and a scale that is not negative, for the same scores."""
    query = query if scale >= 0 else -query
    return query if query.stride(2) == 1 else query.contiguous(), abs(scale)


def _is_aligned(pages: Pages, key: Tensor) -> bool:
    """Whether new rows, keys with values behind them, are read like those of pages."""
    layout, size = pages.layout, key.element_size()
    distances = (key.data_ptr(), *(x * size for x in (*key.stride()[:2], layout.key_dim)))
    whole = key.stride(2) == 1 and all(distance % 16 == 0 for distance in distances)
    return whole and layout.encoding.dtype == key.dtype


def _attend_all(
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    query: Tensor,
    lse: Tensor | None,
    out: Tensor | None = None,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    query, scale = _forward(query, scale)
    scoring = Scoring(scale, window, softcap, sinks)
    if out is None:
        out = query.new_empty(*query.shape[:2], pages.layout.value_dim)
    for held in device_runs(runs, query.device):
        _attend(pages, layer, held, query, out, lse, scoring, None)
    return out


def compute_type(pages: Pages, query: Tensor) -> torch.dtype:
    """What numbers are multiplied in."""
    encoding = pages.layout.encoding
    same = encoding.dtype == query.dtype
    codes = encoding is PageEncoding.INT8 and query.dtype == torch.bfloat16
    short = encoding is PageEncoding.FP8 and query.dtype.itemsize == 2
    return query.dtype if same or codes or short else torch.float32


def _attend(
    pages: Pages,
    layer: int,
    held: DeviceRuns,
    query: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scoring: Scoring,
    fresh: tuple[Tensor, Tensor] | None,
    *,
    merged: bool = True,
) -> tuple[Plan, Results]:
    """Attention of runs of similar length; `fresh` are keys and values to append."""
    layout = pages.layout
    q_heads = query.shape[1]
    group = q_heads // layout.heads
    assert q_heads % layout.heads == 0 and query.shape[2] == layout.key_dim
    compute = compute_type(pages, query)
    plan = plan_of(layout, group, held, scoring.window, compute)
    blocks = triton.cdiv(held.tokens * group, plan.rows)
    results: Results = (out, lse, None, None)
    if plan.split:
        shape = (held.count * layout.heads * blocks * plan.launched, plan.rows)
        parts_lse = torch.empty(shape, dtype=torch.float32, device=query.device)
        parts_out = parts_lse.new_empty(*shape, layout.value_dim)
        results = out, lse, parts_out, parts_lse
    shapes = Shapes(layout.heads, layout.key_dim, layout.value_dim, layout.encoding, layout.latent)
    grid = (blocks * plan.launched, layout.heads, held.count)
    if fresh is None and _is_for_latents(shapes, plan, query, compute, scoring):
        _attend_latents(pages, layer, held, plan, grid, query, results, scoring.scale)
    else:
        memory = page_numbers(pages)
        key, value = fresh or (memory[:, None], memory[:, None])
        attend_kernel[grid](
            query,
            *results,
            memory,
            key,
            value,
            held.spans,
            held.tables,
            scoring.sinks,
            len(query),
            0,
            0,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            memory.stride(0),
            layer_numbers(pages, layer),
            held.tables.stride(0),
            held.count,
            blocks,
            *_numbers(plan, scoring),
            **_constants(shapes, plan, scoring, compute, group, wants_lse=lse is not None),
            PAGED=True,
            NEW=16 // layout.encoding.dtype.itemsize if fresh else 0,
            NEW_ROWS=triton.next_power_of_2(held.tokens) if fresh else 0,
            **dependent(query.device),
        )
    if plan.split and plan.launched > 1 and merged:
        merge(held, plan, shapes, blocks, results, scoring)
    return plan, results


def _is_for_latents(
    shapes: Shapes, plan: Plan, query: Tensor, compute: torch.dtype, scoring: Scoring
) -> bool:
    """Whether `latent_kernel` takes it: see there."""
    whole = (shapes.heads, shapes.key_dim, shapes.value_dim, plan.rows) == (1, 576, 512, 64)
    plain = not scoring.window and not scoring.softcap and scoring.sinks is None
    codes = shapes.encoding is PageEncoding.FP8 and compute == torch.bfloat16
    short = compute.itemsize == 2 and (shapes.encoding.dtype == compute or codes)
    hopper = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9
    return shapes.latent and whole and plain and short and hopper


def _attend_latents(
    pages: Pages,
    layer: int,
    held: DeviceRuns,
    plan: Plan,
    grid: tuple[int, int, int],
    query: Tensor,
    results: Results,
    scale: float,
) -> None:
    # What this is written in changes more often than Triton: others shall not load it.
    from hmt.kernels.triton.attention.mla_decode import latent_kernel

    memory = page_numbers(pages)
    lse = results[1]
    latent_kernel[grid](
        query,
        *results,
        memory,
        held.spans,
        held.tables,
        *query.stride()[:2],
        memory.stride(0),
        layer_numbers(pages, layer),
        held.tables.stride(0),
        held.count,
        grid[0] // plan.launched,
        plan.launched,
        plan.few,
        plan.parts,
        scale,
        SPLIT=plan.split,
        OWN_PARTS=plan.own_parts,
        LEAST=plan.least,
        MOST=plan.most,
        GROUP=query.shape[1],
        LSE=lse is not None,
        num_warps=4,
        **dependent(query.device),
    )


def _in_words(shapes: Shapes, plan: Plan, compute: torch.dtype) -> bool:
    """Whether values are loaded as words: of one byte, whole rows, for `mma` in bf16."""
    short = shapes.encoding in (PageEncoding.INT8, PageEncoding.FP8) and not shapes.latent
    whole = value_width(shapes.value_dim) == shapes.value_dim and shapes.value_dim >= 64
    known = compute == torch.bfloat16 or INTERPRETED
    return short and whole and known and plan.one_sweep and plan.rows < 64


def _numbers(plan: Plan, scoring: Scoring) -> tuple[float, ...]:
    """Arguments of `attend_kernel` that follow `blocks`."""
    return plan.launched, plan.few, plan.parts, scoring.scale, scoring.window, scoring.softcap


def _constants(
    shapes: Shapes,
    plan: Plan,
    scoring: Scoring,
    compute: torch.dtype,
    group: int,
    *,
    wants_lse: bool,
) -> dict[str, Any]:
    """What `attend_kernel` is compiled for, but for how keys are reached."""
    front, back = key_widths(shapes.key_dim, shapes.value_dim if shapes.latent else 0)
    value_padded = 0 if shapes.latent else value_width(shapes.value_dim)
    return {
        "SPLIT": plan.split,
        "OWN_PARTS": plan.own_parts,
        "LEAST": plan.least,
        "MOST": plan.most,
        "ENCODING": int(shapes.encoding),
        "DTYPE": _TYPES[compute],
        "PRECISION": "ieee" if compute == torch.float32 else "tf32",
        "HEADS": shapes.heads,
        "GROUP": group,
        "KEY_DIM": shapes.key_dim,
        "VALUE_DIM": shapes.value_dim,
        "LATENT": shapes.latent,
        "KEY_FRONT": front,
        "KEY_BACK": back,
        "VALUE_PADDED": value_padded,
        "MIXED": value_padded or front,
        "ROWS": plan.rows,
        "TILE": plan.tile,
        "WINDOW": scoring.window > 0,
        "SOFTCAP": scoring.softcap != 0,
        "SINKS": scoring.sinks is not None,
        "LSE": wants_lse,
        "STAGES": plan.stages,
        "ONE_SWEEP": plan.one_sweep,
        "ASKED": _ASKED if plan.one_sweep else 0,
        "WORDS": _in_words(shapes, plan, compute),
        "num_warps": plan.warps,
    }

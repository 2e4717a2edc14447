"""Causal attention in pieces: bounded scores, windows, and partial results that merge exactly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hmt.base.units import MIB
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels.reference.kv_pages import AttentionMetadata, PagedSegment, Pages, read_pages

ATTENTION_WORKSPACE_BYTES = 64 * MIB  # scores or masks that are alive at once
_PLANNED_TOKENS, _PLANNED_MULTIPLE = 1024, 256  # see _is_planned
_KEY_BLOCK = 4096  # positions whose keys or values are alive in f32 at once


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
    """Causal attention and its log-sum-exp, computed in f32.

    query      [queries, q_heads, key_dim]; row j stands at position start + j
    key        [context, kv_heads, key_dim] of positions 0 .. context - 1
    value      [context, kv_heads, value_dim]; q_heads is a multiple of kv_heads
    scale      scores are query . key * scale
    window     position p sees (p - window, p]; 0 means all of 0 .. p
    softcap    scores become softcap * tanh(scores / softcap); 0 means they stay
    sinks      f32 [q_heads]: one more score for each row of a head, which has no value
    Returns out [queries, q_heads, value_dim] in query.dtype and lse f32 [queries, q_heads], the
    natural log of the sum of exponentials, the sink's included.  A row that sees nothing has out 0
    and lse -inf (or the sink).
    """
    queries, heads, _ = query.shape
    out = query.new_empty(queries, heads, value.shape[2])
    lse = torch.empty(queries, heads, dtype=torch.float32, device=query.device)
    for rows, seen in _chunks(queries, len(key), 4 * heads, start, window):
        scores = _scores(query[rows], key[seen]).mul_(scale)  # [kv_heads, group, rows, seen]
        if softcap:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        scores.masked_fill_(_hidden(rows, seen, start, window, query.device), -torch.inf)
        top = scores.amax(-1, keepdim=True) if seen.start < seen.stop else scores.new_zeros(1)
        top = top.masked_fill(top.isneginf(), 0)  # of rows that see nothing
        if sinks is not None:
            sink = sinks.float().view(key.shape[1], -1, 1, 1)
            top = torch.where(sink.isneginf(), top, torch.maximum(top, sink))
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1)  # [kv_heads, group, rows]
        if sinks is not None:
            total += (sink - top).exp_().squeeze(-1)
        divisor = total.masked_fill(total == 0, 1).flatten(0, 1).T[..., None]
        out[rows] = _mix(weights, value[seen]) / divisor
        lse[rows] = (total.log() + top.squeeze(-1)).flatten(0, 1).T
    return out, lse


def attention_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    start: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """`attention` without the log-sum-exp, through torch's fused kernel where it has one."""
    # Torch has no fused kernel on the CPU for value_dim != key_dim; its fallback is slower than
    # `attention` (66 ms against 42 ms for one bf16 query, 16 heads of 192 / 128, 4096 positions).
    fused = not softcap and key.shape[2] == value.shape[2]
    if not fused or start + len(query) > len(key):
        out, _ = attention(
            query, key, value, start=start, scale=scale, window=window, softcap=softcap
        )
        return out
    if len(query) > 1 and start == 0 and not window:
        return _fused(query, key[: len(query)], value[: len(query)], scale, causal=True)
    out = query.new_empty(query.shape)
    for rows, seen in _chunks(len(query), len(key), 4, start, window):
        mask = ~_hidden(rows, seen, start, window, query.device) if len(query) > 1 else None
        out[rows] = _fused(query[rows], key[seen], value[seen], scale, mask=mask)
    return out


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    start: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of rows that see each other: to all positions, those behind a row included.

    As `attention`, but that only a window hides anything: positions up to p - window of the row at
    p.  Returns [queries, q_heads, value_dim] in query.dtype.
    """
    queries, heads, _ = query.shape
    out = query.new_empty(queries, heads, value.shape[2])
    step = max(1, ATTENTION_WORKSPACE_BYTES // (4 * heads * len(key)))
    positions = torch.arange(len(key), device=query.device)
    for first in range(0, queries, step):
        rows = slice(first, min(first + step, queries))
        scores = _scores(query[rows], key).mul_(scale)  # [kv_heads, group, rows, context]
        if softcap:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if window:
            at = torch.arange(start + rows.start, start + rows.stop, device=query.device)[:, None]
            scores.masked_fill_(positions <= at - window, -torch.inf)
        out[rows] = _mix(scores.softmax(-1), value)
    return out


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint positions, from (out, lse) of each (arXiv 2501.01005).

    Merged in f32; out returns in the parts' dtype.  A part with lse -inf counts for nothing.
    """
    logs = torch.stack([lse for _, lse in parts])  # [parts, queries, q_heads]
    top = logs.amax(0)
    weights = (logs - top.masked_fill(top.isneginf(), 0)).exp()
    total = weights.sum(0)
    merged = torch.zeros_like(parts[0][0], dtype=torch.float32)
    for (out, _), weight in zip(parts, weights, strict=True):
        merged += (out.float() * weight[..., None]).masked_fill_(weight[..., None] == 0, 0)
    merged /= total.masked_fill(total == 0, 1)[..., None]
    return merged.to(parts[0][0].dtype), top + total.log()


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
    """`attention` of each run to its own pages: out [tokens, q_heads, value_dim], lse f32."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    parts = [
        attention(query[run.offset : run.offset + run.length], *context, start=start, **options)
        for run, context, start in _contexts(pages, layer, runs, window)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def attend_part(
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """`attention` of each run to its own pages, into f32 out [tokens, q_heads, value_dim] and lse.

    Rows of tokens that are in no run are left as they are.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    for run, context, start in _contexts(pages, layer, runs, window):
        rows = slice(run.offset, run.offset + run.length)
        found, logs = attention(query[rows].float(), *context, start=start, **options)
        out[rows], lse[rows] = found, logs


def page_masses(
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    query: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
) -> list[Tensor]:
    """What part of its attention each run's last token gives to each page: f32 [pages].

    The mean over heads.  query [tokens, q_heads, key_dim]; lse [tokens, q_heads] of all that the
    token sees, so that parts of a context can be asked for one by one.
    """
    found = []
    for run in runs.runs:
        row = run.offset + run.length - 1
        masses = []
        for first in range(0, run.context, _KEY_BLOCK):
            count = min(_KEY_BLOCK, run.context - first)
            begin = first // PAGE_TOKENS
            table = run.table[begin : begin - (-count // PAGE_TOKENS)]
            key, _ = read_pages(pages, layer, table, count)
            scores = _scores(query[row : row + 1], key).mul_(scale)  # [kv_heads, group, 1, count]
            if softcap:
                scores = scores.div_(softcap).tanh_().mul_(softcap)
            shares = (scores.flatten(0, 2) - lse[row][:, None]).exp_().mean(0)
            padded = functional.pad(shares, (0, -count % PAGE_TOKENS))
            masses.append(padded.view(-1, PAGE_TOKENS).sum(1))
        found.append(torch.cat(masses))
    return found


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
    """`paged_attention` without the log-sum-exp, through torch's fused kernel where it has one."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if sinks is not None or pages.layout.encoding.dtype != query.dtype:
        return paged_attention(pages, layer, runs, query, sinks=sinks, **options)[0]
    outputs = [
        attention_output(
            query[run.offset : run.offset + run.length], *context, start=start, **options
        )
        for run, context, start in _contexts(pages, layer, runs, window)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _contexts(
    pages: Pages, layer: int, runs: AttentionMetadata, window: int
) -> Iterator[tuple[PagedSegment, tuple[Tensor, Tensor], int]]:
    """Each run with copies of its keys and values, and where it starts among them."""
    for run in runs.runs:
        # Below the window there is nothing to read; start at the page that holds its first row.
        first = max(0, run.start - window + 1) // PAGE_TOKENS if window else 0
        last = -(-run.context // PAGE_TOKENS)
        begin = first * PAGE_TOKENS
        tokens = run.context - begin
        yield run, read_pages(pages, layer, run.table[first:last], tokens), run.start - begin


def _chunks(
    queries: int, context: int, pair_bytes: int, start: int, window: int
) -> Iterator[tuple[slice, slice]]:
    """Ranges of queries, each with the range of positions that it sees.

    A range is as long as `pair_bytes` for each query and position fit into the workspace.
    """
    step = max(1, ATTENTION_WORKSPACE_BYTES // max(1, pair_bytes * context))
    for first in range(0, queries, step):
        last = min(first + step, queries) - 1
        stop = min(start + last + 1, context)
        begin = max(0, start + first + 1 - window) if window else 0
        yield slice(first, last + 1), slice(min(begin, stop), stop)


def _hidden(rows: slice, seen: slice, start: int, window: int, device: torch.device) -> Tensor:
    """True where a row must not see a position: bool [rows, seen]."""
    at = torch.arange(start + rows.start, start + rows.stop, device=device)[:, None]
    positions = torch.arange(seen.start, seen.stop, device=device)
    hidden = positions > at
    return hidden | (positions <= at - window) if window else hidden


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Dot products of all rows with all positions: f32 [kv_heads, group, rows, positions]."""
    kv_heads = key.shape[1]
    # Query heads that share a KV head become rows of one product.
    grouped = query.float().view(len(query), kv_heads, -1, query.shape[2]).permute(1, 2, 0, 3)
    shape = grouped.shape[:3]
    grouped = grouped.flatten(1, 2)  # [kv_heads, group * rows, key_dim]
    scores = grouped.new_empty(*grouped.shape[:2], len(key))
    for block in _blocks(len(key)):
        scores[..., block] = grouped @ key[block].float().permute(1, 2, 0)
    return scores.view(*shape, -1)


def _mix(weights: Tensor, value: Tensor) -> Tensor:
    """Sums of values by weights [kv_heads, group, rows, positions]: f32 [rows, q_heads, dim]."""
    flat = weights.flatten(1, 2)
    mixed = flat.new_zeros(*flat.shape[:2], value.shape[2])
    for block in _blocks(len(value)):
        mixed.baddbmm_(flat[..., block], value[block].float().transpose(0, 1))
    return mixed.view(-1, weights.shape[2], value.shape[2]).transpose(0, 1)


def _blocks(positions: int) -> Iterator[slice]:
    for begin in range(0, positions, _KEY_BLOCK):
        yield slice(begin, min(begin + _KEY_BLOCK, positions))


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """The fused attention of torch on [tokens, heads, dim] tensors."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, tokens, dim]
    if len(query) == 1:
        # The heads of a group as rows of one product: ten times faster for one bf16 query with
        # 4 heads a group over 8192 positions (12 ms against 122 ms).
        q = q.view(1, key.shape[1], -1, query.shape[2])
    with nullcontext() if not query.is_cuda or _is_planned(len(query)) else _without_cudnn():
        out: Tensor = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
    if len(query) == 1:
        return out.reshape(1, query.shape[1], -1)
    return out[0].transpose(0, 1)


def _is_planned(tokens: int) -> bool:
    """Whether cuDNN may make a plan for so many.

    A plan for a length that is new takes 38 ms on an H200.  Attention to 512 tokens, 32 heads of
    128, takes it 19 us and torch's own kernel 21, to 1024 32 and 55, to 2048 83 and 162.  So plans
    are for long pieces of prompts that come again, and few ends of prompts are as long as those.
    """
    return tokens >= _PLANNED_TOKENS and tokens % _PLANNED_MULTIPLE == 0


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Torch's other fused kernels."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)

"""Which positions a token attends to: those that an indexer scores highest (DeepSeek-V3.2)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hmt.kernels.reference.attention import attention
from hmt.kernels.reference.kv_pages import Pages, read_pages

_KEY_BLOCK = 4096  # positions that all heads have scores for at once
_LANES = 16  # heads that are added side by side


def index_scores(query: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """How much one token wants each position: f32 [positions].

    query     [heads, dim]
    weights   f32 [heads]
    keys      [positions, dim]
    scale     of a head's product

    A position's score is the sum of weights * relu(scale * query . key) over the heads.  All is
    f32, and added in the order that `csrc/attention/index.h` describes, so that compiled kernels
    give the same bits, and these do not depend on what else a step computes.
    """
    query, keys = query.float(), keys.float()
    empty = -len(query) % _LANES
    parts = [keys.new_empty(0)]
    for block in keys.split(_KEY_BLOCK):
        products = _products(query, block).mul_(scale).relu_().mul_(weights[:, None])
        lanes = pad(products, (0, 0, 0, empty)).unflatten(0, (-1, _LANES))
        total = lanes[0]
        for others in lanes[1:]:
            total = total + others
        while len(total) > 1:
            low, high = total.chunk(2)
            total = low + high
        parts.append(total[0])
    return torch.cat(parts)


def index_topk(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    *,
    start: int,
    top_k: int,
    scale: float,
    positions: int = 1,
) -> Tensor:
    """The `top_k` positions that each token scores highest, of all up to its own: ascending.

    query     [tokens, heads, dim]; row j stands at position start + j, at least top_k - 1
    weights   f32 [tokens, heads]
    keys      [positions, dim]
    positions   that share a key, as the first of which it counts: a token sees whole groups only
    Returns int64 [tokens, top_k].  Of equal scores `torch.topk` takes those that it takes of the
    scores of exactly the positions that the token sees: what transformers selects token by token.
    On a GPU these are the first.
    """
    keys = keys.float()  # once for all tokens
    chosen = torch.empty(len(query), top_k, dtype=torch.int64, device=query.device)
    for row in range(len(query)):
        seen = keys[: (start + row + 1) // positions]
        scores = index_scores(query[row], weights[row], seen, scale)
        chosen[row] = scores.topk(top_k).indices.sort().values
    return chosen


def paged_index_topk(
    query: Tensor,
    weights: Tensor,
    pages: Pages,
    layer: int,
    table: Tensor,
    *,
    start: int,
    top_k: int,
    scale: float,
) -> Tensor:
    """`index_topk` of keys where they lie, in pages of one head.

    table   int64: position p is in page table[p // 16]
    """
    keys, _ = read_pages(pages, layer, table, start + len(query))
    return index_topk(query, weights, keys[:, 0], start=start, top_k=top_k, scale=scale)


def selected_attention(
    query: Tensor,
    rows: Tensor,
    own: Tensor | None,
    value_dim: int,
    *,
    scale: float,
    sinks: Tensor | None = None,
    attend: Callable[..., tuple[Tensor, Tensor]] = attention,
) -> Tensor:
    """Attention of each token to some latents: [tokens, heads, value_dim] in query.dtype.

    query    [tokens, heads, dim]
    rows     [rows, 1, dim], of which the first value_dim numbers are values
    sinks    f32 [heads], contiguous, as in `attention`
    own      int64 [tokens, count]: the rows of each token; None: there is one token, with all rows
    attend   `attention`, by which each token is computed alone: its result does not depend on how
             many others there are
    """
    out = query.new_empty(len(query), query.shape[1], value_dim)
    options: dict[str, Any] = (
        {"scale": scale} if sinks is None else {"scale": scale, "sinks": sinks}
    )
    for at in range(len(query)):
        key = rows if own is None else rows[own[at]]
        value = key[..., :value_dim]
        out[at], _ = attend(query[at : at + 1], key, value, start=len(key) - 1, **options)
    return out


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """query . key, f32 [heads, positions], one number of a row added after the other."""
    total, product = torch.zeros(2, len(query), len(keys), device=keys.device).unbind()
    for numbers, column in zip(query.T, keys.T.contiguous(), strict=True):
        total += torch.mul(numbers[:, None], column, out=product)
    return total

"""Which positions a token attends to: those that an indexer scores highest (DeepSeek-V3.2)."""

from collections.abc import Callable

import torch
from torch import Tensor

from hmt.kernels.reference.attention import attention

_KEY_BLOCK = 4096  # positions that all heads have scores for at once


def index_scores(query: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """How much one token wants each position: f32 [positions].

    query     [heads, dim]
    weights   f32 [heads]
    keys      [positions, dim]
    scale     of a head's product

    A position's score is the sum of weights * relu(scale * query . key) over the heads.  Products
    are made of blocks that begin at the first position, so that their shapes, and with these the
    bits of a score, depend on the token's position and not on what else a step computes.
    """
    query, keys = query.float(), keys.float()
    parts = []
    for block in keys.split(_KEY_BLOCK):
        products = torch.mm(query, block.T).mul_(scale).relu_()
        parts.append(torch.mv(products.T, weights))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    """
    keys = keys.float()  # once for all tokens
    chosen = torch.empty(len(query), top_k, dtype=torch.int64, device=query.device)
    for row in range(len(query)):
        seen = keys[: (start + row + 1) // positions]
        scores = index_scores(query[row], weights[row], seen, scale)
        chosen[row] = scores.topk(top_k).indices.sort().values
    return chosen


def selected_attention(
    query: Tensor,
    rows: Tensor,
    own: Tensor | None,
    value_dim: int,
    *,
    scale: float,
    attend: Callable[..., tuple[Tensor, Tensor]] = attention,
) -> Tensor:
    """Attention of each token to some latents: [tokens, heads, value_dim] in query.dtype.

    query    [tokens, heads, dim]
    rows     [rows, 1, dim], of which the first value_dim numbers are values
    own      int64 [tokens, count]: the rows of each token; None: there is one token, with all rows
    attend   `attention`, by which each token is computed alone: its result does not depend on how
             many others there are
    """
    out = query.new_empty(len(query), query.shape[1], value_dim)
    for at in range(len(query)):
        key = rows if own is None else rows[own[at]]
        value = key[..., :value_dim]
        out[at], _ = attend(query[at : at + 1], key, value, start=len(key) - 1, scale=scale)
    return out

"""What an indexer selects, through the compiled extension, which reads keys where they lie.

Scores have the bits of the reference, so that what is selected does not depend on what computes.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import reference
from hmt.kernels.cpu.abi import DTYPES
from hmt.kernels.reference.kv_pages import Pages

# Of keys: what the extension calls them, the address of the first page, bytes from page to page,
# and the address of their table or 0.
_Keys = tuple[int, int, int, int, int]


def index_topk(
    native: ModuleType,
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    *,
    start: int,
    top_k: int,
    scale: float,
    positions: int = 1,
) -> Tensor:
    """`reference.index_topk` by the extension."""
    if query.dtype not in DTYPES or keys.dtype not in DTYPES:
        return reference.index_topk(
            query, weights, keys, start=start, top_k=top_k, scale=scale, positions=positions
        )
    keys = keys.contiguous()
    dim = keys.shape[1]
    stride = PAGE_TOKENS * dim * keys.element_size()
    where = DTYPES[keys.dtype], dim, keys.data_ptr(), stride, 0
    assert len(keys) >= (start + len(query)) // positions
    return _best(native, where, query, weights, start, positions, top_k, scale)


def paged_index_topk(
    native: ModuleType,
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
    """`reference.paged_index_topk` by the extension."""
    layout = pages.layout
    if query.dtype not in DTYPES or not layout.rows or layout.heads != 1 or not layout.latent:
        return reference.paged_index_topk(
            query, weights, pages, layer, table, start=start, top_k=top_k, scale=scale
        )
    assert table.dtype == torch.int64 and table.is_contiguous()
    assert len(table) * PAGE_TOKENS >= start + len(query)
    address = pages.memory.data_ptr() + layer * layout.page_bytes
    encoding, stride = int(layout.encoding), pages.memory.stride(0)
    where = encoding, layout.key_dim, address, stride, table.data_ptr()
    return _best(native, where, query, weights, start, 1, top_k, scale)


def _best(
    native: ModuleType,
    keys: _Keys,
    query: Tensor,
    weights: Tensor,
    start: int,
    group: int,
    top_k: int,
    scale: float,
) -> Tensor:
    """The best positions of all tokens; of equal ones those that `torch.topk` takes."""
    tokens, heads, dim = query.shape
    query = query if query.stride(2) == 1 else query.contiguous()
    weights = weights.float().contiguous()
    assert dim == keys[1] and weights.shape == (tokens, heads)
    assert tokens == 0 or (start + 1) // group >= top_k
    chosen = torch.empty(tokens, top_k, dtype=torch.int64)
    tied = torch.zeros(tokens, dtype=torch.bool)
    address, kind, threads = query.data_ptr(), DTYPES[query.dtype], torch.get_num_threads()
    rows: tuple[Any, ...] = address, kind, *query.stride()[:2], tokens, heads
    queries = (*rows, weights.data_ptr(), scale)
    native.index_topk(
        keys, queries, start, group, top_k, chosen.data_ptr(), tied.data_ptr(), threads
    )
    for row in tied.nonzero().flatten().tolist():
        scores = torch.empty((start + row + 1) // group)
        native.index_scores(keys, queries, row, len(scores), scores.data_ptr(), threads)
        chosen[row] = scores.topk(top_k).indices.sort().values
    return chosen

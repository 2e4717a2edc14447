"""Attending to some pages only: those whose bound on scores, or whose score so far, is best.

Nothing is lost: every token chooses anew among all pages.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hmt.contracts.kv import Stay
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import ops
from hmt.kvcache.book import Numbers
from hmt.kvcache.placement import Placement

Floats = NDArray[np.float64]


class Ranking(Protocol):
    """Ranks a sequence's pages for one token of one layer."""

    def rank(self, layer: int, ids: Numbers, query: torch.Tensor) -> Floats:
        """A number for each of `ids`, whole pages; the greatest are attended to.

        query   [q_heads, key_dim], in host memory
        """
        ...

    def forget(self, ids: Numbers) -> None:
        """Pages have been made anew."""
        ...


class Selection:
    """A share of each sequence's pages, which decoding tokens attend to."""

    def __init__(self, share: float, ranking: Ranking) -> None:
        self._share = share
        self._ranking = ranking

    def hidden(self, layer: int, ids: Numbers, query: torch.Tensor, stay: Stay) -> Numbers:
        """Those of a sequence's pages `ids` that its next token leaves out, in `layer`.

        The pages that stay near are always attended to, and count.
        """
        inner = ids[stay.sinks : -stay.recent]
        left = int(np.ceil(self._share * len(ids))) - stay.pages
        if left >= len(inner):
            return inner[:0]
        ranks = self._ranking.rank(layer, inner, query)
        least: Numbers = inner[np.argsort(ranks, kind="stable")[: len(inner) - max(0, left)]]
        return least

    def forget(self, ids: Numbers) -> None:
        """Pages have been made anew."""
        self._ranking.forget(ids)


class ByWorth:
    """What the policy that moves pages thinks of them; the same for all layers."""

    def __init__(self, places: Placement) -> None:
        self._places = places

    def rank(self, layer: int, ids: Numbers, query: torch.Tensor) -> Floats:
        """See Ranking."""
        return self._places.policy.worth(ids, self._places.clock(), 1.0)

    def forget(self, ids: Numbers) -> None:
        """See Ranking."""


class ByBounds:
    """What the greatest score in a page can be, from the least and greatest of its keys.

    A page's bound for a query is the sum over channels of max(q least, q greatest), the maximum
    over heads (Quest, arXiv 2406.10774).  Kept in f16: 2 / 16 of what f16 keys take, which no plan
    counts yet.
    """

    def __init__(self, places: Placement) -> None:
        self._places = places
        self._bounds: dict[int, torch.Tensor] = {}  # by layer
        self._known: dict[int, NDArray[np.bool_]] = {}

    def rank(self, layer: int, ids: Numbers, query: torch.Tensor) -> Floats:
        """See Ranking."""
        self._learn(layer, ids)
        bounds = self._bounds[layer][torch.from_numpy(ids)].float()  # [pages, 2, heads, key_dim]
        rows = query.float().view(bounds.shape[2], -1, query.shape[-1])  # [heads, group, key_dim]
        scores = torch.einsum("hgd,phd->phg", rows.clamp(min=0), bounds[:, 1])
        scores += torch.einsum("hgd,phd->phg", rows.clamp(max=0), bounds[:, 0])
        ranks: Floats = scores.flatten(1).amax(1).double().numpy()
        return ranks

    def forget(self, ids: Numbers) -> None:
        """See Ranking."""
        for known in self._known.values():
            known[ids] = False

    def _learn(self, layer: int, ids: Numbers) -> None:
        """Find the bounds of pages that are new."""
        if layer not in self._known:
            layout, count = self._places.hot.layers[layer].pages.layout, self._places.book.count
            self._known[layer] = np.zeros(count, dtype=bool)
            shape = count, 2, layout.heads, layout.key_dim
            self._bounds[layer] = torch.zeros(shape, dtype=torch.float16)
        new = ids[~self._known[layer][ids]]
        for pages, slot, table, at in self._places.lying(layer, new) if len(new) else ():
            key, _ = ops.read_pages(pages, slot, table, PAGE_TOKENS * len(table))
            rows = key.float().cpu().unflatten(0, (-1, PAGE_TOKENS))
            found = torch.stack((rows.amin(1), rows.amax(1)), 1)
            self._bounds[layer][torch.from_numpy(new)[at]] = found.half()
        self._known[layer][new] = True


RANKINGS: dict[str, Callable[[Placement], Ranking]] = {"bound": ByBounds, "order": ByWorth}

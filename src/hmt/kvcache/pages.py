"""Pages: 16 tokens of KV for all layers of one kind, each page one contiguous extent."""

from collections.abc import Sequence
from itertools import groupby

import torch

from hmt.base.errors import BudgetError
from hmt.contracts.model import PAGE_TOKENS, KVLayer


def page_bytes(layers: Sequence[KVLayer], dtype: torch.dtype) -> int:
    """Bytes that 16 positions take over all `layers`, one page per kind."""
    return PAGE_TOKENS * sum(layer.row_width for layer in layers) * dtype.itemsize


def kinds_of(layers: Sequence[KVLayer]) -> list[tuple[KVLayer, list[int]]]:
    """Groups of layers that keep the same rows: (what a layer keeps, indices of the layers)."""

    def key(index: int) -> tuple[str, int, int, int, int]:
        layer = layers[index]
        return (layer.kind, layer.heads, layer.key_dim, layer.value_dim, layer.window)

    groups = groupby(sorted(range(len(layers)), key=key), key=key)
    members = [list(indices) for _, indices in groups]
    return [(layers[indices[0]], indices) for indices in members]


class PageAllocator:
    """Which of `count` pages are free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Pages that can still be taken."""
        return len(self._free)

    def take(self, pages: int) -> list[int]:
        """`pages` page numbers.  Raises BudgetError, taking none, when fewer are free."""
        if pages > len(self._free):
            raise BudgetError(
                f"{pages * PAGE_TOKENS} positions of KV were asked for and "
                f"{len(self._free) * PAGE_TOKENS} of {self.count * PAGE_TOKENS} are free; "
                "ask for a shorter context, or raise --context or --host-memory"
            )
        return [self._free.pop() for _ in range(pages)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages that were taken."""
        self._free += sorted(pages, reverse=True)
        assert len(self._free) <= self.count, "a page was given back twice"


class PageStore:
    """The memory of all pages of one kind.

    Layout: [pages, layers of the kind, row of the page].  A row of the page holds the keys of its
    16 tokens, then their values; LATENT layers have keys only.
    """

    def __init__(self, layer: KVLayer, layers: int, memory: torch.Tensor) -> None:
        """`memory` [pages * layers * 16 * row_width], of the cache's dtype, is kept and written."""
        self.layer = layer
        pages = memory.numel() // (layers * PAGE_TOKENS * layer.row_width)
        blocks = memory.view(pages, layers, PAGE_TOKENS * layer.row_width)
        split = PAGE_TOKENS * layer.heads * layer.key_dim
        shape = (pages, layers, PAGE_TOKENS, layer.heads)
        self._keys = blocks[..., :split].unflatten(-1, (*shape[2:], layer.key_dim))
        if split == blocks.shape[-1]:
            self._values = None
        else:
            self._values = blocks[..., split:].unflatten(-1, (*shape[2:], layer.value_dim))

    def write(
        self,
        slot: int,
        pages: torch.Tensor,
        places: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
    ) -> None:
        """Store rows.  pages, places: int64 [tokens]; key, value: [tokens, heads, dim]."""
        self._keys[pages, slot, places] = key
        if self._values is not None:
            assert value is not None
            self._values[pages, slot, places] = value

    def gather(
        self, slot: int, pages: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the first `tokens` rows of `pages`: key and value [tokens, heads, dim]."""
        key = self._keys[pages, slot].flatten(0, 1)[:tokens]
        if self._values is None:
            return key, key[..., : self.layer.value_dim]
        return key, self._values[pages, slot].flatten(0, 1)[:tokens]

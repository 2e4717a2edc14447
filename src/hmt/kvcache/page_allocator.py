"""Pages: 16 tokens of KV for all layers of one kind, each page one contiguous extent."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from hmt.base.errors import BudgetError
from hmt.contracts.model import PAGE_TOKENS, KVKind, KVLayer
from hmt.kernels import ops
from hmt.kernels.backend import backend_on
from hmt.memory import Bitmap


def page_bytes(layers: Sequence[KVLayer], dtype: torch.dtype) -> int:
    """Bytes that 16 positions take over all `layers`, one page per kind."""
    return PAGE_TOKENS * sum(layer.row_width for layer in layers) * dtype.itemsize


def kinds_of(layers: Mapping[int, KVLayer]) -> list[tuple[KVLayer, list[int]]]:
    """Groups of layers that keep the same rows: (what a layer keeps, indices of the layers)."""

    def key(index: int) -> tuple[str, int, int, int, int]:
        layer = layers[index]
        return (layer.kind, layer.heads, layer.key_dim, layer.value_dim, layer.window)

    groups = groupby(sorted(layers, key=key), key=key)
    members = [list(indices) for _, indices in groups]
    return [(layers[indices[0]], indices) for indices in members]


class PageAllocator:
    """Which of `count` pages are free.

    A sequence's pages lie in a row where a row is free, so that its keys are read, and later moved
    between tiers, in few pieces.  Requests of 16 to 1,024 pages that come and go among 8,192 take
    26 us, and 16 us to give back, and lie in 4 pieces; with a list of free pages 7 us, 2 us and 27
    pieces, and a page that was returned twice was not seen.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = Bitmap(count)
        self._others: Counter[int] = Counter()  # owners of a page besides the first

    @property
    def free_pages(self) -> int:
        """Pages that can still be taken."""
        return self._free.free

    def take(self, pages: int) -> list[int]:
        """`pages` page numbers.  Raises BudgetError, taking none, when fewer are free."""
        if pages > self._free.free:
            raise self.too_few(pages)
        return self._free.take(pages)

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for each of `pages`, which were taken."""
        self._others.update(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """One owner less for each of `pages`; those that nobody owns any more are free."""
        shared = self._others.keys() & set(pages)
        for page in shared:
            self._others[page] -= 1
            if not self._others[page]:
                del self._others[page]
        self._free.give([page for page in pages if page not in shared])

    def too_few(self, pages: int) -> BudgetError:
        """What to raise when `pages` are more than are free."""
        return BudgetError(
            f"{pages * PAGE_TOKENS} positions of KV were asked for and "
            f"{self.free_pages * PAGE_TOKENS} of {self.count * PAGE_TOKENS} are free; "
            "ask for a shorter context, or raise --context or --host-memory"
        )


def layout_of(layer: KVLayer, encoding: ops.PageEncoding, where: torch.device) -> ops.PageLayout:
    """How a layer's page lies in the memory of a host or a device.

    Words of 16 tokens for compiled kernels, plain rows for those of GPUs.
    """
    latent = layer.kind is KVKind.LATENT
    dims = layer.heads, layer.key_dim, layer.value_dim
    return ops.PageLayout(encoding, *dims, latent, rows=not backend_on(where).on_host)

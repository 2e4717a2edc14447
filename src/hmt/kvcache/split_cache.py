"""Keys and values of layers that compute in different places: each layer's where it computes."""

from collections.abc import Collection
from typing import Any

import torch

from hmt.contracts.step import Segment, Step
from hmt.kernels import ops
from hmt.kvcache.offload.tiered_cache import TieredKV
from hmt.kvcache.paged_cache import PagedKV


class SplitKVCache:
    """Implements KVCache over two caches of one allocator, one for each place.

    Every call is for a layer, and goes to the cache that has it.
    """

    def __init__(
        self,
        here: PagedKV | TieredKV,
        there: PagedKV | TieredKV,
        layers_there: Collection[int],
    ) -> None:
        """`there` has `layers_there`, `here` all others."""
        assert here.allocator is there.allocator
        self.allocator = there.allocator
        self.there = there
        self._caches = (here, there)
        self._there = frozenset(layers_there)

    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """See KVCache."""
        self._of(layer).append(layer, step, key, value)

    def attend(self, layer: int, step: Step, query: torch.Tensor, **options: Any) -> torch.Tensor:
        """See KVCache."""
        return self._of(layer).attend(layer, step, query, **options)

    def append_attend(
        self, layer: int, step: Step, heads: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """See KVCache."""
        return self._of(layer).append_attend(layer, step, heads, **options)

    def kernel_pages(self, layer: int) -> tuple[ops.Pages, int, int] | None:
        """See KVCache."""
        return self._of(layer).kernel_pages(layer)

    def kernel_place(
        self, layer: int, step: Step
    ) -> tuple[ops.Pages, int, ops.AttentionMetadata] | None:
        """See KVCache."""
        return self._of(layer).kernel_place(layer, step)

    def kernel_metadata(self, step: Step) -> ops.AttentionMetadata:
        """See KVCache: those of host memory."""
        return self._caches[0].kernel_metadata(step)

    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache."""
        return self._of(layer).read(layer, run)

    def _of(self, layer: int) -> PagedKV | TieredKV:
        return self._caches[layer in self._there]


# Whatever keeps sequences of keys and values.
AnyKV = PagedKV | SplitKVCache | TieredKV

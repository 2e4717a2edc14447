"""Keys and values of layers that compute in different places: each layer's where it computes."""

from collections.abc import Collection
from typing import Any

import torch
from typing_extensions import override

from hmt.base.errors import BudgetError
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.kvcache.offload.tiered_cache import TieredKV
from hmt.kvcache.paged_cache import PagedKV


class SplitKVCache(KVCache):
    """Implements KVCache over two caches with the same sequences, one for each place.

    Every call is for a layer, and goes to the cache that has it; sequences are opened in both.
    """

    def __init__(
        self,
        here: PagedKV | TieredKV,
        there: PagedKV | TieredKV,
        layers_there: Collection[int],
    ) -> None:
        """`there` has `layers_there`, `here` all others; both have room for as many positions."""
        self.there = there
        self._caches = (here, there)
        self._there = frozenset(layers_there)

    @property
    def free_tokens(self) -> int:
        """Positions that no sequence has reserved."""
        return min(cache.free_tokens for cache in self._caches)

    @property
    def capacity_tokens(self) -> int:
        """Positions in all."""
        return min(cache.capacity_tokens for cache in self._caches)

    def can_open(self, tokens: int) -> bool:
        """Whether `open` would succeed now."""
        return all(cache.can_open(tokens) for cache in self._caches)

    def open(self, tokens: int) -> int:
        """Reserve `tokens` positions for a new sequence; its handle.  Raises BudgetError."""
        handles = {cache.open(tokens) for cache in self._caches}
        assert len(handles) == 1, "both have as many pages, and have opened the same sequences"
        return handles.pop()

    def can_fork(self, sequence: int, held: int, tokens: int) -> bool:
        """Whether `fork` would succeed now."""
        return all(cache.can_fork(sequence, held, tokens) for cache in self._caches)

    def fork(self, sequence: int, held: int, tokens: int) -> int:
        """See TieredKV.  Raises BudgetError where one of the two has no room, forking neither."""
        if not self.can_fork(sequence, held, tokens):
            raise self._too_little(tokens)
        handles = {cache.fork(sequence, held, tokens) for cache in self._caches}
        assert len(handles) == 1, "both have opened the same sequences"
        return handles.pop()

    def can_grow(self, sequence: int, tokens: int) -> bool:
        """Whether `grow` would succeed now."""
        return all(cache.can_grow(sequence, tokens) for cache in self._caches)

    def grow(self, sequence: int, tokens: int) -> None:
        """See PagedKV.  Raises BudgetError where one of the two has no room, changing neither."""
        if not self.can_grow(sequence, tokens):
            raise self._too_little(tokens)
        for cache in self._caches:
            cache.grow(sequence, tokens)

    def shrink(self, sequence: int, tokens: int) -> None:
        """See PagedKV."""
        for cache in self._caches:
            cache.shrink(sequence, tokens)

    def can_rewind(self) -> bool:
        """See TieredKV."""
        return all(cache.can_rewind() for cache in self._caches)

    def rewind(self, sequence: int, tokens: int) -> None:
        """See TieredKV."""
        for cache in self._caches:
            cache.rewind(sequence, tokens)

    def can_park(self) -> bool:
        """See TieredKV."""
        return all(cache.can_park() for cache in self._caches)

    def park(self, sequence: int) -> None:
        """See TieredKV."""
        for cache in self._caches:
            cache.park(sequence)

    def can_resume(self, sequence: int, tokens: int) -> bool:
        """Whether `resume` would succeed now."""
        return all(cache.can_resume(sequence, tokens) for cache in self._caches)

    def resume(self, sequence: int, tokens: int) -> None:
        """See TieredKV.  Raises BudgetError where one of the two has no room, changing neither."""
        if not self.can_resume(sequence, tokens):
            raise self._too_little(tokens)
        for cache in self._caches:
            cache.resume(sequence, tokens)

    def close(self, sequence: int) -> None:
        """Free a sequence's pages."""
        for cache in self._caches:
            cache.close(sequence)

    @override
    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        self._of(layer).append(layer, step, key, value)

    @override
    def attend(self, layer: int, step: Step, query: torch.Tensor, **options: Any) -> torch.Tensor:
        return self._of(layer).attend(layer, step, query, **options)

    @override
    def append_attend(
        self, layer: int, step: Step, heads: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        return self._of(layer).append_attend(layer, step, heads, **options)

    @override
    def kernel_pages(self, layer: int) -> tuple[ops.Pages, int, int] | None:
        return self._of(layer).kernel_pages(layer)

    @override
    def kernel_place(
        self, layer: int, step: Step
    ) -> tuple[ops.Pages, int, ops.AttentionMetadata] | None:
        return self._of(layer).kernel_place(layer, step)

    def kernel_metadata(self, step: Step) -> ops.AttentionMetadata:
        """See KVCache: those of host memory."""
        return self._caches[0].kernel_metadata(step)

    @override
    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        return self._of(layer).read(layer, run)

    def _too_little(self, tokens: int) -> BudgetError:
        return BudgetError(
            f"a sequence of {tokens} positions of KV was asked for, and "
            f"{self.free_tokens} of {self.capacity_tokens} are free; ask for a shorter "
            "context, or raise --context or --host-memory"
        )

    def _of(self, layer: int) -> PagedKV | TieredKV:
        return self._caches[layer in self._there]


# Whatever keeps sequences of keys and values.
AnyKV = PagedKV | SplitKVCache | TieredKV

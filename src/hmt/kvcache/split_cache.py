"""The KV cache of layers that compute in different places: each layer's where it computes."""

from collections.abc import Mapping
from typing import Any

import torch

from hmt.contracts.step import Segment, Step
from hmt.contracts.store import RecurrentState
from hmt.kernels import ops
from hmt.kvcache.offload.tiered_cache import TieredKV
from hmt.kvcache.page_store import PagesByKind
from hmt.kvcache.page_table import Ints
from hmt.kvcache.paged_cache import PagedKV
from hmt.kvcache.recurrent_state import StateStore
from hmt.memory.device import current_device


class SplitKVCache:
    """Implements KVCache over caches of one allocator, one for each device and the host.

    Every call is for a layer, and goes to the cache that has it.
    """

    def __init__(
        self,
        caches: Mapping[int | None, PagedKV | TieredKV],
        layer_devices: Mapping[int, int],
    ) -> None:
        """`caches` by device, None for the host; all share one allocator.

        layer_devices   the device of each layer that is on one
        """
        self._by_device = dict(caches)
        self._layer_devices = dict(layer_devices)
        allocators = {id(cache.allocator): cache.allocator for cache in caches.values()}
        (self.allocator,) = allocators.values()

    @property
    def parts(self) -> Mapping[int | None, PagedKV | TieredKV]:
        """The caches, by device."""
        return self._by_device

    @property
    def is_on_devices(self) -> bool:
        """Whether no part is in host memory."""
        return None not in self._by_device

    @property
    def states(self) -> StateStore | None:
        """Recurrent state of the first part that has any; None where no layer has."""
        found = (cache.states for cache in self._by_device.values())
        return next((states for states in found if states is not None), None)

    @property
    def there(self) -> PagedKV | TieredKV:
        """The cache of the first device."""
        return next(cache for device, cache in self._by_device.items() if device is not None)

    def copy_out(self, ids: Ints, kinds: PagesByKind) -> None:
        """See PagedKV, whose layers each part has some of."""
        for cache in self._by_device.values():
            cache.copy_out(ids, kinds)

    def copy_in(self, ids: Ints, kinds: PagesByKind) -> None:
        """See PagedKV."""
        for cache in self._by_device.values():
            cache.copy_in(ids, kinds)

    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """See KVCache."""
        self._of(layer).append(layer, step, key, value)

    def attend(self, layer: int, step: Step, query: torch.Tensor, **options: Any) -> torch.Tensor:
        """See KVCache.  The query of a layer that uses another's pages goes to where they are."""
        cache = self._of(layer)
        with current_device(cache.where):  # which another layer's may not be
            there = query.to(cache.where)
            return cache.attend(layer, step, there, **options).to(query.device)

    def append_attend(
        self, layer: int, step: Step, heads: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """See KVCache."""
        return self._of(layer).append_attend(layer, step, heads, **options)

    def kernel_pages(self, layer: int) -> tuple[ops.Pages, int, int] | None:
        """See KVCache."""
        return self._of(layer).kernel_pages(layer)

    def kernel_state(self, layer: int) -> Mapping[str, torch.Tensor] | None:
        """See KVCache."""
        return self._of(layer).kernel_state(layer)

    def kernel_place(
        self, layer: int, step: Step
    ) -> tuple[ops.Pages, int, ops.AttentionMetadata] | None:
        """See KVCache."""
        return self._of(layer).kernel_place(layer, step)

    def kernel_metadata(self, step: Step) -> ops.AttentionMetadata:
        """See KVCache: those of host memory."""
        return self._by_device[None].kernel_metadata(step)

    def state(self, layer: int, step: Step) -> RecurrentState:
        """See KVCache."""
        return self._of(layer).state(layer, step)

    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache."""
        return self._of(layer).read(layer, run)

    def gather(
        self, layer: int, run: Segment, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache."""
        return self._of(layer).gather(layer, run, positions)

    def _of(self, layer: int) -> PagedKV | TieredKV:
        return self._by_device[self._layer_devices.get(layer)]


# Whatever a model keeps its KV in.
AnyKV = PagedKV | SplitKVCache | TieredKV

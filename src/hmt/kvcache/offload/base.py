"""What caches have in common whose pages lie in several places, and those of windows in rings."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from typing_extensions import override

from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, RecurrentState
from hmt.kernels import ops
from hmt.kvcache.key_ranges import KeyRange
from hmt.kvcache.page_store import KeptLayer
from hmt.kvcache.recurrent_state import StateStore

# Recurrent state of the layers that a cache is of; None: they have none.
LayerStates = StateStore | None

# Where keys lie, by layer.
KeyRanges = Mapping[int, KeyRange]


class OffloadedKVBase(ABC, KVCache):
    """KVCache: layers with a window attend to their rings, all others as the subclass says.

    Layers of `_ranges` keep their keys as these say, at every level.
    """

    _state: LayerStates = None
    _ranges: KeyRanges = MappingProxyType({})

    @property
    def states(self) -> LayerStates:
        """Recurrent state of its layers; None where they have none."""
        return self._state

    @override
    def state(self, layer: int, step: Step) -> RecurrentState:
        assert self._state is not None
        return self._state.of(layer, step)

    @abstractmethod
    def kept(self, layer: int) -> KeptLayer:
        """Where a layer's near pages are, or those of its window."""

    @abstractmethod
    def device_segments(self, layer: int, step: Step) -> ops.AttentionMetadata:
        """The step's runs over these pages."""

    @abstractmethod
    def _attend_whole(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of a layer without a window; options: scale and softcap."""

    @override
    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        kept = self.kept(layer)
        if layer in self._ranges:
            key = self._ranges[layer].normalized(key)
        runs = kept.appended(self.device_segments(layer, step))
        ops.append_pages(kept.pages, kept.slot, runs, key, value)

    @override
    def attend(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"scale": scale, "softcap": softcap}
        kept = self.kept(layer)
        if layer in self._ranges:
            return self._attend_ranged(layer, step, query, sinks, options)
        if not kept.window:
            return self._attend_whole(layer, step, query, sinks, options)
        options |= {"window": kept.window, "sinks": sinks}
        runs = self.device_segments(layer, step)
        return ops.paged_attention_output(kept.pages, kept.slot, runs, query, **options)

    def _attend_ranged(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """`_attend_whole` of a layer of `_ranges`."""
        assert sinks is None and not options["softcap"], "scores count relative to each other"
        own, latent = self._ranges[layer], self.kept(layer).pages.layout.latent
        out = self._attend_whole(layer, step, own.scaled_query(query), None, options)
        return own.restored_values(out) if latent else out

    @override
    def append_attend(
        self, layer: int, step: Step, heads: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        kept = self.kept(layer)
        if kept.window:
            runs, options = self.device_segments(layer, step), options | {"window": kept.window}
            return ops.append_attend_pages(kept.pages, kept.slot, runs, heads, **options)
        kv_heads = kept.pages.layout.heads
        query, key, value = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        self.append(layer, step, key, value)
        return self.attend(layer, step, query, **options).flatten(1)

    def kernel_pages(self, layer: int) -> tuple[ops.Pages, int, int] | None:
        """See KVCache: pages are in several places."""
        return None

    def kernel_state(self, layer: int) -> Mapping[str, torch.Tensor] | None:
        """See KVCache: pages are in several places."""
        return None

    def kernel_place(
        self, layer: int, step: Step
    ) -> tuple[ops.Pages, int, ops.AttentionMetadata] | None:
        """See KVCache: pages are in several places."""
        return None

    @override
    def kernel_metadata(self, step: Step) -> Any:
        raise AssertionError("kernel_pages said no")

"""A floor under each layer: so many of its experts stay, whatever other layers need."""

from collections import Counter
from collections.abc import Iterator

import torch

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.weights.policies.interface import EvictionPolicy


class LayerFloors:
    """`inner`'s order, but experts of layers that have no more than `floor` cached go last.

    So a burst in one layer, such as a prompt that visits all its experts, cannot empty the others.
    """

    def __init__(self, inner: EvictionPolicy, floor: int) -> None:
        self._inner = inner
        self._floor = floor
        self._cached: Counter[int] = Counter()

    def cached(self, block: BlockId) -> None:
        """See EvictionPolicy."""
        self._cached[block.layer] += block.kind is BlockKind.EXPERT
        self._inner.cached(block)

    def used(self, block: BlockId) -> None:
        """See EvictionPolicy."""
        self._inner.used(block)

    def removed(self, block: BlockId) -> None:
        """See EvictionPolicy."""
        self._cached[block.layer] -= block.kind is BlockKind.EXPERT
        self._inner.removed(block)

    def routed(self, layer: int, experts: torch.Tensor, scales: torch.Tensor) -> None:
        """See EvictionPolicy."""
        self._inner.routed(layer, experts, scales)

    def coldest_first(self) -> Iterator[BlockId]:
        """See EvictionPolicy."""
        left = self._cached.copy()  # as if all that were yielded had gone
        kept = []
        for block in self._inner.coldest_first():
            if block.kind is not BlockKind.EXPERT:
                yield block
            elif left[block.layer] > self._floor:
                left[block.layer] -= 1
                yield block
            else:
                kept.append(block)
        yield from kept

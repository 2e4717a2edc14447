"""Least recently used."""

from collections import OrderedDict
from collections.abc import Iterator

from typing_extensions import override

from hmt.contracts.blocks import BlockId
from hmt.weights.eviction.interface import EvictionPolicy


class LRU(EvictionPolicy):
    """Least recently used first; a block that came and was never used goes before all others."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    @override
    def cached(self, block: BlockId) -> None:
        self._order[block] = None
        self._order.move_to_end(block, last=False)

    @override
    def used(self, block: BlockId) -> None:
        self._order.move_to_end(block)

    @override
    def removed(self, block: BlockId) -> None:
        del self._order[block]

    @override
    def eviction_order(self) -> Iterator[BlockId]:
        return iter(self._order)

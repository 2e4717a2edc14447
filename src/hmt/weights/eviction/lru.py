"""Least recently used."""

from collections import OrderedDict
from collections.abc import Iterator

from hmt.contracts.blocks import BlockId


class LRU:
    """Least recently used first; a block that came and was never used goes before all others."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def cached(self, block: BlockId) -> None:
        """See EvictionPolicy."""
        self._order[block] = None
        self._order.move_to_end(block, last=False)

    def used(self, block: BlockId) -> None:
        """See EvictionPolicy."""
        self._order.move_to_end(block)

    def removed(self, block: BlockId) -> None:
        """See EvictionPolicy."""
        del self._order[block]

    def eviction_order(self) -> Iterator[BlockId]:
        """See EvictionPolicy."""
        return iter(self._order)

"""Which cached block goes first when a slot is needed."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from hmt.contracts.blocks import BlockId


class EvictionPolicy(Protocol):
    """Ranks cached blocks.  Called under the store's lock; knows nothing of leases."""

    def used(self, block: BlockId) -> None:
        """`block` was leased, or has just been cached."""
        ...

    def removed(self, block: BlockId) -> None:
        """`block` is no longer cached."""
        ...

    def coldest_first(self) -> Iterator[BlockId]:
        """All cached blocks in the order in which they should go.

        The policy must not change while this is iterated.
        """
        ...


class LRU:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def used(self, block: BlockId) -> None:
        """See EvictionPolicy."""
        self._order[block] = None
        self._order.move_to_end(block)

    def removed(self, block: BlockId) -> None:
        """See EvictionPolicy."""
        self._order.pop(block, None)

    def coldest_first(self) -> Iterator[BlockId]:
        """See EvictionPolicy."""
        return iter(self._order)

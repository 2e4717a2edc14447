"""What the store asks of a cache policy."""

from collections.abc import Iterator
from typing import Protocol

from hmt.contracts.blocks import BlockId


class EvictionPolicy(Protocol):
    """Ranks cached blocks.  Called under the store's lock; knows nothing of leases.

    A block is `cached` first, `used` any number of times, and `removed` in the end.
    """

    def cached(self, block: BlockId) -> None:
        """`block` has come into a slot, and has not been leased yet.

        The store keeps blocks that are awaited; how this ranks one matters when no lease follows.
        """
        ...

    def used(self, block: BlockId) -> None:
        """`block`, which is cached, was leased."""
        ...

    def removed(self, block: BlockId) -> None:
        """`block` is no longer cached."""
        ...

    def eviction_order(self) -> Iterator[BlockId]:
        """All cached blocks in the order in which they should go.

        The policy must not change while this is iterated.  To take the first few costs little,
        however many there are.
        """
        ...

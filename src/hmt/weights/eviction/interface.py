"""What the store asks of a cache policy, and what a policy may know."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hmt.contracts.blocks import BlockId


class EvictionPolicy(Protocol):
    """Ranks cached blocks.  Called under the store's lock; knows nothing of leases.

    A block is `cached` first, `used` any number of times, and `removed` in the end.
    """

    def cached(self, block: BlockId) -> None:
        """`block` has come into a slot, and nobody has leased it yet.

        The store keeps blocks that are awaited; how this ranks one matters when nobody comes.
        """
        ...

    def used(self, block: BlockId) -> None:
        """`block`, which is cached, was leased."""
        ...

    def removed(self, block: BlockId) -> None:
        """`block` is no longer cached."""
        ...

    def routed(self, layer: int, experts: torch.Tensor, scales: torch.Tensor) -> None:
        """A router chose: experts int64 [tokens, top_k], scales f32 [tokens, top_k].

        Comes before the experts of `layer` are leased; most policies need not know.
        """
        ...

    def eviction_order(self) -> Iterator[BlockId]:
        """All cached blocks in the order in which they should go.

        The policy must not change while this is iterated.  To take the first few costs little,
        however many there are.
        """
        ...


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What some policies weigh.

    block_bytes   bytes that leave the disk when a block is read again
    read_rate     of the disk, bytes per second
    latency_s     that a read takes apart from its bytes
    pressure      share of the slots that is in use now
    """

    block_bytes: Mapping[BlockId, int] = field(default_factory=dict)
    read_rate: float = 2e9
    latency_s: float = 1e-4
    pressure: Callable[[], float] = lambda: 1.0

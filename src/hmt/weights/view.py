"""A store's weights as one part of the engine has them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import MoeBackend, Priority, ResidentBlock, Weights

# The lease of a block that is computed with in another way than the store's; None: the store's.
OtherLease = Callable[[BlockId], AbstractContextManager[Mapping[str, WeightTensor]] | None]


class RouterObserver(Protocol):
    """Hears what routers choose."""

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """See Weights.  Its experts have been requested already."""
        ...


class WeightsView:
    """Implements Weights over other Weights, with the differences that its options name."""

    def __init__(
        self,
        weights: Weights,
        *,
        prefetch: bool = True,
        observers: Sequence[RouterObserver] = (),
        other_lease: OtherLease | None = None,
    ) -> None:
        """By default all is as `weights` has it.

        prefetch     False: blocks are read when they are leased, and each is leased: requests are
                     not passed on, and no block is said to be resident
        observers    are told what routers choose; every expert is leased then, for a MoeBackend
                     would have to wait until observers know them
        other_lease  is asked first for a block's lease
        """
        self._weights = weights
        self._prefetch = prefetch
        self._observers = tuple(observers)
        self._other_lease = other_lease
        # Leases are taken several times per layer: those of the store do not pass through here.
        self.lease = weights.lease if other_lease is None else self._lease
        self.lease_each = weights.lease_each
        self.count = weights.count
        self.rows = weights.rows

    def resident(self, blocks: Sequence[BlockId]) -> Sequence[ResidentBlock] | None:
        """Implements Weights."""
        return self._weights.resident(blocks) if self._prefetch else None

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        """Implements Weights."""
        if self._prefetch:
            self._weights.request(blocks, priority)

    def request_rows(self, block: BlockId, name: str, ids: torch.Tensor) -> None:
        """Implements Weights."""
        if self._prefetch:
            self._weights.request_rows(block, name, ids)

    def moe_backend(self, layer: int) -> MoeBackend | None:
        """Implements Weights."""
        return None if self._observers else self._weights.moe_backend(layer)

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Implements Weights."""
        self._weights.routed(layer, hidden, experts, scales)
        for observer in self._observers:
            observer.routed(layer, hidden, experts, scales)

    def _lease(self, block: BlockId) -> AbstractContextManager[Mapping[str, WeightTensor]]:
        assert self._other_lease is not None
        return self._other_lease(block) or self._weights.lease(block)

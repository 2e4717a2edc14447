"""Weights as they are multiplied for sequences that need higher precision."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import Activations, WeightTensor
from hmt.contracts.store import LeasedGroup, MoeBackend, Priority, ResidentBlock, Weights
from hmt.kernels.weight_cache import WeightCache

Params = Mapping[str, WeightTensor]

# The same numbers, multiplied with activations that are not rounded.
_PRECISE: WeightCache[WeightTensor] = WeightCache()


class PreciseView:
    """Implements Weights over others: activations are not rounded, and each block is leased."""

    def __init__(
        self, weights: Weights, copies: Weights | None = None, copied: Collection[BlockId] = ()
    ) -> None:
        """By default all blocks are those of `weights`.

        copies   has the blocks `copied` in higher precision
        """
        self._weights = weights
        self._copies, self._copied = copies, frozenset(copied)
        self.count = weights.count
        self.rows = weights.rows

    @contextmanager
    def lease(self, block: BlockId) -> Iterator[Params]:
        """Implements Weights."""
        with self._holder(block).lease(block) as params:
            yield _precise(params)

    @contextmanager
    def lease_each(self, blocks: Sequence[BlockId]) -> Iterator[Iterator[LeasedGroup]]:
        """Implements Weights."""
        holder = self._holder(blocks[0]) if blocks else self._weights
        with holder.lease_each(blocks) as groups:
            yield ([(block, _precise(params)) for block, params in group] for group in groups)

    def resident(self, blocks: Sequence[BlockId]) -> Sequence[ResidentBlock] | None:
        """Implements Weights: says of none that it stays."""
        return None

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        """Implements Weights."""
        if self._copies is None:
            self._weights.request(blocks, priority)

    def request_rows(self, block: BlockId, name: str, ids: torch.Tensor) -> None:
        """Implements Weights."""
        self._weights.request_rows(block, name, ids)

    def moe_backend(self, layer: int) -> MoeBackend | None:
        """Implements Weights: experts are leased."""
        return None

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Implements Weights."""
        self._weights.routed(layer, hidden, experts, scales)

    def _holder(self, block: BlockId) -> Weights:
        return self._copies if self._copies is not None and block in self._copied else self._weights


def _precise(params: Params) -> Params:
    return {name: _with_floats(weight) for name, weight in params.items()}


def _with_floats(weight: WeightTensor) -> WeightTensor:
    """Another one for all weights, as kernels keep what they made of a whole block with any."""
    made = _PRECISE.get(weight)
    if made is None:
        made = _PRECISE[weight] = replace(weight, activations=Activations.FLOAT)
    return made

"""What all policies share that give each block a number when it is used."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from typing_extensions import override

from hmt.contracts.blocks import BlockId
from hmt.weights.eviction.interface import EvictionPolicy
from hmt.weights.eviction.ranking import Ranking


class RankedPolicy(ABC, EvictionPolicy):
    """Blocks go in the order of a rank that changes only when they are used.

    Scores that fade with time are no exception when all fade alike: the logarithm of
    score x 2^(-age / half-life), plus now / half-life, is the same at any time.
    """

    def __init__(self) -> None:
        self.ranking = Ranking()

    @abstractmethod
    def arrived(self, block: BlockId) -> float:
        """The rank of a block that was cached and not used yet."""

    @abstractmethod
    def after_use(self, block: BlockId) -> float:
        """The rank of a block that is used now."""

    def left(self, block: BlockId, rank: float) -> None:
        """`block`, which had this rank, is no longer cached."""

    @override
    def cached(self, block: BlockId) -> None:
        self.ranking.put(block, self.arrived(block))

    @override
    def used(self, block: BlockId) -> None:
        self.ranking.put(block, self.after_use(block))

    @override
    def removed(self, block: BlockId) -> None:
        rank = self.ranking.remove(block)
        assert rank is not None, f"{block} was not cached"
        self.left(block, rank)

    @override
    def eviction_order(self) -> Iterator[BlockId]:
        return self.ranking.ascending()

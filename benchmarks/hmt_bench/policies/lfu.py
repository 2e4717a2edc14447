"""Least frequently used, with ageing (LFU-DA: Arlitt et al., ACM SIGMETRICS PER 27(4), 2000)."""

from typing_extensions import override

from hmt.contracts.blocks import BlockId
from hmt_bench.policies.ranked import RankedPolicy


class LFU(RankedPolicy):
    """Rank: uses since the block came, plus the age of the cache when it was last used.

    The age is the rank of the block that went last.  It rises as blocks go, so that one that was
    used much, long ago, is overtaken by those that are used a little, now.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[BlockId, int] = {}
        self._age = 0.0

    @override
    def arrived(self, block: BlockId) -> float:
        self._uses[block] = 0
        return self._age

    @override
    def after_use(self, block: BlockId) -> float:
        self._uses[block] += 1
        return self._age + self._uses[block]

    @override
    def left(self, block: BlockId, rank: float) -> None:
        self._age = max(self._age, rank)
        del self._uses[block]

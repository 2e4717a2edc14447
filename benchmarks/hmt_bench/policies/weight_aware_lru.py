"""WA-LRU: least recently used, aware of sizes and of what a refetch costs.

GreedyDual-Size (Cao and Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997).
"""

from typing_extensions import override

from hmt.contracts.blocks import BlockId
from hmt_bench.policies.context import PolicyContext
from hmt_bench.policies.ranked import RankedPolicy


class WeightAwareLRU(RankedPolicy):
    """Rank at each use: seconds that a refetch costs, per byte of room, plus the cache's age.

    The age is the rank of the block that went last.  Where all blocks are of one size this is LRU;
    else small blocks stay longer, for the latency of a read does not shrink with its size.
    """

    def __init__(self, surroundings: PolicyContext) -> None:
        super().__init__()
        self._around = surroundings
        self._age = 0.0

    @override
    def arrived(self, block: BlockId) -> float:
        return self._age

    @override
    def after_use(self, block: BlockId) -> float:
        around = self._around
        nbytes = max(1, around.block_bytes[block])
        refetch_s = nbytes / around.read_rate + around.latency_s
        return self._age + refetch_s / nbytes

    @override
    def left(self, block: BlockId, rank: float) -> None:
        self._age = max(self._age, rank)

"""LRU-2 (O'Neil, O'Neil and Weikum, "The LRU-K page replacement algorithm", SIGMOD 1993)."""

from typing_extensions import override

from hmt.contracts.blocks import BlockId
from hmt.weights.eviction.step_clock import StepClock
from hmt_bench.policies.ranked import RankedPolicy

_NEVER = -1.0


class LRU2(RankedPolicy):
    """The block goes whose last use but one is longest ago; among those used once, by last use.

    Uses within one step count as one (the paper's correlated references).  The steps of use of
    blocks that have gone are remembered, too: a model has thousands of blocks, two numbers each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = StepClock()
        self._uses: dict[BlockId, tuple[float, float]] = {}  # steps of the last but one, the last

    @override
    def arrived(self, block: BlockId) -> float:
        return self._uses.get(block, (_NEVER, _NEVER))[0]

    def after_use(self, block: BlockId) -> float:
        """See RankedPolicy.  Equal ranks go in the order of this call."""
        step = self._clock.use(block)
        _, last = self._uses.get(block, (_NEVER, _NEVER))
        self._uses[block] = (last, step)
        return last

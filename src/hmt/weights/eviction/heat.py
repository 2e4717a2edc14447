"""Heat: uses that fade (LRFU: Lee et al., IEEE Transactions on Computers 50(12), 2001)."""

from math import inf, log2

from hmt.contracts.blocks import BlockId
from hmt.weights.eviction.ranked import RankedPolicy
from hmt.weights.eviction.step_clock import StepClock


class Heat(RankedPolicy):
    """Each use adds one to a block's heat, which halves every `half_life` steps.

    Up to a factor the moving average of uses per step.  A short half-life makes this LRU, a long
    one LFU.  The heat of blocks that have gone is remembered.
    """

    def __init__(self, half_life: float) -> None:
        """`half_life` in steps."""
        super().__init__()
        self._half_life = half_life
        self._clock = StepClock()
        self._heat: dict[BlockId, tuple[float, int]] = {}  # at the step of the last use

    def arrived(self, block: BlockId) -> float:
        """See RankedPolicy."""
        if block not in self._heat:
            return -inf
        heat, step = self._heat[block]
        return log2(heat) + step / self._half_life

    def after_use(self, block: BlockId) -> float:
        """See RankedPolicy."""
        step = self._clock.use(block)
        heat, last = self._heat.get(block, (0.0, step))
        heat = 1.0 + heat * 2.0 ** ((last - step) / self._half_life)
        self._heat[block] = (heat, step)
        return log2(heat) + step / self._half_life

"""Heat: uses that fade (LRFU: Lee et al., IEEE Transactions on Computers 50(12), 2001)."""

from collections.abc import Iterator
from math import inf, log2

from typing_extensions import override

from hmt.contracts.blocks import BlockId
from hmt.weights.eviction.interface import EvictionPolicy
from hmt.weights.eviction.ranking import Ranking
from hmt.weights.eviction.step_clock import StepClock

HALF_LIFE = 16.0  # steps: the best of 4 to 128, on recorded and on synthetic traces


class Heat(EvictionPolicy):
    """Each use adds one to a block's heat, which halves every `half_life` steps.

    Up to a factor the moving average of uses per step.  A short half-life makes this LRU, a long
    one LFU.  The heat of blocks that have gone is remembered.

    Blocks are ranked by log2(heat x 2^(-age / half_life)) + now / half_life, which changes only
    when they are used.
    """

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        """`half_life` in steps."""
        self._half_life = half_life
        self._ranking = Ranking()
        self._clock = StepClock()
        self._heat: dict[BlockId, tuple[float, int]] = {}  # at the step of the last use

    @override
    def cached(self, block: BlockId) -> None:
        heat, step = self._heat.get(block, (0.0, 0))
        self._ranking.put(block, log2(heat) + step / self._half_life if heat else -inf)

    @override
    def used(self, block: BlockId) -> None:
        step = self._clock.use(block)
        heat, last = self._heat.get(block, (0.0, step))
        heat = 1.0 + heat * 2.0 ** ((last - step) / self._half_life)
        self._heat[block] = (heat, step)
        self._ranking.put(block, log2(heat) + step / self._half_life)

    @override
    def removed(self, block: BlockId) -> None:
        self._ranking.remove(block)

    @override
    def eviction_order(self) -> Iterator[BlockId]:
        return self._ranking.ascending()

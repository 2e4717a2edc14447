"""A2CR: scores that decay, against a threshold that rises with pressure."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from math import exp

import torch
from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.weights.eviction.interface import EvictionPolicy
from hmt.weights.eviction.step_clock import StepClock
from hmt_bench.policies.context import PolicyContext

_DECAY = 0.05  # per step since the last use
_THRESHOLD = (0.2, 0.6)  # without pressure, and what full pressure adds


class DecayedScore(EvictionPolicy):
    """A block may go once score x exp(-0.05 x age) is below 0.2 + 0.6 x pressure.

    The score is the weight that the router gave at the last use, summed over the step's tokens;
    1 is what it gave to a chosen expert on average, and more counts as 1.  The age is in steps.
    Those that may go, go by last use; then the others, the lowest score first.
    """

    def __init__(self, surroundings: PolicyContext) -> None:
        self._pressure = surroundings.pressure
        self._clock = StepClock()
        self._weights: dict[BlockId, float] = {}  # of the layer that was routed last
        self._scores: OrderedDict[BlockId, tuple[float, int]] = OrderedDict()  # by last use

    def routed(self, layer: int, experts: torch.Tensor, scales: torch.Tensor) -> None:
        """See EvictionPolicy."""
        sums: Counter[int] = Counter()
        for token, given in zip(experts.tolist(), scales.tolist(), strict=True):
            for expert, scale in zip(token, given, strict=True):
                sums[expert] += scale
        average = sum(sums.values()) / max(1, experts.numel())
        self._weights = {
            BlockId(layer, BlockKind.EXPERT, expert): min(1.0, total / average)
            for expert, total in sums.items()
            if average > 0
        }

    @override
    def cached(self, block: BlockId) -> None:
        self._scores[block] = (0.0, self._clock.step)
        self._scores.move_to_end(block, last=False)

    @override
    def used(self, block: BlockId) -> None:
        self._scores[block] = (self._weights.get(block, 1.0), self._clock.use(block))
        self._scores.move_to_end(block)

    @override
    def removed(self, block: BlockId) -> None:
        del self._scores[block]

    def score(self, block: BlockId) -> float:
        """The score of `block` as it has decayed until now."""
        given, step = self._scores[block]
        return given * exp(_DECAY * (step - self._clock.step))

    @override
    def eviction_order(self) -> Iterator[BlockId]:
        least, more = _THRESHOLD
        threshold = least + more * self._pressure()
        above = []
        for block in self._scores:
            if self.score(block) < threshold:
                yield block
            else:
                above.append(block)
        yield from sorted(above, key=self.score)

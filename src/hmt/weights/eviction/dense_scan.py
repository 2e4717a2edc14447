"""Dense blocks in a cache: a scan that goes around."""

from collections import OrderedDict
from collections.abc import Iterator

from typing_extensions import override

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.weights.eviction.interface import EvictionPolicy


class DenseByScan(EvictionPolicy):
    """Experts go first, in the order of a policy of their own; then dense blocks, the last used.

    Every step uses each dense block once, in one order, so the one just used is the one that is
    needed last: to drop it first is Belady's choice (IBM Systems Journal 5(2), 1966), and what was
    there before stays, step after step.  LRU would drop each block just before it is needed and
    never hit.  Experts go before them because no expert is certain to be used in every step.
    """

    def __init__(self, experts: EvictionPolicy) -> None:
        self._experts = experts
        self._dense: OrderedDict[BlockId, None] = OrderedDict()  # by last use

    @override
    def cached(self, block: BlockId) -> None:
        if block.kind is BlockKind.EXPERT:
            self._experts.cached(block)
        else:
            # It was asked for because it comes next, so it is the last that should go.
            self._dense[block] = None
            self._dense.move_to_end(block, last=False)

    @override
    def used(self, block: BlockId) -> None:
        if block.kind is BlockKind.EXPERT:
            self._experts.used(block)
        else:
            self._dense.move_to_end(block)

    @override
    def removed(self, block: BlockId) -> None:
        if block.kind is BlockKind.EXPERT:
            self._experts.removed(block)
        else:
            del self._dense[block]

    @override
    def eviction_order(self) -> Iterator[BlockId]:
        yield from self._experts.eviction_order()
        yield from reversed(self._dense)

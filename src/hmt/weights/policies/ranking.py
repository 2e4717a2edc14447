"""A set of blocks in the order of a number, which changes with every use."""

import heapq
from collections.abc import Iterator
from itertools import count

from hmt.contracts.blocks import BlockId

_Item = tuple[float, int, BlockId]
_SLACK = 64


class Ranking:
    """Blocks by ascending rank; among equal ranks, the one that was ranked first.

    A heap whose outdated items are left where they are until they come to the top, or are half of
    all: ranking a block takes O(log n), and so does each of the first blocks in order.
    """

    def __init__(self) -> None:
        self._heap: list[_Item] = []
        self._current: dict[BlockId, _Item] = {}
        self._order = count()

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._current

    def rank(self, block: BlockId) -> float:
        """The rank of `block`.  Raises KeyError where it has none."""
        return self._current[block][0]

    def put(self, block: BlockId, rank: float) -> None:
        """Give `block` a rank, in place of the one that it may have."""
        item = (rank, next(self._order), block)
        self._current[block] = item
        if len(self._heap) >= 2 * len(self._current) + _SLACK:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, item)

    def remove(self, block: BlockId) -> float | None:
        """Forget `block`; its rank, or None where it had none."""
        item = self._current.pop(block, None)
        return None if item is None else item[0]

    def ascending(self) -> Iterator[BlockId]:
        """All blocks, lowest rank first.  Ranks must not change while this is iterated."""
        heap, current = self._heap, self._current
        while heap and current.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        # A child in a heap is never smaller than its parent: those whose parents have been seen
        # hold the next one, and the heap itself need not change.
        seen = [(heap[0], 0)] if heap else []
        while seen:
            item, at = heapq.heappop(seen)
            if current.get(item[2]) is item:
                yield item[2]
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(seen, (heap[child], child))

"""A set of blocks in the order of a number, which changes with every use."""

import heapq
from collections.abc import Iterator
from itertools import count

from hmt.contracts.blocks import BlockId

_Item = tuple[float, int, BlockId]
_SLACK = 64


class Ranking:
    """Blocks by ascending rank; among equal ranks, the one that was ranked first.

    A heap, in which a block that is ranked higher stays where it was until it comes to the top: a
    block that is used again and again is moved once, and not at each use.
    """

    def __init__(self) -> None:
        self._heap: list[_Item] = []
        self._current: dict[BlockId, _Item] = {}
        self._placed: dict[BlockId, _Item] = {}  # in the heap: the current one, or a lower one
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
        placed = self._placed.get(block)
        if placed is None or item < placed:
            self._placed[block] = item
            heapq.heappush(self._heap, item)

    def remove(self, block: BlockId) -> float | None:
        """Forget `block`; its rank, or None where it had none."""
        item = self._current.pop(block, None)
        if item is None:
            return None
        del self._placed[block]
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)
            self._placed = dict(self._current)
        return item[0]

    def ascending(self) -> Iterator[BlockId]:
        """All blocks, lowest rank first.  Ranks must not change while this is iterated."""
        self._settle_top()
        heap, current = self._heap, self._current
        # A child in a heap is never smaller than its parent, and a block's current item is never
        # smaller than the placed one: what follows those that were seen holds the next block.
        seen = [(heap[0], 0)] if heap else []
        while seen:
            item, at = heapq.heappop(seen)
            block = item[2]
            if at >= 0:
                for child in (2 * at + 1, 2 * at + 2):
                    if child < len(heap):
                        heapq.heappush(seen, (heap[child], child))
            if current.get(block) is item:
                yield block
            elif self._placed.get(block) is item:
                heapq.heappush(seen, (current[block], -1))

    def _settle_top(self) -> None:
        """Until the top of the heap is somebody's current rank."""
        heap, current, placed = self._heap, self._current, self._placed
        while heap and current.get(heap[0][2]) is not heap[0]:
            block = heap[0][2]
            if placed.get(block) is heap[0]:
                placed[block] = current[block]
                heapq.heapreplace(heap, current[block])
            else:
                heapq.heappop(heap)

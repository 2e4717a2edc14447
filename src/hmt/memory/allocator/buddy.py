"""Which pages of an address range are free: a buddy system that gives exact sizes.

A request for n pages takes the smallest free power-of-two block that holds it and gives the tail
back at once, so 33 MiB cost 33 MiB; what rounding up would waste stays free, in aligned pieces.
Where no aligned block is large enough, neighbours that are not each other's buddies are joined.
"""

import heapq
from collections.abc import Iterator


class Buddy:
    """Free pages among `pages` (any number, not only powers of two).  Not thread-safe.

    The smallest block is one page.  Free blocks lie in a heap per order, by address; an entry of a
    heap counts only while `_free` agrees, so taking a block out of the middle costs nothing.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free_pages = 0
        self._free: dict[int, int] = {}  # start: order
        self._heaps: list[list[int]] = [[] for _ in range(pages.bit_length())]
        self.give(0, pages)

    def take(self, pages: int) -> int | None:
        """The first of `pages` adjacent pages, from the tightest block; None: no room."""
        for order in range((pages - 1).bit_length(), len(self._heaps)):
            start = self._lowest(order)
            if start is not None:
                return self._claim(start, pages)
        return self.take_packed(pages)

    def take_packed(self, pages: int) -> int | None:
        """Like `take`, but at the lowest address where they fit, whatever the alignment."""
        for start, length in self.runs():
            if length >= pages:
                return self._claim(start, pages)
        return None

    def take_at(self, start: int, pages: int) -> None:
        """Take these pages, which must be free."""
        self._claim(start, pages)

    def give(self, start: int, pages: int) -> None:
        """Give back pages that were taken, in any pieces."""
        self.free_pages += pages
        end = start + pages
        assert start >= 0 and end <= self.pages, (start, end, self.pages)
        while start < end:
            order = (end - start).bit_length() - 1
            if start:
                order = min(order, (start & -start).bit_length() - 1)
            self._insert(start, order)
            start += 1 << order

    def runs(self) -> Iterator[tuple[int, int]]:
        """Free runs (first page, pages) by address, neighbours joined."""
        first, end = 0, 0
        for start in sorted(self._free):
            if start != end:
                if end > first:
                    yield first, end - first
                first = start
            end = start + (1 << self._free[start])
        if end > first:
            yield first, end - first

    def _insert(self, start: int, order: int) -> None:
        """A free block; joined with its buddy while that is free too."""
        if start in self._free:
            raise AssertionError(f"page {start} was given back twice")
        while self._free.get(start ^ (1 << order)) == order:
            del self._free[start ^ (1 << order)]
            start &= ~(1 << order)
            order += 1
        self._free[start] = order
        heap = self._heaps[order]
        heapq.heappush(heap, start)
        if len(heap) > 2 * len(self._free) + 64:  # mostly entries that no longer count
            self._heaps[order] = sorted({s for s in heap if self._free.get(s) == order})

    def _lowest(self, order: int) -> int | None:
        heap = self._heaps[order]
        while heap:
            if self._free.get(heap[0]) == order:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _claim(self, start: int, pages: int) -> int:
        """Take [start, start + pages) out of the free blocks that cover it."""
        end, position = start + pages, start
        while position < end:
            block = self._block_with(position)
            block_end = block + (1 << self._free.pop(block))
            self.free_pages -= block_end - block
            if block < position:
                self.give(block, position - block)
            if block_end > end:
                self.give(end, block_end - end)
            position = block_end
        return start

    def _block_with(self, page: int) -> int:
        """The free block that holds `page`."""
        for order in range(len(self._heaps)):
            start = page >> order << order
            if self._free.get(start) == order:
                return start
        raise AssertionError(f"page {page} is not free")

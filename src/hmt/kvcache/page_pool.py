"""Where a KVAllocator's pages come from, in one memory.  Numbers only."""

import time
from collections.abc import Callable, Iterable, Sequence

from hmt.contracts.kv import KVAccount
from hmt.kvcache.page_table import Ints, PageSlots, PageTable
from hmt.memory import Bitmap


class PagePool:
    """Pages of one memory, which stay where they are made: a page's id is its place.

    PageMigration is the same over several memories.

    pages_move   whether pages change their places, between memories of which the first is where
                 layers compute
    """

    pages_move = False

    def __init__(
        self,
        pages: int | Sequence[PageSlots],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pages`: how many, or the places of each tier."""
        levels = [Bitmap(pages)] if isinstance(pages, int) else pages
        self.page_table = PageTable(levels)
        self.account = KVAccount()
        self.clock = clock

    @property
    def free_pages(self) -> int:
        """Pages that can be made."""
        return self.page_table.free

    @property
    def disk_has_room(self) -> bool:
        """Whether pages may go to the disk."""
        return False

    def new(self, count: int, stays: Iterable[Ints]) -> Ints:
        """`count` pages where layers compute; none of `stays` moves away to make room for them."""
        return self.page_table.new(count)

    def settle(self) -> None:
        """Wait for pages that are on their way, and let them arrive."""

    def promote(self, stays: Iterable[Ints]) -> None:
        """Let some pages come to where layers compute, in place of others that are worth less."""

    def write_back(self, wanted: int, stays: Callable[[], Iterable[Ints]]) -> None:
        """Between steps: begin to copy pages that will have to leave for `wanted` new ones."""

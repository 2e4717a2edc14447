"""A tiered cache whose sequences may begin with pages that others have computed."""

from collections.abc import Mapping

import numpy as np
import torch

from hmt.base.errors import ConfigError
from hmt.contracts.kv import GROUP_PAGES
from hmt.contracts.model import PAGE_TOKENS
from hmt.kvcache.offload.page_migration import pages_of, to_tensor
from hmt.kvcache.offload.tiered_cache import TieredKV
from hmt.kvcache.page_store import recode
from hmt.kvcache.page_table import Ints, PageTier
from hmt.kvcache.prefix.extents import PageExtents
from hmt.kvcache.prefix.tree import PrefixTree, Tokens

_NONE = np.zeros(0, dtype=np.int64)


class SharingKV(TieredKV):
    """TieredKV with a tree of prefixes over its pages.

    Pages that only the tree owns count as free: they move away like all others, and go for good
    when a sequence needs the room.  What was reserved can still always be had.

    Models with sliding windows take no part yet: their rings forget what a prefix would need.
    Prefixes that lie in fewer bits are used as they are, like those of a running sequence.
    """

    _prefixes: PrefixTree | None = None

    def keep_prefixes(
        self, pages: int | None = None, *, order: str = "lru", max_age_s: float | None = None
    ) -> PrefixTree:
        """Begin to keep prefixes: at most `pages`, or as many as there is room for.

        Raises ConfigError where a layer has a sliding window.
        """
        if self._windows:
            raise ConfigError(
                "this model has layers with a sliding window, whose keys and values are not kept "
                "beyond it, so prompts cannot share them: leave the prefix cache off"
            )
        book = self._places.page_table
        most = book.count if pages is None else pages
        self._prefixes = PrefixTree(
            book, most, order=order, max_age_s=max_age_s, clock=self._places.clock
        )
        return self._prefixes

    def can_open_with(self, tokens: int, ids: Ints) -> bool:
        """Whether `open_with` would succeed now."""
        return self._has_room(ids, pages_of(tokens) - len(ids))

    def open_with(self, tokens: int, ids: Ints) -> int:
        """A new sequence of `tokens` positions that begins with pages `ids`; its handle.

        ids   of the tree, from a call since which nothing else was asked of this cache; the
              sequence owns a share of them from now on.  Raises BudgetError.
        """
        sequence = self._open(ids.copy(), pages_of(tokens) - len(ids))
        self._places.page_table.share(ids)
        self._sequences[sequence].tokens = PAGE_TOKENS * len(ids)
        return sequence

    def keep(self, sequence: int, tokens: Tokens, salt: str = "", owner: str = "") -> int:
        """Let the tree hold what a sequence has of `tokens`, its first ones, all appended.

        Whole pages only; how many are new.  As a rule just before the sequence is closed.
        """
        assert self._prefixes is not None
        return self._prefixes.insert(tokens, self._sequences[sequence].pages, salt, owner)

    def copy_out(self, ids: Ints, extents: PageExtents, memory: torch.Tensor) -> None:
        """Fill host memory [len(ids), page_bytes] with pages, wherever they lie.

        Raises DiskReadError.
        """
        for pages, members in extents.kinds(memory):
            for at, layer in enumerate(members):
                for source, slot, table, which in self._places.lying(layer, ids):
                    recode(pages, at, which, source, slot, table)

    def copy_in(
        self, sequence: int, first: int, extents: PageExtents, memory: torch.Tensor
    ) -> None:
        """Let pages number `first` and on of a sequence hold host memory [pages, page_bytes].

        It must hold what is before them and no more, and have reserved them.  May move other pages
        away; raises DiskReadError.
        """
        assert len(self._sequences[sequence].pages) == first
        hot = self._places.device
        for part in memory.split(max(1, self._chunk // PAGE_TOKENS)):
            self._grow({sequence: len(part)})
            ids = self._sequences[sequence].pages[-len(part) :]
            numbers = to_tensor(self._places.page_table.slots_of(ids)).to(hot.device)
            rows = torch.arange(len(part))
            kinds = zip(hot.kinds, extents.kinds(part), strict=True)
            for (pages, members), (source, _) in kinds:
                for at in range(len(members)):
                    recode(pages, at, numbers, source, at, rows)

    def _free_pages(self, held: Ints) -> int:
        """See TieredKV; what only the tree owns can be free."""
        return super()._free_pages(held) + self._places.page_table.freed_by(self._idle(held))

    def _idle(self, held: Ints = _NONE) -> Ints:
        """Pages that only the tree owns, without `held`."""
        if self._prefixes is None:
            return _NONE
        alone = self._prefixes.alone()
        return np.setdiff1d(alone, held, assume_unique=True) if len(held) else alone

    def _make(self, counts: Mapping[int, int]) -> list[Ints]:
        """See TieredKV; prefixes go where there would be too little room without."""
        self._let_go(sum(counts.values()))
        return super()._make(counts)

    def _let_go(self, pages: int) -> None:
        """Evict prefixes until hot pages for so many can be made.

        An idle page that shares a group on the disk with one in use can no longer make room, so no
        more of them may go there than there are places to spare.
        """
        book = self._places.page_table
        if self._prefixes is None or pages <= book.free_at(PageTier.DEVICE):
            return
        self._places.settle()
        while len(idle := self._idle()):
            short = pages - self._places.free_pages
            near = int((book.level_of(idle) != PageTier.DISK).sum())
            lost = near - self._free_pages(_NONE) if self._places.disk_has_room else 0
            if max(short, lost) <= 0:
                return
            self._prefixes.evict(max(short, lost, GROUP_PAGES))  # some more at once, as they move

"""The cache of one tier whose sequences may begin with pages that others have computed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from hmt.contracts.model import PAGE_TOKENS, KVLayer
from hmt.kernels import ops
from hmt.kvcache.page_allocator import PageAllocator
from hmt.kvcache.page_store import Pool, recode
from hmt.kvcache.page_table import Ints, PageTable
from hmt.kvcache.paged_cache import PagedKV
from hmt.kvcache.prefix.extents import PageExtents
from hmt.kvcache.prefix.tree import PrefixTree, Tokens
from hmt.memory import Bitmap


class _SharedPages(PageAllocator):
    """Pages with owners, of which those that only a tree of prefixes owns count as free."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        # With one level the book gives pages the numbers of their places.
        self.page_table = PageTable([Bitmap(count)])
        self.tree: PrefixTree | None = None

    @property
    @override
    def free_pages(self) -> int:
        return self.page_table.free + len(self.idle())

    def idle(self) -> Ints:
        """Pages that only the tree owns."""
        return np.zeros(0, dtype=np.int64) if self.tree is None else self.tree.alone()

    def take(self, pages: int) -> list[int]:
        """See PageAllocator; prefixes go where there would be too few without."""
        if pages > self.free_pages:
            raise self.too_few(pages)
        if self.tree is not None and pages > self.page_table.free:
            self.tree.evict(pages - self.page_table.free)
        ids = self.page_table.new(pages)
        assert np.array_equal(self.page_table.slots_of(ids), ids)
        return ids.tolist()

    @override
    def share(self, pages: Sequence[int]) -> None:
        self.page_table.share(np.array(pages, dtype=np.int64))

    @override
    def give_back(self, pages: Sequence[int]) -> None:
        self.page_table.drop(np.array(pages, dtype=np.int64))


class SharingPagedKV(PagedKV):
    """PagedKV with a tree of prefixes over its pages; see SharingKV, whose methods these are.

    Layers with a sliding window take part: here they keep all positions.
    """

    def __init__(
        self,
        layers: Sequence[KVLayer] | Mapping[int, KVLayer],
        tokens: int,
        dtype: torch.dtype,
        pool: Pool[Any],
        encoding: ops.PageEncoding | None = None,
    ) -> None:
        super().__init__(layers, tokens, dtype, pool, encoding)
        self._allocator: _SharedPages = _SharedPages(self._allocator.count)

    def keep_prefixes(
        self, pages: int | None = None, *, order: str = "lru", max_age_s: float | None = None
    ) -> PrefixTree:
        """Begin to keep prefixes: at most `pages`, or as many as there is room for."""
        allocator = self._allocator
        most = allocator.count if pages is None else pages
        allocator.tree = PrefixTree(allocator.page_table, most, order=order, max_age_s=max_age_s)
        return allocator.tree

    def can_open_with(self, tokens: int, ids: Ints) -> bool:
        """See SharingKV."""
        taken = int(np.isin(self._allocator.idle(), ids).sum())
        return -(-tokens // PAGE_TOKENS) - len(ids) <= self._allocator.free_pages - taken

    def open_with(self, tokens: int, ids: Ints) -> int:
        """See SharingKV."""
        book = self._allocator.page_table
        book.share(ids)
        try:
            sequence = self.open(tokens - PAGE_TOKENS * len(ids))
        except BaseException:
            book.drop(ids)
            raise
        held = self._sequences[sequence]
        self._set_pages(held, [*ids.tolist(), *held.pages])
        return sequence

    def keep(self, sequence: int, tokens: Tokens, salt: str = "", owner: str = "") -> int:
        """See SharingKV."""
        assert self._allocator.tree is not None
        ids = np.array(self._sequences[sequence].pages, dtype=np.int64)
        return self._allocator.tree.insert(tokens, ids, salt, owner)

    def copy_out(self, ids: Ints, extents: PageExtents, memory: torch.Tensor) -> None:
        """See SharingKV."""
        theirs = torch.from_numpy(np.ascontiguousarray(ids)).to(self._store.device)
        numbers = torch.arange(len(ids))
        kinds = zip(extents.kinds(memory), self._store.kinds, strict=True)
        for (pages, members), (source, _) in kinds:
            for at in range(len(members)):
                recode(pages, at, numbers, source, at, theirs)

    def copy_in(
        self, sequence: int, first: int, extents: PageExtents, memory: torch.Tensor
    ) -> None:
        """See SharingKV."""
        ours = self._sequences[sequence].table[first : first + len(memory)]
        rows = torch.arange(len(memory))
        kinds = zip(self._store.kinds, extents.kinds(memory), strict=True)
        for (pages, members), (source, _) in kinds:
            for at in range(len(members)):
                recode(pages, at, ours, source, at, rows)

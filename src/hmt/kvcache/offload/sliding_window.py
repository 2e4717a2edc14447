"""Sliding windows: each sequence has a ring of pages that holds its window and no more."""

from collections.abc import Mapping
from typing import Any

import torch

from hmt.contracts.kv import ring_pages
from hmt.contracts.model import PAGE_TOKENS, KVLayer
from hmt.contracts.step import Step
from hmt.kernels import ops
from hmt.kvcache.page_store import KeptLayer, PageStore, Pool
from hmt.memory import Bitmap


class SlidingWindowPages:
    """Pages of layers that see the last `window` positions: page i of a sequence is i modulo n."""

    def __init__(
        self,
        layers: Mapping[int, KVLayer],
        window: int,
        chunk: int,
        pages: int,
        encoding: ops.PageEncoding,
        pool: Pool[Any],
    ) -> None:
        """Room for `pages` over all sequences.  BudgetError if it is not there."""
        self.store = PageStore(layers, pages, encoding, pool)
        self._longest = ring_pages(window, chunk)
        self._free = Bitmap(pages)
        self._pages_of: dict[int, torch.Tensor] = {}
        self._step: Step | None = None
        self._runs = ops.AttentionMetadata(())

    @property
    def layers(self) -> Mapping[int, KeptLayer]:
        """Where each layer's pages are."""
        return self.store.layers

    def can_open(self, pages: int) -> bool:
        """Whether there is room for a sequence of so many pages."""
        return min(pages, self._longest) <= self._free.free

    def open(self, sequence: int, pages: int) -> None:
        """A ring for a sequence that may have so many pages; there must be room."""
        taken = self._free.take(min(pages, self._longest))
        self._pages_of[sequence] = torch.tensor(taken, device=self.store.device)

    def can_grow(self, sequence: int, pages: int) -> bool:
        """Whether there is room for a sequence to become so many pages."""
        return min(pages, self._longest) - len(self._pages_of[sequence]) <= self._free.free

    def grow(self, sequence: int, pages: int) -> None:
        """Let the ring of a sequence be that of so many pages; there must be room.

        One that is shorter than the longest has never come round: its pages keep their places.
        """
        ring = self._pages_of[sequence]
        if (more := min(pages, self._longest) - len(ring)) > 0:
            taken = torch.tensor(self._free.take(more), device=self.store.device)
            self._pages_of[sequence] = torch.cat((ring, taken))

    def copy(self, sequence: int, other: int) -> None:
        """Let the ring of `other` hold what that of `sequence` holds.

        A ring that is shorter than the longest has never come round, so page i of both is the ith.
        """
        theirs, ours = self._pages_of[sequence], self._pages_of[other]
        count = min(len(theirs), len(ours))
        self.store.take(ours[:count], self.store, theirs[:count])

    def close(self, sequence: int) -> None:
        """Give a ring back."""
        self._free.give(self._pages_of.pop(sequence).tolist())

    def runs_of(self, step: Step) -> ops.AttentionMetadata:
        """The step's runs, the same for all layers."""
        if self._step is not step:
            self._step = step
            self._runs = ops.AttentionMetadata(
                [
                    ops.PagedSegment(
                        run.offset, run.length, run.start, self.table(run.sequence, run.context)
                    )
                    for run in step.segments
                ]
            )
        return self._runs

    def table(self, sequence: int, context: int) -> torch.Tensor:
        """Where the pages of `context` positions lie; only those of the window hold theirs."""
        ring, count = self._pages_of[sequence], -(-context // PAGE_TOKENS)
        return ring.repeat(-(-count // len(ring)))[:count].contiguous()

    def release(self) -> None:
        """Give the memory back."""
        self.store.release()

"""Sliding windows: each sequence has a ring of pages that holds its window and no more."""

from collections.abc import Mapping
from typing import Any

import torch

from hmt.contracts.kv import ring_pages
from hmt.contracts.model import PAGE_TOKENS, KVLayer
from hmt.contracts.step import Segment, Step
from hmt.kernels import ops
from hmt.kvcache.block_tables import BlockTables
from hmt.kvcache.page_store import KeptLayer, PageStore, Pool
from hmt.kvcache.sequence_slots import SequenceSlots


class SlidingWindowPages:
    """Pages of layers that see the last `window` positions: page i of a sequence is i modulo n.

    slots   which of them each sequence has
    """

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
        self.slots = SequenceSlots(pages, ring_pages(window, chunk))
        self._tables = BlockTables(self.store.device)
        self._step: Step | None = None
        self._runs = ops.AttentionMetadata(())

    @property
    def layers(self) -> Mapping[int, KeptLayer]:
        """Where each layer's pages are."""
        return self.store.layers

    def copy(self, sequence: int, other: int) -> None:
        """Let the ring of `other` hold what that of `sequence` holds.

        A ring that is shorter than the longest has never come round, so page i of both is the ith.
        """
        theirs, ours = self._ring(sequence), self._ring(other)
        count = min(len(theirs), len(ours))
        self.store.take(ours[:count], self.store, theirs[:count])

    def runs_of(self, step: Step) -> ops.AttentionMetadata:
        """The step's runs, the same for all layers."""
        if self._step is not step:
            self._step = step
            self._tables.keep({run.sequence for run in step.segments})
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
        ring, count = self._ring(sequence), -(-context // PAGE_TOKENS)
        return ring.repeat(-(-count // len(ring)))[:count].contiguous()

    def gather(
        self, layer: int, run: Segment, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache.gather; positions of the window, of this run's tokens."""
        kept, ring = self.layers[layer], self._ring(run.sequence)
        numbers = ring[positions // PAGE_TOKENS % len(ring)]
        rows = kept.pages, kept.slot, numbers, positions % PAGE_TOKENS
        key = ops.read_rows(*rows)
        if kept.pages.layout.latent:
            return key, key[..., : kept.pages.layout.value_dim]
        return key, ops.read_value_rows(*rows)

    def _ring(self, sequence: int) -> torch.Tensor:
        return self._tables.table(sequence, self.slots.of(sequence))

    def release(self) -> None:
        """Give the memory back."""
        self.store.release()

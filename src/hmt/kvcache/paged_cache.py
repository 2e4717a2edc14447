"""The paged KV cache of one memory: block tables, and attention over pages."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS, KVLayer
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import RecurrentState
from hmt.kernels import ops
from hmt.kvcache.allocator import KVAllocator
from hmt.kvcache.block_tables import BlockTables
from hmt.kvcache.page_pool import PagePool
from hmt.kvcache.page_store import PagesByKind, PageStore, Pool, recode
from hmt.kvcache.page_table import Ints
from hmt.kvcache.recurrent_state import StateStore


class PagedKV:
    """KVCache and KVStorage over pages in one memory, of the host or of a device.

    A page's id is its place in the store of every kind, so one block table serves all layers.

    allocator   of the sequences
    """

    def __init__(
        self,
        layers: Sequence[KVLayer] | Mapping[int, KVLayer],
        tokens: int,
        dtype: torch.dtype,
        pool: Pool[Any],
        encoding: ops.PageEncoding | None = None,
        allocator: KVAllocator | None = None,
        state: StateStore | None = None,
    ) -> None:
        """Room for `tokens` positions over all sequences.  BudgetError if they do not fit.

        layers     all of a model's, or some by index
        encoding   None: numbers are kept in `dtype`
        allocator  of other layers' pages, of as many positions; None: a new one
        state      of layers of the same place, whose slots `allocator` has; this cache releases it
        """
        layers = layers if isinstance(layers, Mapping) else dict(enumerate(layers))
        pages = round_up(tokens, PAGE_TOKENS) // PAGE_TOKENS
        slots = () if state is None else (state.slots,)
        self.allocator = allocator or KVAllocator(PagePool(pages), slots)
        assert self.allocator.capacity_tokens == pages * PAGE_TOKENS
        self.allocator.attach(self)
        self._store = PageStore(layers, pages, encoding or ops.PageEncoding.of(dtype), pool)
        self._layers = self._store.layers
        self._state = state
        self._tables = BlockTables(self._store.device)
        self._step: Step | None = None  # of the last call
        self._runs = ops.AttentionMetadata(())  # its runs, the same for every layer

    def copy_page(self, page: Ints, to: Ints) -> None:
        """Implements KVStorage."""
        self._store.copy(int(page[0]), int(to[0]))

    def copy_slots(self, sequence: int, to: int) -> None:
        """Implements KVStorage: recurrent state."""
        if self._state is not None:
            self._state.copy(sequence, to)

    def rollback(self, sequence: int, tokens: int) -> None:
        """Implements KVStorage: pages are written again."""
        if self._state is not None:
            self._state.rollback(sequence, tokens)

    def pages_made(self, ids: Ints) -> None:
        """Implements KVStorage: nothing is known of pages."""

    def copy_out(self, ids: Ints, kinds: PagesByKind) -> None:
        """Fill pages 0 and on of `kinds`, in host memory, with pages `ids` (int64).

        Of its own layers; `kinds` may have others besides.
        """
        theirs = torch.from_numpy(np.ascontiguousarray(ids)).to(self._store.device)
        numbers, places = torch.arange(len(ids)), _by_layer(kinds)
        for source, members in self._store.kinds:
            for at, layer in enumerate(members):
                pages, there = places[layer]
                recode(pages, there, numbers, source, at, theirs)

    def copy_in(self, ids: Ints, kinds: PagesByKind) -> None:
        """Let pages `ids` (int64) hold pages 0 and on of `kinds`, which are in host memory.

        Of its own layers; `kinds` may have others besides.
        """
        ours = torch.from_numpy(np.ascontiguousarray(ids)).to(self._store.device)
        rows, places = torch.arange(len(ids)), _by_layer(kinds)
        for pages, members in self._store.kinds:
            for at, layer in enumerate(members):
                source, there = places[layer]
                recode(pages, at, ours, source, there, rows)

    def release(self) -> None:
        """Give the memory back to the pool.  The cache cannot be used afterwards."""
        self._store.release()
        if self._state is not None:
            self._state.release()

    @property
    def where(self) -> torch.device:
        """Of the pages."""
        return self._store.device

    @property
    def states(self) -> StateStore | None:
        """Recurrent state of its layers; None where they have none."""
        return self._state

    def state(self, layer: int, step: Step) -> RecurrentState:
        """See KVCache."""
        assert self._state is not None
        return self._state.of(layer, step)

    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """See KVCache."""
        kept = self._layers[layer]
        runs = kept.appended(self._runs_of(step))
        ops.append_pages(kept.pages, kept.slot, runs, key, value)

    def attend(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See KVCache."""
        kept = self._layers[layer]
        return ops.paged_attention_output(
            kept.pages,
            kept.slot,
            self._runs_of(step),
            query,
            scale=scale,
            window=kept.window,
            softcap=softcap,
            sinks=sinks,
        )

    def append_attend(
        self,
        layer: int,
        step: Step,
        heads: torch.Tensor,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See KVCache."""
        kept = self._layers[layer]
        return ops.append_attend_pages(
            kept.pages,
            kept.slot,
            self._runs_of(step),
            heads,
            scale=scale,
            window=kept.window,
            softcap=softcap,
            sinks=sinks,
        )

    def kernel_pages(self, layer: int) -> tuple[ops.Pages, int, int]:
        """See KVCache."""
        kept = self._layers[layer]
        return kept.pages, kept.slot, kept.window

    def kernel_state(self, layer: int) -> Mapping[str, torch.Tensor]:
        """See KVCache."""
        assert self._state is not None
        return self._state.tensors(layer)

    def kernel_metadata(self, step: Step) -> ops.AttentionMetadata:
        """See KVCache."""
        return self._runs_of(step)

    def kernel_place(self, layer: int, step: Step) -> tuple[ops.Pages, int, ops.AttentionMetadata]:
        """See KVCache."""
        kept = self._layers[layer]
        return kept.pages, kept.slot, self._runs_of(step)

    def attention_metadata(self, step: Step) -> list[ops.PagedSegment]:
        """Where the step's tokens lie, in tables of all pages that have a place."""
        self.allocator.begin_step(step.segments)
        self._tables.keep({run.sequence for run in step.segments})
        return [
            ops.PagedSegment(run.offset, run.length, run.start, self._table(run.sequence))
            for run in step.segments
        ]

    def hold(self, step: Step, runs: ops.AttentionMetadata) -> None:
        """Use `runs` for `step`, until another step comes."""
        self._step, self._runs = step, runs

    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache."""
        kept = self._layers[layer]
        pages = round_up(run.context, PAGE_TOKENS) // PAGE_TOKENS
        table = self._table(run.sequence)[:pages]
        return ops.read_pages(kept.pages, kept.slot, table, run.context)

    def gather(
        self, layer: int, run: Segment, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache."""
        kept = self._layers[layer]
        numbers = self._table(run.sequence)[positions // PAGE_TOKENS]
        rows = kept.pages, kept.slot, numbers, positions % PAGE_TOKENS
        key = ops.read_rows(*rows)
        if kept.pages.layout.latent:
            return key, key[..., : kept.pages.layout.value_dim]
        return key, ops.read_value_rows(*rows)

    def _table(self, sequence: int) -> torch.Tensor:
        return self._tables.table(sequence, self.allocator.pages(sequence))

    def _runs_of(self, step: Step) -> ops.AttentionMetadata:
        if self._step is not step:
            self._step = step
            self._runs = ops.AttentionMetadata(self.attention_metadata(step))
        return self._runs


def _by_layer(kinds: PagesByKind) -> dict[int, tuple[ops.Pages, int]]:
    """Where each layer's pages are: in which pages, and which layer of theirs."""
    return {layer: (pages, at) for pages, members in kinds for at, layer in enumerate(members)}

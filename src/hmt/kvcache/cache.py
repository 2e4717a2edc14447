"""The paged KV cache of one tier: sequences, their block tables, and attention over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS, KVLayer
from hmt.contracts.step import Run, Step
from hmt.kernels import ops
from hmt.kvcache.pages import PageAllocator, PageStore, kinds_of, page_bytes
from hmt.memory import HostPool


@dataclass(slots=True)
class _Sequence:
    pages: list[int]
    table: torch.Tensor  # the same page numbers, int64


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each token of a step goes; the same for every layer."""

    step: Step
    pages: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]


class PagedKV:
    """KVCache over pages in host memory.

    A page number means the same place in the store of every kind, so one block table serves all
    layers.  Pages are reserved when a sequence is opened: a request that was admitted can always
    finish.
    """

    def __init__(
        self, layers: Sequence[KVLayer], tokens: int, dtype: torch.dtype, pool: HostPool
    ) -> None:
        """Room for `tokens` positions over all sequences.  BudgetError if they do not fit."""
        pages = round_up(tokens, PAGE_TOKENS) // PAGE_TOKENS
        self._allocator = PageAllocator(pages)
        self._pool = pool
        self._buffer = pool.allocate(pages * page_bytes(layers, dtype))
        memory = self._buffer.tensor[: pages * page_bytes(layers, dtype)].view(dtype)
        self._stores: dict[int, tuple[PageStore, int]] = {}  # layer -> its store, its slot there
        start = 0
        for layer, members in kinds_of(layers):
            numbers = pages * len(members) * PAGE_TOKENS * layer.row_width
            store = PageStore(layer, len(members), memory[start : start + numbers])
            start += numbers
            self._stores |= {index: (store, slot) for slot, index in enumerate(members)}
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._places: _Places | None = None

    @property
    def free_tokens(self) -> int:
        """Positions that no sequence has reserved."""
        return self._allocator.free_pages * PAGE_TOKENS

    @property
    def capacity_tokens(self) -> int:
        """Positions in all."""
        return self._allocator.count * PAGE_TOKENS

    def open(self, tokens: int) -> int:
        """Reserve `tokens` positions for a new sequence; its handle.  Raises BudgetError."""
        pages = self._allocator.take(round_up(tokens, PAGE_TOKENS) // PAGE_TOKENS)
        self._next += 1
        self._sequences[self._next] = _Sequence(pages, torch.tensor(pages, dtype=torch.int64))
        return self._next

    def close(self, sequence: int) -> None:
        """Free a sequence's pages."""
        self._allocator.give_back(self._sequences.pop(sequence).pages)

    def release(self) -> None:
        """Give the memory back to the pool.  The cache cannot be used afterwards."""
        self._stores.clear()
        self._pool.free(self._buffer)

    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """See KVCache."""
        places = self._places_of(step)
        store, slot = self._stores[layer]
        store.write(slot, places.pages, places.slots, key, value)

    def attend(
        self, layer: int, step: Step, query: torch.Tensor, *, scale: float, softcap: float = 0.0
    ) -> torch.Tensor:
        """See KVCache."""
        kept = self._stores[layer][0].layer
        outputs = []
        for run in step.runs:
            # Below the window there is nothing to read; start at the page that holds its first row.
            first = max(0, run.start - kept.window + 1) if kept.window else 0
            first_page = first // PAGE_TOKENS
            key, value = self._gather(layer, run, first_page)
            outputs.append(
                ops.attention_output(
                    query[run.tokens],
                    key,
                    value,
                    start=run.start - first_page * PAGE_TOKENS,
                    scale=scale,
                    window=kept.window,
                    softcap=softcap,
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def read(self, layer: int, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache."""
        return self._gather(layer, run, 0)

    def _gather(self, layer: int, run: Run, first_page: int) -> tuple[torch.Tensor, torch.Tensor]:
        store, slot = self._stores[layer]
        pages = round_up(run.context, PAGE_TOKENS) // PAGE_TOKENS
        table = self._sequences[run.sequence].table[first_page:pages]
        return store.gather(slot, table, run.context - first_page * PAGE_TOKENS)

    def _places_of(self, step: Step) -> _Places:
        if self._places is None or self._places.step is not step:
            pages = [
                self._sequences[run.sequence].table[step.positions[run.tokens] // PAGE_TOKENS]
                for run in step.runs
            ]
            self._places = _Places(step, torch.cat(pages), step.positions % PAGE_TOKENS)
        return self._places

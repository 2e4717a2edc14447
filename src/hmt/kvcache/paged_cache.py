"""The paged KV cache of one tier: sequences, their block tables, and attention over them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from hmt.base.units import round_up
from hmt.contracts.model import PAGE_TOKENS, KVLayer
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.kvcache.page_allocator import PageAllocator
from hmt.kvcache.page_store import PageStore, Pool


@dataclass(slots=True)
class _Sequence:
    pages: list[int]
    table: torch.Tensor  # the same page numbers, int64


class PagedKV(KVCache):
    """KVCache over pages in one memory, of the host or of a device.

    A page number means the same place in the store of every kind, so one block table serves all
    layers.  Pages are reserved when a sequence is opened, and more of them when it grows: what was
    reserved can always be used.
    """

    def __init__(
        self,
        layers: Sequence[KVLayer] | Mapping[int, KVLayer],
        tokens: int,
        dtype: torch.dtype,
        pool: Pool[Any],
        encoding: ops.PageEncoding | None = None,
    ) -> None:
        """Room for `tokens` positions over all sequences.  BudgetError if they do not fit.

        `layers` are all of a model's, or some by index.  Without an `encoding` numbers are kept in
        `dtype`.
        """
        layers = layers if isinstance(layers, Mapping) else dict(enumerate(layers))
        pages = round_up(tokens, PAGE_TOKENS) // PAGE_TOKENS
        self._allocator = PageAllocator(pages)
        self._store = PageStore(layers, pages, encoding or ops.PageEncoding.of(dtype), pool)
        self._layers = self._store.layers
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._step: Step | None = None  # of the last call
        self._runs = ops.AttentionMetadata(())  # its runs, the same for every layer

    @property
    def free_tokens(self) -> int:
        """Positions that no sequence has reserved."""
        return self._allocator.free_pages * PAGE_TOKENS

    @property
    def capacity_tokens(self) -> int:
        """Positions in all."""
        return self._allocator.count * PAGE_TOKENS

    def can_open(self, tokens: int) -> bool:
        """Whether `open` would succeed now."""
        return round_up(tokens, PAGE_TOKENS) <= self.free_tokens

    def open(self, tokens: int) -> int:
        """Reserve `tokens` positions for a new sequence; its handle.  Raises BudgetError."""
        return self._begin(self._allocator.take(_pages(tokens)))

    def can_fork(self, sequence: int, held: int, tokens: int) -> bool:
        """Whether `fork` would succeed now."""
        return (_pages(tokens) - held // PAGE_TOKENS) * PAGE_TOKENS <= self.free_tokens

    def fork(self, sequence: int, held: int, tokens: int) -> int:
        """A new sequence with the first `held` positions of another, and room for `tokens` in all.

        Whole pages are shared.  The last one, if it is not full, is copied at once: each of the two
        writes to it next.  Raises BudgetError.
        """
        whole = held // PAGE_TOKENS
        theirs = self._sequences[sequence].pages
        own = self._allocator.take(_pages(tokens) - whole)
        self._allocator.share(theirs[:whole])
        if held % PAGE_TOKENS:
            self._store.copy(theirs[whole], own[0])
        return self._begin([*theirs[:whole], *own])

    def can_grow(self, sequence: int, tokens: int) -> bool:
        """Whether `grow` would succeed now."""
        more = _pages(tokens) - len(self._sequences[sequence].pages)
        return more <= 0 or more <= self._allocator.free_pages

    def grow(self, sequence: int, tokens: int) -> None:
        """Reserve `tokens` positions in all for a sequence, which keeps what it has.

        Its other pages stay where they are.  Raises BudgetError, changing nothing.
        """
        held = self._sequences[sequence]
        more = _pages(tokens) - len(held.pages)
        if more > 0:
            self._set_pages(held, [*held.pages, *self._allocator.take(more)])

    def shrink(self, sequence: int, tokens: int) -> None:
        """Give back what a sequence has reserved beyond its first `tokens` positions."""
        held, kept = self._sequences[sequence], _pages(tokens)
        self._allocator.give_back(held.pages[kept:])
        self._set_pages(held, held.pages[:kept])

    def can_rewind(self) -> bool:
        """Whether `rewind` is possible: whether no layer has forgotten any position."""
        return True

    def rewind(self, sequence: int, tokens: int) -> None:
        """Let a sequence hold no more than its first `tokens` positions, which it has filled.

        Reserves nothing behind them; `grow` does.  No other sequence may use its last page.
        """
        self.shrink(sequence, tokens)

    def can_park(self) -> bool:
        """Whether others can have the place of a sequence that is parked."""
        return True

    def park(self, sequence: int) -> None:
        """A sequence will take no part in steps until `resume`; its pages stay where they are."""

    def can_resume(self, sequence: int, tokens: int) -> bool:
        """Whether `resume` would succeed now."""
        return self.can_grow(sequence, tokens)

    def resume(self, sequence: int, tokens: int) -> None:
        """Let a parked sequence go on, with `tokens` positions in all.  Raises BudgetError."""
        self.grow(sequence, tokens)

    def close(self, sequence: int) -> None:
        """Free a sequence's pages."""
        self._allocator.give_back(self._sequences.pop(sequence).pages)

    def release(self) -> None:
        """Give the memory back to the pool.  The cache cannot be used afterwards."""
        self._store.release()

    @override
    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        kept = self._layers[layer]
        ops.append_pages(kept.pages, kept.slot, self._runs_of(step), key, value)

    @override
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

    @override
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

    @override
    def kernel_pages(self, layer: int) -> tuple[ops.Pages, int, int]:
        kept = self._layers[layer]
        return kept.pages, kept.slot, kept.window

    @override
    def kernel_metadata(self, step: Step) -> ops.AttentionMetadata:
        return self._runs_of(step)

    @override
    def kernel_place(self, layer: int, step: Step) -> tuple[ops.Pages, int, ops.AttentionMetadata]:
        kept = self._layers[layer]
        return kept.pages, kept.slot, self._runs_of(step)

    def attention_metadata(self, step: Step) -> list[ops.PagedSegment]:
        """Where the step's tokens lie."""
        return [
            ops.PagedSegment(run.offset, run.length, run.start, self._sequences[run.sequence].table)
            for run in step.segments
        ]

    def hold(self, step: Step, runs: ops.AttentionMetadata) -> None:
        """Use `runs` for `step`, until another step comes."""
        self._step, self._runs = step, runs

    @override
    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self._layers[layer]
        pages = round_up(run.context, PAGE_TOKENS) // PAGE_TOKENS
        table = self._sequences[run.sequence].table[:pages]
        return ops.read_pages(kept.pages, kept.slot, table, run.context)

    def _begin(self, pages: list[int]) -> int:
        self._next += 1
        self._sequences[self._next] = held = _Sequence([], torch.empty(0))
        self._set_pages(held, pages)
        return self._next

    def _set_pages(self, held: _Sequence, pages: list[int]) -> None:
        """The table is a new tensor: a step on the device's queue may still read the old one."""
        held.pages = pages
        held.table = torch.tensor(pages, dtype=torch.int64, device=self._store.device)

    def _runs_of(self, step: Step) -> ops.AttentionMetadata:
        if self._step is not step:
            self._step = step
            self._runs = ops.AttentionMetadata(self.attention_metadata(step))
        return self._runs


def _pages(tokens: int) -> int:
    return round_up(tokens, PAGE_TOKENS) // PAGE_TOKENS

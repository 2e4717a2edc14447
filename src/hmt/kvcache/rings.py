"""Sliding windows: each sequence has a ring of pages that holds its window and no more."""

from collections.abc import Mapping
from typing import Any

import torch

from hmt.contracts.model import PAGE_TOKENS, KVLayer
from hmt.contracts.step import Step
from hmt.kernels import ops
from hmt.kvcache.store import Kept, PageStore, Pool
from hmt.memory import Bitmap


def ring_pages(window: int, chunk: int) -> int:
    """Pages that a window takes, when up to `chunk` tokens are appended before they are read."""
    return -(-(window - 1 + chunk) // PAGE_TOKENS) + 1


class Rings:
    """Pages of layers that see the last `window` positions: page i of a sequence is i modulo n."""

    def __init__(
        self,
        layers: Mapping[int, KVLayer],
        window: int,
        chunk: int,
        sequences: int,
        encoding: ops.PageEncoding,
        pool: Pool[Any],
    ) -> None:
        """Room for so many `sequences` at once.  BudgetError if it is not there."""
        self.pages = ring_pages(window, chunk)
        self.store = PageStore(layers, self.pages * sequences, encoding, pool)
        self._free = Bitmap(sequences)
        self._rings: dict[int, int] = {}
        self._step: Step | None = None
        self._runs = ops.PagedRuns(())

    @property
    def free(self) -> int:
        """Sequences that can still be opened."""
        return self._free.free

    @property
    def layers(self) -> Mapping[int, Kept]:
        """Where each layer's pages are."""
        return self.store.layers

    def open(self, sequence: int) -> None:
        """A ring for `sequence`."""
        self._rings[sequence] = self._free.take(1)[0]

    def copy(self, sequence: int, other: int) -> None:
        """Let the ring of `other` hold what that of `sequence` holds."""
        self.store.take(self._pages_of(other), self.store, self._pages_of(sequence))

    def close(self, sequence: int) -> None:
        """Give a ring back."""
        self._free.give([self._rings.pop(sequence)])

    def runs_of(self, step: Step) -> ops.PagedRuns:
        """The step's runs, the same for all layers."""
        if self._step is not step:
            self._step = step
            self._runs = ops.PagedRuns(
                [
                    ops.PagedRun(
                        run.offset, run.length, run.start, self.table(run.sequence, run.context)
                    )
                    for run in step.runs
                ]
            )
        return self._runs

    def table(self, sequence: int, context: int) -> torch.Tensor:
        """Where the pages of `context` positions lie; only those of the window hold theirs."""
        count = -(-context // PAGE_TOKENS)
        turns = -(-count // self.pages)
        return self._pages_of(sequence).repeat(turns)[:count].contiguous()

    def _pages_of(self, sequence: int) -> torch.Tensor:
        first = self._rings[sequence] * self.pages
        return torch.arange(first, first + self.pages, device=self.store.device)

    def release(self) -> None:
        """Give the memory back."""
        self.store.release()

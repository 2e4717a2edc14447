"""What a step computes of prompts that is looked at once and not kept: logits, hidden states."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from hmt.contracts.model import Model
from hmt.contracts.step import Step
from hmt.contracts.store import Weights


class PromptOutputSource(Protocol):
    """Who looks at a step's rows.  Tensors are valid during the call; it must not raise.

    layers   behind so many layers, ascending, the hidden states of pooled rows are shown instead of
             those behind the final norm; (): these
    """

    layers: tuple[int, ...] = ()

    def logits(self, first: int, logits: torch.Tensor) -> None:
        """Of the scored rows from the one numbered `first` on: f32 [some, vocab]."""
        ...

    def hidden(self, first: int, hidden: torch.Tensor) -> None:
        """Of the pooled rows, behind the final norm: f32 [some, hidden_size]."""
        ...

    def layer_hidden(self, layer: int, hidden: torch.Tensor) -> None:
        """Of all pooled rows, behind the first `layer` layers: [pooled, hidden_size]."""
        raise AssertionError("hidden states of layers were not asked for")


class HiddenObserver(Protocol):
    """Who looks at hidden states of all steps."""

    def see(self, step: Step, hidden: torch.Tensor, *, stays: bool = True) -> None:
        """Those behind the last layer: [tokens, ...]; it must not raise.

        Without `stays` they are valid during the call only.

        The tensors of `step` are in host memory.
        """
        ...


class PromptOutputSink:
    """Shows rows that nobody keeps, as many at a time as there is room for."""

    def __init__(self, model: Model, weights: Weights, rows: int) -> None:
        self._model = model
        self._weights = weights
        self._rows = rows

    def show(self, step: Step, hidden: torch.Tensor, viewer: PromptOutputSource) -> None:
        """What the step has to show, from `hidden` [tokens, hidden_size]."""
        for first, rows in self._pieces(step.scored_rows, hidden):
            viewer.logits(first, self._model.head(rows, self._weights).cpu())
        if viewer.layers:
            return
        for first, rows in self._pieces(step.pooled_rows, hidden):
            viewer.hidden(first, self._model.normed(rows, self._weights).cpu())

    def show_layer(
        self, step: Step, layer: int, hidden: torch.Tensor, viewer: PromptOutputSource
    ) -> None:
        """The pooled rows of `hidden` [tokens, hidden_size], behind `layer` layers."""
        viewer.layer_hidden(layer, hidden[step.pooled_rows.to(hidden.device)].cpu())

    def _pieces(
        self, wanted: torch.Tensor, hidden: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        wanted = wanted.to(hidden.device)
        for first in range(0, len(wanted), self._rows):
            yield first, hidden[wanted[first : first + self._rows]]


@dataclass(slots=True)
class EmbeddingPool:
    """The hidden states of one prompt, as they become its embedding.

    The mean of those that the scheduler asked for, then of length 1: as sentence-transformers pool
    them.
    """

    seen: int = 0
    total: torch.Tensor | None = None

    def add(self, position: int, hidden: torch.Tensor) -> None:
        """That of the token at `position`, f32 [hidden_size]; one that came before is left out."""
        if position >= self.seen:
            self.total = hidden.double() if self.total is None else self.total + hidden
            self.seen = position + 1

    def embedding(self) -> torch.Tensor:
        """F32 [hidden_size], of length 1."""
        assert self.total is not None
        return torch.nn.functional.normalize(self.total, dim=0).float()

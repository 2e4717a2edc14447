"""What one of several processes, a rank, computes of a model, and how it meets the others.

Ranks are stages of a pipeline, each of which has some of the layers; or divide each layer of a
stage, and add up what its parts make; or both.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


class Collective(Protocol):
    """Meets the other ranks.  Each rank calls the same methods in the same order.

    announce   of the first rank: lets the others begin the step behind the one that they compute,
               whose tokens it then has to `share`; None: they cannot
    """

    announce: Callable[[], None] | None

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks give, [tokens, ...] of one dtype: the same bits on each rank.

        They do not depend on how many tokens there are.  Waits for all ranks of this stage, and on
        a GPU lets its queue wait.  May overwrite `partial`.  Raises RankError.
        """
        ...

    def share(self, tensor: torch.Tensor) -> None:
        """Make `tensor` what the first rank of the stage has.  Waits for all as `add` does."""
        ...

    def rehearsal(self) -> AbstractContextManager[None]:
        """In the body no other rank is met: `add` gives back what it is given."""
        ...

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Let `stage` receive a tensor in host memory, which must not change any more.

        Waits where that stage has not received those before the last ones.  Raises RankError.
        """
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> torch.Tensor:
        """The next tensor that `stage` sends, in host memory.  Waits for it.  Raises RankError."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers [first, end) of `of`."""

    first: int
    end: int
    of: int

    @property
    def count(self) -> int:
        """How many these are."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's layers, and its part of each; None of what every rank has whole.

    rank, ranks   its number, from 0, and how many there are; those of a stage follow one another
    layers        consecutive ones: a stage of a pipeline
    stage, stages   its number, from 0, and how many there are
    heads         query heads, and `kv_heads` the KV heads that these attend with
    width         rows of gate and up, and columns of down, of a dense network
    experts       routed experts
    collective    of these ranks
    """

    rank: int
    ranks: int
    collective: Collective
    heads: Span | None = None
    kv_heads: Span | None = None
    width: Span | None = None
    experts: Span | None = None
    layers: Span | None = None
    stage: int = 0
    stages: int = 1

    @property
    def has_head(self) -> bool:
        """Whether it computes logits: the first rank does."""
        return self.rank == 0

    @property
    def has_embedding(self) -> bool:
        """Whether it looks up tokens: ranks of the first stage do."""
        return self.stage == 0

    @property
    def has_sums(self) -> bool:
        """Whether its layers wait for other ranks'."""
        return not (self.heads is self.width is self.experts is None)

    def has_layer(self, index: int) -> bool:
        """Whether it computes this layer."""
        return self.layers is None or self.layers.first <= index < self.layers.end

"""What one of several processes, a rank, computes of a model, and how it meets the others.

Every rank has all layers, and of each layer a part.  What parts make is added up over the ranks.
"""

from collections.abc import Callable
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

        They do not depend on how many tokens there are.  Waits for all ranks, and on a GPU lets its
        queue wait.  May overwrite `partial`.  Raises RankError.
        """
        ...

    def share(self, tensor: torch.Tensor) -> None:
        """Make `tensor` what the first rank's is.  Waits for all ranks as `add` does."""
        ...

    def rehearsal(self) -> AbstractContextManager[None]:
        """In the body no other rank is met: `add` gives back what it is given."""
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
    """A rank's part of each layer; None of what every rank has whole.

    rank, ranks   its number, from 0, and how many there are
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

    @property
    def has_head(self) -> bool:
        """Whether it computes logits: the first rank does."""
        return self.rank == 0

"""What a proposer gives: tokens that may come next, and how likely each of them is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence, in order.

    classes   of each token, what its acceptance is counted under: tokens of one class are accepted
              about equally often, given that those before them were
    """

    tokens: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()

    def first(self, count: int) -> "Draft":
        """The first `count` of them."""
        return Draft(self.tokens[:count], self.classes[:count])


class Proposer(Protocol):
    """Guesses how sequences go on.  For the engine's thread."""

    def propose(self, number: int, scope: str, tokens: Sequence[int], most: int) -> Draft:
        """At most `most` tokens that may follow `tokens`, which only grow from call to call.

        number   of the request
        scope    requests of other scopes must learn nothing of its tokens
        """
        ...

    def ended(self, number: int) -> None:
        """The request has ended; not every one was asked about."""
        ...

"""What a proposer gives: tokens that may come next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Worth(Protocol):
    """Which draft tokens of a sequence are worth verifying, asked for one after the other."""

    def __call__(self, name: str) -> bool:
        """Whether a token of this class, behind those that were asked about, is worth it."""
        ...

    def may_be(self, name: str) -> bool:
        """The same, where the token is not known yet: nothing is counted."""
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence, in order.

    classes        of each token, what its acceptance is counted under: tokens of one class are
                   accepted about equally often, given that those before them were
    alternatives   that may follow where the first token is wrong, the likeliest first; each begins
                   with another token.  The first tokens' classes count only then.
    """

    tokens: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    alternatives: "tuple[Draft, ...]" = ()

    def begin(self, count: int) -> "Draft":
        """Its first tokens, without alternatives."""
        return Draft(self.tokens[:count], self.classes[:count])


class Proposer(Protocol):
    """Drafts how sequences go on.  For the engine's thread.

    needs_hidden   whether `observe` wants the hidden states of all tokens
    layers         as many layers come before these, which are joined; (): those behind the final
                   norm
    is_slow        whether drafting takes time, also where nothing is worth verifying then
    """

    needs_hidden: bool
    layers: tuple[int, ...] = ()
    is_slow: bool

    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        """At most `most` tokens that may follow `tokens`, which only grow from call to call.

        number   of the request
        scope    requests of other scopes must learn nothing of its tokens
        worth    is asked about each token in turn; the first that is not worth it ends the draft.
                 Not about alternatives, which are chosen among later.

        Raises HMTError where that failed; so may `observe`.
        """
        ...

    def observe(self, number: int, tokens: Sequence[int], start: int, hidden: torch.Tensor) -> None:
        """A request's tokens from `start` on were computed and stay.

        hidden   f32 [tokens, hidden_size] of these, behind the final norm; or of several `layers`
        tokens   all of the request
        """
        ...

    def ended(self, number: int) -> None:
        """The request has ended; not every one was asked about."""
        ...

"""Proposers that ask a small model: another checkpoint, or multi-token prediction layers.

A model's draft tokens are counted by how likely it calls them, which is what the gate chooses their
number by.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import exp
from typing import Final, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import HMTError
from hmt.engine.loading.prepared import DraftInputs
from hmt.engine.speculation.draft import Draft, Proposer, Worth
from hmt.engine.speculation.draft_model import DraftModel, Prediction

MOST_PENDING: Final = 64  # hidden states that wait for a step of several
_BORDERS: Final = (0.3, 0.5, 0.7, 0.85, 0.95)  # of likelihood, between classes


class DraftModelProposer(Proposer):
    """Asks a smaller model with the same tokens what comes next, greedily."""

    needs_hidden = False
    is_slow = True

    def __init__(self, model: DraftModel, vocab_size: int, *, branches: bool = True) -> None:
        """`vocab_size` of the model that verifies: the other one may have more tokens.

        branches   whether steps may verify alternatives
        """
        self._model, self._vocab_size, self._branches = model, vocab_size, branches
        self._agreed: dict[int, int] = {}  # by request: first tokens that the model surely has

    @override
    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        known = self._model.tokens(number)
        # It has computed the last token's predecessors at most, and draft tokens behind these.
        end = min(len(known), len(tokens) - 1)
        common = min(self._agreed.get(number, 0), end)
        while common < end and known[common] == tokens[common]:
            common += 1
        self._model.keep(number, common)
        found = self._model.feed(number, tokens[common:])
        self._agreed[number] = common if found is None else len(tokens)
        return decoded(
            self._model, number, found, lambda depth: "draft", self._vocab_size, most, worth,
            branches=self._branches,
        )  # fmt: skip

    @override
    def observe(self, number: int, tokens: Sequence[int], start: int, hidden: Tensor) -> None:
        """It looks at tokens alone."""

    @override
    def ended(self, number: int) -> None:
        self._agreed.pop(number, None)
        self._model.close(number)


@dataclass(slots=True)
class PendingStates:
    """Of a request: hidden states that a draft model has not computed with.

    first    position of the token of the first of them
    width    numbers of each
    states   f32 [tokens, width], one after the other
    """

    first: int = 0
    width: int = 0
    states: list[Tensor] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(map(len, self.states))

    @property
    def end(self) -> int:
        """Position behind the last of them."""
        return self.first + self.count

    def add(self, start: int, hidden: Tensor) -> None:
        """Those of tokens from `start` on."""
        if self.end != start:  # what is between was not computed
            self.first, self.states = start, []
        self.width = hidden.shape[1]
        self.states.append(hidden)

    def take(self, most: int | None = None) -> Tensor:
        """The first of them, at most `most`, which wait no longer: [tokens, width]."""
        states = torch.cat(self.states) if self.states else torch.empty(0, self.width)
        taken = states[:most]
        self.first += len(taken)
        self.states = [states[len(taken) :]] if len(taken) < len(states) else []
        return taken


class NextTokenProposer(Proposer):
    """Asks a checkpoint's own multi-token prediction layers, or an EAGLE-3 drafter.

    They compute from a token and hidden states of the one before it, and then from their own hidden
    states (DeepSeek-V3's technical report, section 2.2).  Tokens that the prefix cache had computed
    are unknown to them, which makes draft tokens worse at first and changes no answer.
    """

    needs_hidden = is_slow = True

    def __init__(
        self, model: DraftModel, vocab_size: int, inputs: DraftInputs, *, branches: bool = True
    ) -> None:
        """`vocab_size` of the model that verifies, `inputs` of the one that drafts.

        branches   whether steps may verify alternatives
        """
        self._branches = branches
        self._model, self._vocab_size, self._inputs = model, vocab_size, inputs
        self.layers = inputs.layers
        self._states: dict[int, PendingStates] = {}
        self._fed: dict[int, int] = {}  # pairs that the layers have computed and that stay

    @override
    def observe(self, number: int, tokens: Sequence[int], start: int, hidden: Tensor) -> None:
        states = self._states.setdefault(number, PendingStates())
        states.add(start, hidden)
        if states.count > MOST_PENDING:
            self._feed(number, states, tokens)

    @override
    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        states = self._states.get(number)
        if states is None or states.end != len(tokens) - 1:
            return Draft()
        found = self._feed(number, states, tokens)
        return decoded(
            self._model, number, found, lambda depth: f"{self._inputs.kind} {depth}",
            self._vocab_size, most, worth, self._inputs.tokens,
            branches=self._branches,
        )  # fmt: skip

    @override
    def ended(self, number: int) -> None:
        self._states.pop(number, None)
        self._fed.pop(number, None)
        self._model.close(number)

    def _feed(self, number: int, states: PendingStates, tokens: Sequence[int]) -> Prediction | None:
        """Compute with states whose next token is known; what comes of the last one, if of any."""
        self._model.keep(number, self._fed.get(number, 0))
        first = states.first
        known = states.take(max(0, len(tokens) - 1 - first))
        if not len(known):
            return None
        found = self._model.feed(number, tokens[first + 1 : first + 1 + len(known)], known)
        self._fed[number] = len(self._model.tokens(number))
        return found


class FirstOf(Proposer):
    """What the first of several proposers drafts that drafts anything.

    One that raises HMTError is not asked again; the others are.
    """

    def __init__(self, *proposers: Proposer) -> None:
        self._all = proposers
        self._proposers = list(proposers)  # that have not failed
        self.needs_hidden = any(one.needs_hidden for one in proposers)
        self.is_slow = any(one.is_slow for one in proposers)
        self.layers = next((one.layers for one in proposers if one.needs_hidden), ())

    @override
    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        for one in list(self._proposers):
            with self._without_if_failed(one):
                draft = one.propose(number, scope, tokens, most, worth)
            if draft.tokens:
                return draft
        return Draft()

    @override
    def observe(self, number: int, tokens: Sequence[int], start: int, hidden: Tensor) -> None:
        for one in list(self._proposers):
            if one.needs_hidden:
                with self._without_if_failed(one):
                    one.observe(number, tokens, start, hidden)

    @override
    def ended(self, number: int) -> None:
        for one in self._all:
            one.ended(number)

    @contextmanager
    def _without_if_failed(self, one: Proposer) -> Iterator[None]:
        try:
            yield
        except HMTError:
            self._proposers.remove(one)
            self.needs_hidden = any(other.needs_hidden for other in self._proposers)
            self.is_slow = any(other.is_slow for other in self._proposers)
            raise


class Feeds(Protocol):
    """What computes one draft token after the other."""

    def feed(
        self, number: int, tokens: Sequence[int], inputs: Tensor | None = None
    ) -> Prediction | None:
        """What comes behind `tokens` of a request, and hidden states; see DraftModel."""
        ...


def decoded(
    model: Feeds,
    number: int,
    found: Prediction | None,
    kind_of: Callable[[int], str],
    vocab_size: int,
    most: int,
    worth: Worth,
    tokens_of: Tensor | None = None,
    *,
    branches: bool,
) -> Draft:
    """Greedy tokens from what `feed` found on, with their own hidden states where it gives any.

    kind_of     of a token by its number in the draft; kinds are divided into classes by likelihood
    tokens_of   see DraftInputs.tokens
    branches    whether to look for alternatives
    """
    made = DraftBuilder(vocab_size, worth, tokens_of, branches=branches)
    while found is not None:
        token = made.add(found, kind_of(len(made)))
        # A draft step takes 0.85 ms where one that verifies takes the device 4.4 (8B in bf16 on an
        # H200): none is computed for a token that would not be verified.
        if token is None or len(made) == most or not made.may_go_on(kind_of(len(made))):
            break
        hidden = found.hidden
        found = model.feed(number, [token], hidden[None] if len(hidden) else None)
    return made.draft


class DraftBuilder:
    """Draft tokens of a small model: the likeliest, as long as they are worth verifying."""

    def __init__(
        self, vocab_size: int, worth: Worth, tokens_of: Tensor | None, *, branches: bool
    ) -> None:
        """`vocab_size` of the model that verifies; `tokens_of`: see DraftInputs.tokens.

        branches   whether to look for an alternative to the first token
        """
        self._vocab_size, self._worth, self._tokens_of = vocab_size, worth, tokens_of
        self._branches = branches
        self.draft = Draft()

    def __len__(self) -> int:
        return len(self.draft.tokens)

    def add(self, found: Prediction, kind: str) -> int | None:
        """Let the likeliest token follow, of a class of `kind`; None: it is not worth it."""
        if not found.stats.finite:
            return None
        name = _likeliest(found, kind)
        token = self._of_verifier(found.stats.best)
        if token >= self._vocab_size or not self._worth(name):
            return None
        before = self.draft
        others = before.alternatives
        if not before.tokens and self._branches:
            others = self._second(found.logits, name)
        self.draft = Draft((*before.tokens, token), (*before.classes, name), others)
        return token

    def may_go_on(self, kind: str) -> bool:
        """Whether another token could be worth verifying, if the model were sure of it."""
        return self._worth.may_be(f"{kind} {len(_BORDERS)}")

    def _second(self, logits: Tensor, name: str) -> tuple[Draft, ...]:
        """The second likeliest token, for where the likeliest, of class `name`, is wrong."""
        token = self._of_verifier(int(logits.topk(2).indices[1]))
        return (Draft((token,), (f"{name} second",)),) if token < self._vocab_size else ()

    def _of_verifier(self, token: int) -> int:
        """A token of the draft model by the number that the model that verifies has for it."""
        return token if self._tokens_of is None else int(self._tokens_of[token])


def _likeliest(found: Prediction, kind: str) -> str:
    """The class of the likeliest token as a draft token."""
    share = exp(float(found.logits[found.stats.best]) - found.stats.log_sum_exp)
    return f"{kind} {sum(share >= border for border in _BORDERS)}"

"""Prompt lookup: where a text repeats what was said before, draft that it goes on as that did.

After A. Saxena, "Prompt Lookup Decoding" (2023), with the longest of several earlier places, which
chains of equal hashes give as in LZ77.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import itemgetter
from typing import Final

from torch import Tensor
from typing_extensions import override

from hmt.engine.speculation.draft import Draft, Proposer, Worth

LEAST_MATCH: Final = 3  # tokens that have to be equal; two are equal too often by chance
_LONGEST_MATCH: Final = 32  # tokens that are compared
_PLACES: Final = 8  # earlier places that are compared, the latest first
_MOST_TOKENS: Final = 1 << 16  # of a text that are indexed, at about 100 bytes each
_ALTERNATIVES: Final = 2  # other tokens that followed elsewhere
_MOST_ENDED: Final = 4  # of ended requests, for each scope
_MOST_SCOPES: Final = 16


class TokenIndex:
    """A text's tokens, and where each run of `LEAST_MATCH` of them ends."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # where a run ends that came last
        self._before: list[int] = []  # by position, where the same run ended before; -1: nowhere
        self._seen = 0  # tokens of the text, those that were given up as well

    def extend(self, text: Sequence[int]) -> None:
        """Let it hold `text`, which begins with what it held."""
        if len(self.tokens) + len(text) - self._seen > _MOST_TOKENS:
            self.tokens, self._last, self._before = [], {}, []
            self._seen = max(0, len(text) - _MOST_TOKENS // 2)
        first = max(0, len(self.tokens) - LEAST_MATCH + 1)
        known = len(self.tokens)
        self.tokens += text[self._seen :]
        self._seen = len(text)
        self._before += [-1] * (len(self.tokens) - known)
        for begin in range(first, len(self.tokens) - LEAST_MATCH + 1):
            end = begin + LEAST_MATCH
            run = tuple(self.tokens[begin:end])
            self._before[end - 1] = self._last.get(run, -1)
            self._last[run] = end - 1

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """Where what `text` ends with stands followed by more: (tokens that are equal, position).

        The position is that of the token that follows.  (0, 0): nowhere.
        """
        return max(self.places(text), key=itemgetter(0), default=(0, 0))

    def places(self, text: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The same of each place, the latest first, until one is as long as any can be."""
        place = self._last.get(tuple(text[-LEAST_MATCH:]), -1)
        for _ in range(_PLACES):
            if place == len(self.tokens) - 1:  # the end of the text itself
                place = self._before[place]
            if place < 0:
                break
            length = self._equal(text, place)
            yield length, place + 1
            if length >= _LONGEST_MATCH:
                break
            place = self._before[place]

    def _equal(self, text: Sequence[int], place: int) -> int:
        """How many of the last tokens of `text` are those that end at `place`."""
        most = min(_LONGEST_MATCH, place + 1, len(text))
        length = LEAST_MATCH
        while length < most and text[-1 - length] == self.tokens[place - length]:
            length += 1
        return length


class PromptLookup(Proposer):
    """Looks in the prompt and the answer, and in the last sequences of the same scope."""

    needs_hidden = is_slow = False

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, TokenIndex]] = {}
        self._ended: OrderedDict[str, list[TokenIndex]] = OrderedDict()

    @override
    def propose(
        self, number: int, scope: str, tokens: Sequence[int], most: int, worth: Worth
    ) -> Draft:
        _, index = self._running.setdefault(number, (scope, TokenIndex()))
        index.extend(tokens)
        recent = tokens[-_LONGEST_MATCH:]
        # By the token that follows, the longest of the places where it does.
        found: dict[int, tuple[int, int, TokenIndex]] = {}
        for text in (index, *reversed(self._ended.get(scope, []))):
            for length, position in text.places(recent):
                token = text.tokens[position]
                if token not in found or length > found[token][0]:
                    found[token] = length, position, text
        if not found:
            return Draft()
        # The sort is stable: of equal ones the place that came first, in this text if any.
        first, *others = sorted(found.values(), key=itemgetter(0), reverse=True)
        draft = _draft_at(*first, most)
        chosen = draft.begin(len(tuple(takewhile(worth, draft.classes))))
        alternatives = tuple(_draft_at(*other, most, "other") for other in others[:_ALTERNATIVES])
        return replace(chosen, alternatives=alternatives)

    @override
    def observe(self, number: int, tokens: Sequence[int], start: int, hidden: Tensor) -> None:
        """It looks at tokens alone."""

    @override
    def ended(self, number: int) -> None:
        if number not in self._running:
            return
        scope, index = self._running.pop(number)
        ended = self._ended.setdefault(scope, [])
        ended.append(index)
        del ended[:-_MOST_ENDED]
        self._ended.move_to_end(scope)
        while len(self._ended) > _MOST_SCOPES:
            self._ended.popitem(last=False)


def _draft_at(
    length: int, position: int, text: TokenIndex, most: int, name: str = "lookup"
) -> Draft:
    """What follows at a place, behind so many tokens that are equal; `name`: of the first class."""
    tokens = tuple(text.tokens[position : position + most])
    names = (name, *["lookup"] * (len(tokens) - 1))
    return Draft(tokens, tuple(f"{one} {_class_of(length + n)}" for n, one in enumerate(names)))


def _class_of(length: int) -> str:
    """Of a token behind so many that were equal."""
    return next((f"<{most}" for most in (5, 9, 17) if length < most), ">16")

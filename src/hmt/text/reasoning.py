"""What a model thinks before it answers, apart from the answer."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from hmt.text.stream import StopStrings, TextStream

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class ReasoningReader:
    """Parts one answer's text as it comes into (reasoning, answer).

    An answer that does not begin with <think> has no reasoning, unless the prompt ended with it
    (`begun`).  White space at the beginning of both parts is left out.
    """

    def __init__(self, *, begun: bool) -> None:
        self._inside: bool | None = True if begun else None  # None: not known yet
        self._held = ""
        self._end = StopStrings([CLOSE])
        self._blank = True  # nothing of this part has been shown

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._inside is True

    def push(self, text: str) -> tuple[str, str]:
        """What is certain to be reasoning, and answer, now that `text` follows."""
        if self._inside is None:
            self._held += text
            begin = self._held.lstrip()
            if begin.startswith(OPEN):
                self._inside, text = True, begin.removeprefix(OPEN)
            elif OPEN.startswith(begin):
                return "", ""
            else:  # an answer, with its white space
                self._inside, self._blank, text = False, False, self._held
            self._held = ""
        if not self._inside:
            return "", self._shown(text)
        thought = self._shown(self._end.push(text))
        if self._end.matched is None:
            return thought, ""
        self._inside, self._blank = False, True
        return thought, self._shown(self._end.rest)

    def flush(self) -> tuple[str, str]:
        """What was still held."""
        held, self._held = self._held, ""
        return (self._shown(self._end.flush()), "") if self._inside else ("", held)

    def _shown(self, text: str) -> str:
        if self._blank:
            text = text.lstrip()
            self._blank = not text
        return text


class Thinking(Protocol):
    """Follows an answer, and knows whether it is reasoning."""

    @property
    def inside(self) -> bool:
        """Whether what comes next is."""
        ...

    def push(self, text: str) -> Any:
        """The text that comes next."""
        ...


class ThoughtLimit:
    """Ends one answer's reasoning after so many tokens: then the closing tag must follow."""

    complete: Final = False  # the answer goes on
    ready: Final = True

    def __init__(
        self, reader: Thinking, text: TextStream, closing: Sequence[int], most: int
    ) -> None:
        """`closing`: the tokens that end reasoning; reader and text are this answer's own."""
        self._reader = reader
        self._text = text
        self._closing = list(closing)
        self._left = most
        self._due: list[int] = []

    def allowed(self) -> torch.Tensor | None:
        """The one token that may come next, int64 [1]; None: any."""
        if not self._due and self._left <= 0 and self._reader.inside:
            self._due = self._closing.copy()
        return torch.tensor(self._due[:1]) if self._due else None

    def wait(self, seconds: float) -> bool:
        """As Constraint's: what may come next is always known."""
        return True

    def push(self, token_id: int) -> None:
        """The next token."""
        self._due = self._due[1:]
        self._reader.push(self._text.push(token_id))
        self._left -= self._reader.inside

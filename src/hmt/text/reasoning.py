"""What a model thinks before it answers, apart from the answer."""

from typing import Final

from hmt.text.stream import StopStrings

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

"""Where a value in JSON, or one of Python's, ends."""

import re
from typing import Final

_QUOTED: Final = {mark: re.compile(rf"[{mark}\\]") for mark in ("'", '"')}
_OPEN: Final = re.compile(r"[\"'{}\[\](),]")
_CONTROL: Final = {code: f"\\u{code:04x}" for code in range(32)} | {
    9: "\\t", 10: "\\n", 13: "\\r",
}  # fmt: skip


class Balance:
    """Counts brackets outside quoted strings, over a value that comes in pieces.

    done     the value has ended
    stopped  so has a part of it, by what `end` was told
    """

    def __init__(self, depth: int = 0) -> None:
        """depth: brackets that are open already."""
        self.done = self.stopped = False
        self._depth = depth
        self._quote = ""
        self._escaped = False

    def end(self, text: str, at: int, *, stop: str = "", said: list[str] | None = None) -> int:
        """Behind the end of the value, or of `text`, which goes on from `at`.

        stop   a character that ends a part, where only one bracket is open
        said   gets what was passed, with JSON's escapes for control characters in strings
        """
        begin = at
        while at < len(text) and not self.done and not self.stopped:
            begin = at
            if self._quote:
                at = self._in_text(text, at)
                piece = text[begin:at].translate(_CONTROL) if said is not None else ""
            else:
                at = self._between(text, at, stop)
                piece = text[begin:at]
            if said is not None:
                said.append(piece)
        return at

    def _in_text(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _QUOTED[self._quote].search(text, at)
        if match is None:
            return len(text)
        if match[0] == "\\":
            self._escaped = True
        else:
            self._quote = ""
        return match.end()

    def _between(self, text: str, at: int, stop: str) -> int:
        match = _OPEN.search(text, at)
        if match is None:
            return len(text)
        character = match[0]
        if character in _QUOTED:
            self._quote = character
        elif character in "{[(":
            self._depth += 1
        elif character in "}])":
            self._depth -= 1
            self.done = self._depth <= 0
        elif character == stop:
            self.stopped = self._depth == 1
        return match.end()

"""Text as it becomes printable: tokens to text one at a time, and stop strings across tokens."""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from hmt.base.errors import CheckpointError, RequestError

REPLACEMENT: Final = "\ufffd"


class Joiner(Protocol):
    """Joins the pieces of a vocabulary into text.  Holds what may still change."""

    def push(self, piece: str) -> str:
        """The text that is certain now that `piece` follows."""
        ...

    def push_text(self, text: str) -> str:
        """The text that is certain now that `text` follows, which is spelled as it is written."""
        ...

    def flush(self) -> str:
        """The text that was still held; nothing follows."""
        ...

    def bytes_of(self, piece: str) -> bytes:
        """What `piece` stands for, wherever it is."""
        ...


class TextStream:
    """Incremental detokenizer of one sequence.

    All results of `push` and of the final `flush` together equal `Tokenizer.decode` of all
    tokens, also where these are not valid UTF-8; no result ends inside a character.  The work per
    token does not grow with the sequence.  Not for use by several threads at once.
    """

    def __init__(
        self,
        piece_of: Callable[[int], str | None],
        joiner: Joiner,
        literal: Mapping[int, str] | None = None,
    ) -> None:
        """`literal`: text of tokens that are not spelled in the vocabulary's alphabet."""
        self._piece_of = piece_of
        self._joiner = joiner
        self._literal = literal or {}

    def push(self, token_id: int) -> str:
        """The text that became printable with this token; empty for special and unknown tokens."""
        if token_id in self._literal:
            return self._joiner.push_text(self._literal[token_id])
        piece = self._piece_of(token_id)
        return "" if piece is None else self._joiner.push(piece)

    def flush(self) -> str:
        """The text still held, with U+FFFD for bytes that form no character.  Ends the stream."""
        return self._joiner.flush()


class StopStrings:
    """Passes text on up to the first stop string, and holds back what may be the start of one.

    The first is the one that is complete first, the longest of those that end together: so the
    result does not depend on how the text was cut into tokens.  `matched` is that string, or None,
    and `rest` what came behind it with the same push.
    Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if "" in self._stops:
            raise RequestError(
                f"stop strings {self._stops!r} contain an empty one, which would end every answer "
                "before it begins: remove it"
            )
        self._held = ""
        self.matched: str | None = None
        self.rest = ""

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._stops)

    def push(self, text: str) -> str:
        """The text that can be shown now that `text` follows; nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            begin, self.matched = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._held = ""
            self.rest = text[begin + len(self.matched) :]
            return text[:begin]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, when nothing follows."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def joiner_for(decoder: Mapping[str, Any] | None) -> Callable[[], Joiner]:
    """What joins pieces as the `decoder` of a tokenizer.json does (a new one per sequence).

    Known are ByteLevel (GPT-2, Llama 3, Qwen, DeepSeek) and SentencePiece's sequence of Replace,
    ByteFallback, Fuse and Strip (Llama 2, Mistral, Gemma).  Raises CheckpointError for others.
    """
    steps = [] if decoder is None else list(decoder.get("decoders", [decoder]))
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return _ByteLevelJoiner
    replaced: dict[str, str] = {}
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replaced[step["pattern"]["String"]] = step["content"]
    stripped = ""
    if len(steps) == 3 and steps[2]["type"] == "Strip" and steps[2]["stop"] == 0:
        strip = steps.pop()
        stripped = strip["content"] * strip["start"]
    if [step["type"] for step in steps] != ["ByteFallback", "Fuse"]:
        raise CheckpointError(
            f"tokenizer.json joins tokens with {' + '.join(names) or 'no decoder'}; known are "
            "ByteLevel and Replace + ByteFallback + Fuse (+ Strip): use a byte-level BPE or "
            "SentencePiece checkpoint"
        )
    return partial(_FallbackJoiner, replaced, stripped)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's map: printable Latin-1 stands for itself, the other bytes for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF: Final = _byte_of_character()


class _ByteLevelJoiner:
    """Pieces are bytes in disguise; a piece with any other character is text (added tokens)."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> str:
        return self._decoder.decode(self.bytes_of(piece))

    def push_text(self, text: str) -> str:
        return self._decoder.decode(text.encode())

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def bytes_of(self, piece: str) -> bytes:
        try:
            return bytes([_BYTE_OF[character] for character in piece])
        except KeyError:
            return piece.encode()


class _FallbackJoiner:
    """Pieces are text, or one byte each such as <0x0A>; runs of bytes become text when they end.

    A run is held until then because one wrong byte turns all of it into replacement characters.
    """

    _BYTE = re.compile(r"<0x([0-9a-fA-F]{2})>")

    def __init__(self, replaced: Mapping[str, str], stripped: str) -> None:
        self._replaced = replaced
        self._stripped = stripped  # what may be cut from the very start, in full or in part
        self._run = bytearray()

    def push(self, piece: str) -> str:
        piece = self._replace(piece)
        byte = self._BYTE.fullmatch(piece)
        if byte:
            self._run.append(int(byte[1], 16))
            return ""
        return self.push_text(piece)

    def push_text(self, text: str) -> str:
        return self._cut_start(self._end_run() + text)

    def flush(self) -> str:
        return self._cut_start(self._end_run())

    def bytes_of(self, piece: str) -> bytes:
        piece = self._replace(piece)
        byte = self._BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.encode()

    def _replace(self, piece: str) -> str:
        for old, new in self._replaced.items():
            piece = piece.replace(old, new)
        return piece

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _cut_start(self, text: str) -> str:
        while text and self._stripped:
            if text[0] != self._stripped[0]:
                self._stripped = ""
            else:
                text, self._stripped = text[1:], self._stripped[1:]
        return text

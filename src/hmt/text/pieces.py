"""Long texts in pieces: where a text can be divided without a change of its token ids.

Tokenizing takes about 200 bytes of memory per byte of text until it ends, and cannot be stopped.
In pieces both stay bounded.  What a tokenizer does with a text is described by its tokenizer.json,
which the classes of the `tokenizers` package show by their state.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import tokenizers

from hmt.text.patterns import GPT2, O200K, cl100k

PIECE_CHARACTERS: Final = 1 << 16  # encoding one takes 10 MB and 0.1 s
_LOOK_BACK: Final = 1 << 12  # characters in which a place is looked for before a piece is longer

# Pre-tokenizers whose matches never reach from a letter, or a digit, across what `_PLACES` says
# comes behind it, and which look ahead only behind white space.  So text behind such a place is
# split as if the text began there, and text before it as if it ended there.
_QWEN: Final = cl100k(r"\p{N}")  # digits by themselves
_DIVIDING: Final = frozenset({GPT2, O200K, _QWEN, cl100k(r"\p{N}{1,3}"), cl100k(r"\p{N}+")})

# Letters of scripts without marks that join them to what follows; digits; and what is neither a
# letter, a mark nor a number, apart from the apostrophe, which some patterns take with a word.
_LETTERS: Final = (
    r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u0410-\u044f"
    r"\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_OTHERS: Final = (
    r"\x00-\x26\x28-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
)
_PLACES: Final = f"(?<=[{_LETTERS}])(?=[{_OTHERS}0-9])|(?<=[0-9])(?=[{_OTHERS}A-Za-z])"
_PLACE: Final = re.compile(_PLACES)
_PLACE_OR_DIGIT: Final = re.compile(f"{_PLACES}|(?<=[0-9])(?=[0-9])")

_NFC_SHRINKS: Final = 3  # UTF-8 becomes a third at most, as with U+1FEF, which becomes U+0060
_SPACE: Final = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Divider:
    """Divides texts where a tokenizer's ids are those of the pieces, one after the other.

    place   matches (nothing) where a text may be divided
    added   texts of the tokens that are found before anything else; none is divided
    reach   characters on both sides of a place in which none of these may occur
    """

    place: re.Pattern[str]
    added: tuple[str, ...]
    reach: int

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "Divider | None":
        """That of a tokenizer; None where it is not known that dividing changes nothing."""
        if getattr(backend.model, "dropout", None) or not _is_nfc_or_none(backend.normalizer):
            return None
        steps = _steps(backend.pre_tokenizer)
        if not (all(map(_is_local, steps)) and any(map(_is_dividing, steps))):
            return None
        place = _PLACE_OR_DIGIT if any(map(_is_by_digit, steps)) else _PLACE
        added = tuple(token.content for token in backend.get_added_tokens_decoder().values())
        # NFC makes one character of up to four.
        reach = 4 * (max(map(len, added), default=0) + 1)
        return cls(place, added, reach)

    def pieces(self, text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
        """The whole text in pieces of `size` characters, longer where it has no place to divide."""
        begin = 0
        while len(text) - begin > size:
            end = self._end(text, begin, size)
            yield text[begin:end]
            begin = end
        if begin < len(text) or not text:
            yield text[begin:]

    def _end(self, text: str, begin: int, size: int) -> int:
        """Where the piece that begins at `begin` ends."""
        back = max(begin + 1, begin + size - _LOOK_BACK)
        before = [match.start() for match in self.place.finditer(text, back, begin + size)]
        for place in reversed(before):
            if self._is_free(text, place):
                return place
        for match in self.place.finditer(text, begin + size):
            if self._is_free(text, match.start()):
                return match.start()
        return len(text)

    def _is_free(self, text: str, place: int) -> bool:
        around = text[max(0, place - self.reach) : place + self.reach]
        if not around.isascii():
            around = unicodedata.normalize("NFC", around)
        return not any(content in around for content in self.added)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much text one token of a tokenizer can stand for.

    token_bytes   of UTF-8, at most
    spaces        whether white space counts; False where some tokens take any amount of it along
    """

    token_bytes: int
    spaces: bool

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "Coverage | None":
        """That of a tokenizer; None where it may leave out text, so that there is no bound."""
        model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=False)
        shrinks = _shrinks(backend.normalizer)
        steps = _steps(backend.pre_tokenizer)
        if type(model).__name__ != "BPE" or shrinks is None or not all(map(_leaves_all, steps)):
            return None
        by_byte = any(step["type"] == "ByteLevel" for step in steps)
        if by_byte:  # each byte is a character, of which the alphabet must have all
            alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
            if not all(character in vocabulary for character in alphabet):
                return None
            longest = max(map(len, vocabulary))
        else:
            fallback = (f"<0x{byte:02X}>" in vocabulary for byte in range(256))
            if not (model.byte_fallback and all(fallback)):
                return None
            longest = max(len(piece.encode()) for piece in vocabulary)
        added = backend.get_added_tokens_decoder().values()
        longest = max([longest, *(len(token.content.encode()) for token in added)])
        return cls(shrinks * longest, not any(token.lstrip or token.rstrip for token in added))

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than these stand for `text`."""
        counted = text if self.spaces else _SPACE.sub("", text)
        return -(-len(counted.encode()) // self.token_bytes)


def _state(part: Any) -> Mapping[str, Any]:
    """What tokenizer.json says of a part of a tokenizer."""
    try:
        state = json.loads(part.__getstate__())
    except Exception:  # one that is written in Python has none
        return {"type": "unknown"}
    return state if isinstance(state, dict) else {"type": "unknown"}


def _steps(pre_tokenizer: Any) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    state = _state(pre_tokenizer)
    return list(state["pretokenizers"]) if state["type"] == "Sequence" else [state]


def _regex(step: Mapping[str, Any]) -> str | None:
    """The pattern of a Split that isolates what matches; None for other steps."""
    isolates = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return step["pattern"].get("Regex") if isolates else None


def _is_dividing(step: Mapping[str, Any]) -> bool:
    by_itself = step["type"] == "ByteLevel" and bool(step["use_regex"])
    return by_itself or _regex(step) in _DIVIDING


def _is_by_digit(step: Mapping[str, Any]) -> bool:
    alone = step["type"] == "Digits" and bool(step["individual_digits"])
    return alone or _regex(step) in (_QWEN, r"\p{N}")


def _is_local(step: Mapping[str, Any]) -> bool:
    """Whether a step splits both sides of a place as if the other were not there."""
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    digits = step["type"] == "Digits" or _regex(step) in (r"\p{N}", r"\p{N}{1,3}", r"\p{N}+")
    return digits or _is_dividing(step)


def _leaves_all(step: Mapping[str, Any]) -> bool:
    """Whether a step leaves nothing out."""
    if step["type"] == "Split":
        return step["behavior"] != "Removed"
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")


def _is_nfc_or_none(normalizer: Any) -> bool:
    return normalizer is None or _state(normalizer)["type"] == "NFC"


def _shrinks(normalizer: Any) -> int | None:
    """By how much a normalizer makes a text shorter, in bytes, at most; None where it may all."""
    if normalizer is None:
        return 1
    state = _state(normalizer)
    shrinks = 1
    for step in state["normalizers"] if state["type"] == "Sequence" else [state]:
        if step["type"] == "NFC":
            shrinks *= _NFC_SHRINKS
        elif step["type"] == "Replace":
            old, new = step["pattern"].get("String"), step["content"]
            if old is None or len(new.encode()) < len(old.encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrinks

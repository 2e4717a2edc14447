"""Regular expressions of published tokenizers, whose cost is known.

tokenizers runs them in Oniguruma, which backtracks: `(a+)+$` takes seconds for a line of text, and
`a*a*b|a` hours for a few thousand characters.  The ones here take time in proportion to the text.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

_CONTRACTED: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"


def _tiktoken(words: str, digits: str, marks: str) -> str:
    return f"{words}|{digits}|{marks}|{_BLANKS}"


def cl100k(digits: str) -> str:
    """GPT-4's pattern, with `digits` for the part that matches numbers."""
    words = rf"{_CONTRACTED}|{_BEFORE}\p{{L}}+"
    return _tiktoken(words, digits, r" ?[^\s\p{L}\p{N}]+[\r\n]*")


def _cased(contracted: str, digits: str) -> str:
    words = f"{_BEFORE}{_UPPER}*{_LOWER}+{contracted}|{_BEFORE}{_UPPER}+{_LOWER}*{contracted}"
    return _tiktoken(words, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*")


GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
O200K: Final = _cased(f"{_CONTRACTED}?", r"\p{N}{1,3}")  # GPT-4o's
_MARKED_WORDS: Final = rf"{_CONTRACTED}|{_BEFORE}[\p{{L}}\p{{M}}]+"
_KNOWN: Final = frozenset({
    # GPT-2, also written with a group.
    GPT2,
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3, GPT-4, GLM 4; Qwen 2 and 3; Qwen 3.5.
    cl100k(r"\p{N}{1,3}"),
    cl100k(r"\p{N}"),
    _tiktoken(_MARKED_WORDS, r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
    # GPT-4o and gpt-oss; Mistral's Tekken; Llama 4.
    O200K,
    _cased("", r"\p{N}"),
    _cased("", r"\p{N}{1,3}"),
    # DeepSeek V3 and R1.
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}""",
})  # fmt: skip

# A few single characters of which only the last one is repeated: `[a-z]+`, ` {2,}`, `\s?\p{L}+`.
_ATOM: Final = r"(?:\\p\{\^?\w+\}|\\[nrtsSdDwW.\-]|\[\^?(?:\\.|[^\[\]\\&])+\]|[^\\\[\](){}|*+?.^$])"
_SIMPLE: Final = re.compile(rf"{_ATOM}?\??{_ATOM}(?:\+|\{{\d{{1,2}},?\d{{0,2}}\}})?")


def is_known(pattern: Mapping[str, Any]) -> bool:
    """Whether a pattern of a tokenizer.json takes time in proportion to a text."""
    if "String" in pattern:
        return bool(pattern["String"])
    regex = pattern["Regex"]
    return regex in _KNOWN or (len(regex) < 500 and _SIMPLE.fullmatch(regex) is not None)

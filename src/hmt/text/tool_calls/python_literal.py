"""Python's literals, as models write arguments: https://docs.python.org/3/reference/lexical_analysis.html.

Read here because ast.literal_eval may run out of stack on text from strangers.
"""

import re
from collections.abc import Callable
from typing import Any, Final

MAX_DEPTH: Final = 64  # values inside one another

_SPACE: Final = re.compile(r"\s*")
_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_WORD: Final = re.compile(r"[A-Za-z]+\b")
_STRING: Final = {
    mark: re.compile(rf"(?:[^{mark}\\]|\\.)*{mark}", re.DOTALL) for mark in ("'", '"')
}
_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_WORDS: Final = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
_PLAIN: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_MAX_DIGITS: Final = 400  # of a number


def read_literal(text: str) -> Any:
    """The value of a literal: text, a number, True, False, None, a list, a tuple, a dict.

    JSON's true, false and null are taken, too; tuples become lists, and keys text.  Raises
    ValueError for all else and above MAX_DEPTH.
    """
    value, at = _value(text, _skip(text, 0), 0)
    if _skip(text, at) != len(text):
        raise ValueError(f"something follows a literal at character {at}")
    return value


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise ValueError(f"values are more than {MAX_DEPTH} deep")
    begin = text[at : at + 1]
    if begin in _STRING:
        return _string(text, at)
    if begin == "{":
        pairs, at = _items(text, at + 1, "}", lambda place: _pair(text, place, depth))
        return dict(pairs), at
    if begin in ("[", "("):
        return _items(
            text, at + 1, "]" if begin == "[" else ")", lambda place: _value(text, place, depth + 1)
        )
    if number := _NUMBER.match(text, at):
        return _number(number[0]), number.end()
    word = _WORD.match(text, at)
    if word is None or word[0] not in _WORDS:
        raise ValueError(f"no literal begins at character {at}")
    return _WORDS[word[0]], word.end()


def _items(
    text: str, at: int, end: str, read: Callable[[int], tuple[Any, int]]
) -> tuple[list[Any], int]:
    items: list[Any] = []
    while True:
        at = _skip(text, at)
        if text.startswith(end, at):
            return items, at + 1
        item, at = read(at)
        items.append(item)
        at = _skip(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(end, at):
            raise ValueError(f"a comma or {end} is missing at character {at}")


def _pair(text: str, at: int, depth: int) -> tuple[tuple[str, Any], int]:
    key, at = _value(text, at, depth + 1)
    at = _skip(text, at)
    if not text.startswith(":", at) or isinstance(key, list | dict):
        raise ValueError(f"a key and a colon are missing at character {at}")
    value, at = _value(text, _skip(text, at + 1), depth + 1)
    return (key if isinstance(key, str) else str(key), value), at


def _string(text: str, at: int) -> tuple[str, int]:
    match = _STRING[text[at]].match(text, at + 1)
    if match is None:
        raise ValueError(f"the text that begins at character {at} does not end")
    said = _ESCAPE.sub(_unescaped, match[0][:-1])
    return said.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), match.end()


def _unescaped(match: re.Match[str]) -> str:
    code = match[0][1:]
    if len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else "\ufffd"
    return _PLAIN.get(code, code if code in "\\'\"/" else match[0])


def _number(text: str) -> int | float:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} characters; {_MAX_DIGITS} are enough")
    if text.lstrip("+-").isdecimal():
        return int(text)
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large for a number")
    return value

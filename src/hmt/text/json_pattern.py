"""Patterns of JSON schemas without look-around, which grammars do not have.

A look-ahead at the beginning is a condition on the whole string, which a separate pattern can
say: `^(?=A)B` is `^A` and `^B`, `^(?![ab])B` is `^(?:[^ab]|$)` and `^B`.  pydantic's Decimal and
zod's e-mail addresses have such patterns, and so have rules for passwords.
"""

import re
from typing import Final

_ATOM: Final = r"(?:\[\^?\]?(?:\\.|[^\]\\])*\]|\\[^bBAzZGpPkxu\d]|[^\\\[\](){}*+?|^$.])"
_AHEAD: Final = re.compile(r"\(\?([=!])")
_ONLY: Final = re.compile(rf"\^?({_ATOM})\*\$")  # made of nothing but this
_ANYWHERE: Final = re.compile(rf"\.\*({_ATOM})")
_TWICE: Final = re.compile(rf"\.\*({_ATOM})(?:\1|\{{2\}})")
_FIRST: Final = re.compile(rf"\^?({_ATOM})")


def without_lookaround(pattern: str) -> tuple[list[str], bool]:
    r"""Patterns that hold together where `pattern` does, and whether that is all it says.

    False: a look-around, a word's border or a reference to a group was left out, and the patterns
    allow more.  Empty where nothing is left, as of patterns with references.
    """
    anchored = pattern.startswith("^")
    rest, held, exact = pattern[anchored:], list[str](), True
    while anchored and (ahead := _AHEAD.match(rest)):
        end = _group_end(rest, 0)
        inside, rest = rest[ahead.end() : end - 1], rest[end:]
        condition = _ahead(inside) if ahead[1] == "=" else _not_ahead(inside)
        if condition is None:
            exact = False
        else:
            held.append(condition)
    rest = "^" + rest if anchored else rest
    found = [*held, rest] if rest != "^" else held
    results = [_stripped(one) for one in found]
    return [text for text, _ in results if text is not None], exact and all(
        same for _, same in results
    )


def _ahead(inside: str) -> str:
    return "^" + inside.removeprefix("^") if "|" not in inside else f"^(?:{inside})"


def _not_ahead(inside: str) -> str | None:
    """What a string must be like that does not begin like `inside`; None: not known."""
    if inside.strip("^") == "$":
        return "."
    if match := _ONLY.fullmatch(inside):
        return _complement(match[1])
    if match := _ANYWHERE.fullmatch(inside):
        return f"^{_complement(match[1])}*$"
    if match := _TWICE.fullmatch(inside):
        atom, other = match[1], _complement(match[1])
        return f"^(?:{atom}?{other})*{atom}?$"
    if match := _FIRST.fullmatch(inside):
        return f"^(?:{_complement(match[1])}|$)"
    return None


def _complement(atom: str) -> str:
    """The class of all characters but those of `atom`, a class, an escape or a character."""
    if atom.startswith("[^"):
        return "[" + atom[2:]
    if atom.startswith("["):
        return "[^" + atom[1:]
    if len(atom) == 2 and atom[1] in "dDsSwW":
        return "\\" + atom[1].swapcase()
    return f"[^{atom}]" if atom != "-" else r"[^\-]"


def _group_end(text: str, begin: int) -> int:
    """Behind the group that begins at `begin`; one behind the text where it is not closed."""
    depth, at = 0, begin
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "[":
            at = _class_end(text, at) - 1
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(text) + 1


def _class_end(text: str, begin: int) -> int:
    """Behind the class that begins at `begin`."""
    at = begin + 1 + (text[begin + 1 : begin + 2] == "^")
    at += text[at : at + 1] == "]"
    while at < len(text) and text[at] != "]":
        at += 1 + (text[at] == "\\")
    return at + 1


def _stripped(pattern: str) -> tuple[str | None, bool]:
    """`pattern` without what grammars lack, and whether that is the same; None with references."""
    kept, at, same = list[str](), 0, True
    while at < len(pattern):
        two = pattern[at : at + 2]
        end = at + 1
        if two[:1] == "\\":
            if (two[1:].isdecimal() and two != "\\0") or two == "\\k":
                return None, False
            end = at + 2
            if two in ("\\b", "\\B"):
                same, at = False, end
                continue
        elif two[:1] == "[":
            end = _class_end(pattern, at)
        elif pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), at):
            at, same = _group_end(pattern, at), False
            if pattern[at : at + 1] in ("*", "+", "?"):
                at += 1
            continue
        kept.append(pattern[at:end])
        at = end
    return "".join(kept), same

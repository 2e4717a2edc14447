"""Sequences that inputs of linear layers are measured with.

The text that comes with the package is 70 pieces of Jane Austen's novels, 28 of documentation and
30 of source code, mixed.  None of it is in the text that models are measured with.
"""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final

from hmt.base.errors import ConfigError
from hmt.text import Tokenizer, documents

BUILTIN: Final = "builtin"
OWN: Final = "own"  # that the model writes itself: see `own_text.py`
_MAX_BYTES: Final = 1 << 30
_LEAST: Final = 16  # tokens of a sequence; shorter rests are left out


def calibration_sequences(
    where: str, tokenizer: Tokenizer, count: int, length: int
) -> list[list[int]]:
    """Up to `count` sequences of up to `length` tokens, from all over the text.

    where   "builtin"; a .jsonl file with {"text": ...} or {"messages": [...]} on each line; or any
            other file, which is one text
    Raises ConfigError where it cannot be read, or is too short.
    """
    pieces = []
    for ids in _documents(where, tokenizer):
        pieces += [ids[at : at + length] for at in range(0, len(ids), length)]
    pieces = [piece for piece in pieces if len(piece) >= min(_LEAST, length)]
    if not pieces:
        raise ConfigError(
            f"the calibration text {where} has fewer than {_LEAST} tokens: give a longer one"
        )
    if len(pieces) <= count:
        return pieces
    return [pieces[number * len(pieces) // count] for number in range(count)]


def _documents(where: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    if where == BUILTIN:
        text = files("hmt.quantizing") / "calibration.txt"
        yield tokenizer.encode(text.read_text(encoding="utf-8"))
        return
    file = Path(where).expanduser()
    if file.is_file() and file.stat().st_size > _MAX_BYTES:
        raise ConfigError(f"{file} has more than {_MAX_BYTES} bytes: give a part of it")
    yield from documents(file, tokenizer, "--calibration")

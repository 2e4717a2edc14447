"""Examples to learn from: tokens, and which of them are to be predicted."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import ConfigError, RequestError
from hmt.text import Tokenizer

_MAX_BYTES: Final = 1 << 30
_WANTED: Final = '{"messages": [...]} or {"text": ...}'


@dataclass(frozen=True, slots=True)
class Example:
    """A text.

    tokens   at least two
    learned  of each token whether it is to be predicted from those before it; never the first
    """

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]

    @property
    def count(self) -> int:
        """Tokens that are to be predicted."""
        return sum(self.learned)


@dataclass(frozen=True, slots=True)
class Examples:
    """All examples of a file.

    left_out   lines of which nothing is to be predicted within the length
    skipped    answers that the template writes in another way once others follow, and from which
               nothing is learned
    """

    all: tuple[Example, ...]
    left_out: int
    skipped: int


def read_examples(file: Path, tokenizer: Tokenizer, length: int) -> Examples:
    """Examples of a .jsonl file, one for each line: a chat, of whose answers is learned, or a text.

    length   tokens at most of each
    Raises ConfigError where it cannot be read, or nothing is to be learned from it.
    """
    found, left_out, skipped = list[Example](), 0, 0
    for number, said in _lines(file):
        try:
            if "messages" in said:
                tokens, spans, missed = _chat(said["messages"], tokenizer)
                skipped += missed
            else:
                tokens = tokenizer.encode(said["text"])
                spans = [(0, len(tokens))]
        except (ValueError, TypeError, KeyError, AttributeError, RequestError) as error:
            raise ConfigError(f"{file}, line {number} is not {_WANTED} ({error})") from error
        example = _example(tokens, spans, length)
        if example.count:
            found.append(example)
        else:
            left_out += 1
    if not found:
        raise ConfigError(
            f"{file} has no line from which anything is learned within {length} tokens: it takes "
            f"{_WANTED} on each, chats with answers"
        )
    return Examples(tuple(found), left_out, skipped)


def batches(count: int, size: int, seed: int, epoch: int) -> Iterator[Sequence[int]]:
    """Numbers of examples by step, in an order of the epoch's own; the last may be fewer."""
    order = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(order)
    for first in range(0, count, size):
        yield order[first : first + size]


def _lines(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"--data {file} has more than {_MAX_BYTES} bytes: give a part of it")
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {file} cannot be read: {error}") from error
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number} is not {_WANTED} ({error})") from error
        if not isinstance(said, dict):
            raise ConfigError(f"{file}, line {number} is not {_WANTED}")
        yield number, said


def _chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> tuple[list[int], list[tuple[int, int]], int]:
    """Tokens of a chat, where its answers lie in them, and how many answers could not be found.

    An answer is what the template writes behind the point where the model would begin to write.
    """
    whole = _written(messages, tokenizer)
    spans, missed = [], 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.chat_prompt(messages[:number]) if number else []
        until = _written(messages[: number + 1], tokenizer)
        if whole[: len(until)] != until:
            missed += 1
            continue
        spans.append((_common(before, until), len(until)))
    return whole, spans, missed


def _written(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[int]:
    return tokenizer.chat_prompt(messages, variables={"add_generation_prompt": False})


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _example(tokens: Sequence[int], spans: Sequence[tuple[int, int]], length: int) -> Example:
    learned = [False] * len(tokens)
    for first, end in spans:
        learned[first:end] = [True] * (end - first)
    learned[:1] = [False] * len(learned[:1])  # nothing is before it
    return Example(tuple(tokens[:length]), tuple(learned[:length]))

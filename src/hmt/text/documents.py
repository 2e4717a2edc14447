"""Files of text that a user gives: what scales or statistics are found with."""

import json
from collections.abc import Iterator
from pathlib import Path

from hmt.base.errors import ConfigError
from hmt.text.tokenizer import Tokenizer


def documents(file: Path, tokenizer: Tokenizer, option: str) -> Iterator[list[int]]:
    """Token ids of each document of a file: of each line of a .jsonl file, else of all of it.

    A line is {"text": ...}, or {"messages": [...]}, which go through the chat template.  `option`
    is the one that names the file.  Raises ConfigError where it cannot be read.
    """
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {file} cannot be read: {error}") from error
    if file.suffix != ".jsonl":
        yield tokenizer.encode(content)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield _of_line(file, number, line, tokenizer)


def _of_line(file: Path, number: int, line: str, tokenizer: Tokenizer) -> list[int]:
    try:
        said = json.loads(line)
        if "messages" in said:
            return tokenizer.chat_prompt(said["messages"])
        return tokenizer.encode(said["text"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f'{file}, line {number} is not {{"text": ...}} or {{"messages": [...]}} ({error!r})'
        ) from error

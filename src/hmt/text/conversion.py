"""Checkpoints without a tokenizer.json: it is made of the tokenizer's own file, in a child process.

Files are SentencePiece's tokenizer.model, Mistral's tekken.json, and tiktoken's lines of base64 and
rank, which are called tokenizer.model, tiktoken.model or NAME.tiktoken.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError
from hmt.sandbox import Ended, Limits, Lost, Refused, Sandbox
from hmt.text.small_file import MAX_BYTES, read_bytes, read_object, read_text

_NAMES: Final = ("tekken.json", "tokenizer.model", "tiktoken.model", "*.tiktoken")
_LINE: Final = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
_PREPARE: Final = Limits(memory_bytes=8 << 30, cpu_s=120.0)
_ANSWER: Final = Limits(memory_bytes=1 << 30, cpu_s=20.0)


def converted(folder: Path) -> tuple[Path, bytes] | None:
    """A tokenizer's file in `folder`, and the tokenizer.json that stands for it; None without one.

    Raises CheckpointError where it cannot be read, or a library for it is not installed.
    """
    file = _file_in(folder)
    if file is None:
        return None
    data = read_bytes(file, MAX_BYTES)
    if not data:
        raise CheckpointError(f"{file} is empty: download it again")
    settings: dict[str, Any] = {"file": str(file.absolute()), "kind": "sentencepiece"}
    code = ""
    if file.name == "tekken.json":
        settings["kind"] = "tekken"
    elif _LINE.match(data):
        settings |= {"kind": "tiktoken", "added": _added(folder)}
        code = next(filter(None, map(read_text, sorted(folder.glob("tokenization_*.py")))), "")
    del data
    sandbox = Sandbox(
        "hmt.sandbox.tokenizer_conversion:Converted",
        settings,
        code.encode,
        prepare=_PREPARE,
        worker=_ANSWER,
    )
    try:
        return file, sandbox.fork().call({}, b"").blob
    except Refused as error:
        if error.kind == "library":
            raise CheckpointError(
                f"{file} is read with a package that is not installed: pip install {error}"
            ) from None
        raise _unreadable(file, error) from error
    except (Ended, Lost) as error:
        raise _unreadable(file, error) from error
    finally:
        sandbox.close()


def _file_in(folder: Path) -> Path | None:
    for name in _NAMES:
        for file in sorted(folder.glob(name)):
            return file
    return None


def _added(folder: Path) -> dict[str, str]:
    """Special tokens that tokenizer_config.json names, by id."""
    entries = read_object(folder / "tokenizer_config.json").get("added_tokens_decoder")
    if not isinstance(entries, Mapping):
        return {}
    return {
        str(number): str(entry["content"])
        for number, entry in entries.items()
        if str(number).isdecimal() and isinstance(entry, Mapping) and "content" in entry
    }


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} cannot be read ({error}): download it again")

"""Making a tokenizer.json of the files in which tokenizers were published before.

transformers and the libraries that it asks for read them.  In a child process: the files come from
strangers, and what the libraries need for them has no bound.
"""

import ast
import importlib
import os
import sys
from types import ModuleType
from typing import Any, Final, cast

from hmt.sandbox.refusal import Refusal

LIBRARIES: Final = {
    "sentencepiece": {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"},
    "tiktoken": {"tiktoken": "tiktoken"},
    "tekken": {},
}
_PATTERN: Final = "pat_str"  # what code that comes with tiktoken files calls it
_RESERVED: Final = "num_reserved_special_tokens"


class Converted:
    """A role: made of a tokenizer's file, it gives the tokenizer.json that stands for it."""

    def __init__(self, settings: dict[str, Any], blob: bytes) -> None:
        """Of {"kind", "file"}: see LIBRARIES; for tiktoken {"added"}: special tokens by id.

        blob   code that comes with a tiktoken file; it is read, and never run
        Raises Refusal where a library is missing.
        """
        # No file may be written here, and none is looked for elsewhere.
        os.environ |= {"TIKTOKEN_CACHE_DIR": "", "HF_HUB_OFFLINE": "1"}
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no torch
        # transformers would import torch, which takes longer than all else and has no use here.
        sys.modules["torch"] = cast(ModuleType, None)
        needed = LIBRARIES[settings["kind"]]
        for module, package in needed.items():
            try:
                importlib.import_module(module)
            except ImportError:
                raise Refusal("library", package) from None
        self._json = _CONVERSIONS[settings["kind"]](settings, blob.decode())

    def handle(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        """The tokenizer.json."""
        return {}, self._json.encode()


def _sentencepiece(settings: dict[str, Any], code: str) -> str:
    from transformers import AutoTokenizer

    folder = os.path.dirname(settings["file"])
    found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return str(found.backend_tokenizer.to_str())


def _tekken(settings: dict[str, Any], code: str) -> str:
    from transformers.integrations.mistral.tokenizer import MistralConverter

    return str(MistralConverter(settings["file"]).converted().to_str())


def _tiktoken(settings: dict[str, Any], code: str) -> str:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    said = _assigned(code)
    pattern = {"pattern": said[_PATTERN]} if isinstance(said.get(_PATTERN), str) else {}
    with open(settings["file"], "rb") as file:
        first = sum(1 for line in file if line.strip())
    named = {int(number): str(text) for number, text in settings["added"].items()}
    count = said.get(_RESERVED)
    last = max([first - 1, *named, first + (count if isinstance(count, int) else 0) - 1])
    if last - first > 1 << 16:
        raise ValueError(f"special tokens up to {last} behind {first} others")
    special = [named.get(i, f"<|reserved_token_{i}|>") for i in range(first, last + 1)]
    make: Any = TikTokenConverter
    made = make(settings["file"], extra_special_tokens=special, **pattern)
    return str(made.converted().to_str())


def _assigned(code: str) -> dict[str, Any]:
    """Constants that `code` gives names to, also as "|".join of a list of them."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        value: Any = node.value
        joins = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
        try:
            if joins and value.func.attr == "join":
                joint = ast.literal_eval(value.func.value)
                found[node.targets[0].id] = joint.join(ast.literal_eval(value.args[0]))
            else:
                found[node.targets[0].id] = ast.literal_eval(value)
        except (ValueError, TypeError, IndexError, AttributeError):
            continue  # computed otherwise
    return found


_CONVERSIONS: Final = {
    "sentencepiece": _sentencepiece,
    "tiktoken": _tiktoken,
    "tekken": _tekken,
}

"""Filling in the middle: prompts for what stands between two texts.

Bavarian et al., Efficient Training of Language Models to Fill in the Middle (2022).  A model that
was trained for it has special tokens that stand before the prefix, the suffix and the middle.
Most read them in this order (PSM); Codestral and Seed-Coder want the suffix first (SPM).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import tokenizers

# (before the prefix, before the suffix, before the middle or None, whether the suffix comes first)
_MARKS: Final[tuple[tuple[str, str, str | None, bool], ...]] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", False),  # Qwen, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", False),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", False),  # SantaCoder
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
        False,
    ),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", False),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>", False),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", False),  # GLM, CodeGeeX
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", True),  # Seed-Coder
    ("[PREFIX]", "[SUFFIX]", None, True),  # Codestral: the answer follows the prefix
)
# What models write after a middle, besides the end of the text: a token that pads, or the
# beginning of another file.
_ENDS: Final = (
    "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>",
    "<file_sep>", "<reponame>", "\u2581<EOT>", "<EOT>",
)  # fmt: skip
# Of GGUF files: of today and of earlier ones.
_GGUF_KEYS: Final = (
    ("fim_pre_token_id", "prefix_token_id"),
    ("fim_suf_token_id", "suffix_token_id"),
    ("fim_mid_token_id", "middle_token_id"),
)
_GGUF_ENDS: Final = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "eot_token_id")


@dataclass(frozen=True, slots=True)
class Infill:
    """Token ids that stand before the parts, and those that end what was filled in."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    ends: frozenset[int]

    def prompt(self, before: list[int], after: list[int]) -> list[int]:
        """Of the tokens of prefix and suffix."""
        first, second = [self.prefix, *before], [self.suffix, *after]
        parts = second + first if self.suffix_first else first + second
        return parts if self.middle is None else [*parts, self.middle]


def infill_of(
    id_of: Callable[[str], int | None], stated: Mapping[str, int] | None = None
) -> Infill | None:
    """How a vocabulary marks the parts; None where it does not.

    id_of    the id of a token by its text
    stated   ids by GGUF's names, where the file says them
    """
    stated = stated or {}
    given = [next((stated[key] for key in keys if key in stated), None) for keys in _GGUF_KEYS]
    marks = {id_ for id_ in given if id_ is not None}
    ends = {id_ for id_ in map(id_of, _ENDS) if id_ is not None}
    ends |= {stated[key] for key in _GGUF_ENDS if key in stated}
    if given[0] is not None and given[1] is not None and given[2] is not None:
        return Infill(given[0], given[1], given[2], False, frozenset(ends | marks))
    for before, after, middle, suffix_first in _MARKS:
        prefix, suffix = id_of(before), id_of(after)
        last = None if middle is None else id_of(middle)
        if prefix is None or suffix is None or (middle is not None and last is None):
            continue
        marks = {prefix, suffix} if last is None else {prefix, suffix, last}
        return Infill(prefix, suffix, last, suffix_first, frozenset(ends | marks))
    return None


def stated_ids(vocabulary: Mapping[str, Any], size: int) -> dict[str, int]:
    """`infill_of`'s stated ids, from a GGUF file's metadata; those that are no ids are left out."""
    names = [name for keys in _GGUF_KEYS for name in keys] + list(_GGUF_ENDS)
    found = {name: vocabulary.get(f"tokenizer.ggml.{name}") for name in names}
    return {name: id_ for name, id_ in found.items() if type(id_) is int and 0 <= id_ < size}


def within_text(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer for text that begins in the middle of a line: without the space before it.

    SentencePiece's vocabularies begin each text with a space, which a suffix has not got.  Returns
    `backend` itself where it adds none.
    """
    content = json.loads(backend.to_str())
    steps = content.get("normalizer") or {}
    steps = steps.get("normalizers", [steps])
    plain = [step for step in steps if step.get("type") != "Prepend"]
    pre = content.get("pre_tokenizer") or {}
    spaces = [
        step
        for step in pre.get("pretokenizers", [pre])
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never"
    ]
    if len(plain) == len(steps) and not spaces:
        return backend
    for step in spaces:
        step["prepend_scheme"] = "never"
    if len(plain) < len(steps):
        content["normalizer"] = {"type": "Sequence", "normalizers": plain} if plain else None
    return tokenizers.Tokenizer.from_str(json.dumps(content))

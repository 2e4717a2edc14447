"""The vocabulary in a GGUF file's metadata, checked before it is believed."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hmt.base.errors import CheckpointError, MissingFileError
from hmt.text.end_tokens import END_TEXTS, FILE_ENDS, end_tokens

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # of token_type
MODELS: Final = {
    "gpt2": "byte pairs",
    "gemma4": "byte pairs over SentencePiece's alphabet",
    "llama": "SentencePiece",
}
"""tokenizer.ggml.model, and what it means."""

# Matched in texts and written as nothing, whatever their type: marks of text to fill in.
_FILL_IN: Final[Mapping[str, tuple[str, ...]]] = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>",
                "<PRE>", "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>",
                "<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>",
                "<MID>", "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    **FILE_ENDS,
}  # fmt: skip
_CHANNEL_MARKS: Final = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_IDS: Final = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom",
    "fim_pre": "fim_pre", "fim_suf": "fim_suf", "fim_mid": "fim_mid", "fim_pad": "fim_pad",
    "fim_rep": "fim_rep", "fim_sep": "fim_sep",
}  # fmt: skip
_SENTENCEPIECE_IDS: Final = {"unk": 0, "bos": 1, "eos": 2}  # where a file names none
_FALCON_END: Final = 11

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 60


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokens and what is said of them.

    model    one of MODELS
    tokens   by id; all differ
    types    by id, corrected where a token's text alone tells its type
    scores   by id; the larger, the earlier a piece is merged
    merges   pairs of tokens whose text together is a token, the first first
    named    ids by "bos", "eos", "unk", "pad"
    ends     ids that end an answer
    """

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]
    named: Mapping[str, int]
    ends: frozenset[int]


def read_vocabulary(metadata: Mapping[str, Any], what: str) -> GgufVocabulary:
    """The vocabulary of the file `what`.

    Raises MissingFileError where there is none, CheckpointError where it is of a kind that HMT does
    not have or contradicts itself.
    """
    keys = _Keys(metadata, what)
    model = metadata.get("tokenizer.ggml.model", "no_vocab")
    tokens: list[str] = keys.array("tokens", str)
    if not tokens or model in ("no_vocab", "none"):
        raise MissingFileError(
            f"{what} has no tokenizer: convert it again from a folder that has one"
        )
    if not isinstance(model, str) or model not in MODELS:
        raise CheckpointError(
            f"{what} has a tokenizer of kind {_brief.repr(model)}; of GGUF files HMT has "
            f"{', '.join(f'{name} ({kind})' for name, kind in MODELS.items())}: use the safetensors"
        )
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        again, token = next((n, t) for n, t in enumerate(tokens) if ids[t] != n)
        raise keys.wrong(f"token {again}, {_brief.repr(token)}, is token {ids[token]}, too")
    types: list[int] = keys.array("token_type", int, len(tokens))[: len(tokens)]
    scores = [float(score) for score in keys.array("scores", (int, float), len(tokens))]
    if not all(map(math.isfinite, scores)):
        raise keys.wrong("it has scores that are no numbers")
    stated = keys.ids(len(tokens))
    named = _named(model, stated, types or [NORMAL] * len(tokens))
    ends = end_tokens(ids, stated | named)
    return GgufVocabulary(
        model,
        tokens,
        _types(types or [NORMAL] * len(tokens), ids, stated, ends),
        scores[: len(tokens)] or [0.0] * len(tokens),
        _merges(keys, ids) if model != "llama" else [],
        named,
        ends,
    )


class _Keys:
    """Values below tokenizer.ggml, of the type that is wanted."""

    def __init__(self, metadata: Mapping[str, Any], what: str) -> None:
        self._metadata, self._what = metadata, what

    def wrong(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._what}: its tokenizer cannot be read, {problem}: use another conversion of "
            "this model"
        )

    def array(self, key: str, kind: type | tuple[type, ...], least: int = 0) -> list[Any]:
        """An array of at least so many items, or an empty one where the file has none."""
        value = self._metadata.get(f"tokenizer.ggml.{key}", [])
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, list) or any(type(item) not in kinds for item in value):
            raise self.wrong(f"tokenizer.ggml.{key} is no array of {kinds[-1].__name__}")
        if value and len(value) < least:
            raise self.wrong(f"tokenizer.ggml.{key} has {len(value)} items for {least} tokens")
        return value

    def ids(self, count: int) -> dict[str, int]:
        """Ids that the file names, below `count`; llama.cpp passes over others, too."""
        found = {
            name: self._metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _IDS.items()
        }
        return {name: n for name, n in found.items() if type(n) is int and 0 <= n < count}


def _named(model: str, stated: Mapping[str, int], types: list[int]) -> dict[str, int]:
    """BOS, EOS and such, with what stands for those that the file does not name."""
    named: dict[str, int] = {}
    if model == "llama":
        named = {name: n for name, n in _SENTENCEPIECE_IDS.items() if n < len(types)}
    elif len(types) > _FALCON_END and types[_FALCON_END] == CONTROL:
        # llama.cpp takes token 11 for both, which is right for Falcon and any word elsewhere.
        named = {"bos": _FALCON_END, "eos": _FALCON_END}
    return named | {name: stated[name] for name in ("bos", "eos", "unk", "pad") if name in stated}


def _types(
    types: list[int], ids: Mapping[str, int], stated: Mapping[str, int], ends: frozenset[int]
) -> list[int]:
    types = list(types)
    marks = [text for key, texts in _FILL_IN.items() if key not in stated for text in texts]
    for text in (*END_TEXTS, *marks):
        if text in ids:
            types[ids[text]] = CONTROL
    for text in _CHANNEL_MARKS:
        if text in ids:
            types[ids[text]] = USER_DEFINED
    if "<|end|>" in ids and ids["<|end|>"] not in ends:
        types[ids["<|end|>"]] = USER_DEFINED
    if "</s>" in ids and ids["</s>"] not in ends:
        types[ids["</s>"]] = NORMAL
    return types


def _merges(keys: _Keys, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges: dict[tuple[str, str], None] = {}  # of equal ones the first counts
    for line in keys.array("merges", str):
        at = line.find(" ", 1)
        left, right = line[:at], line[at + 1 :]
        if at < 0 or left not in ids or right not in ids or left + right not in ids:
            raise keys.wrong(
                f"the merge {_brief.repr(line)} is not of two tokens that make a third"
            )
        merges[left, right] = None
    return list(merges)

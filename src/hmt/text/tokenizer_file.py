"""tokenizer.json as strangers write it: what it may hold, and who encodes with it.

Format: https://huggingface.co/docs/tokenizers.  Its parts are small programs: a chain of
replacements multiplies a text, and a regular expression may backtrack for ever.  Of parts that
published families use, the cost is known, and HMT's own process runs them.  With any other part a
child process encodes, which the kernel holds to limits.
"""

import json
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from hmt.base.errors import CheckpointError, MissingFileError, RequestError
from hmt.sandbox import Ended, Limits, Lost, Refused, Sandbox, Worker
from hmt.text.conversion import converted
from hmt.text.patterns import is_known
from hmt.text.small_file import MAX_BYTES, parse_object, read_bytes

LONGEST_TOKEN: Final = 4096  # characters; published ones have up to 512
_LONGEST_PART: Final = 16  # characters that a part puts in, such as "▁"
_MOST_STEPS: Final = 8  # in a chain; a published one has up to 6
_PREPARE: Final = Limits(memory_bytes=4 << 30, cpu_s=60.0)
_ENCODING: Final = Limits(memory_bytes=256 << 20, cpu_s=5.0)

# Parts whose time is in proportion to a text, and how many times as long they make it.
_FACTORS: Final[Mapping[Any, float]] = dict.fromkeys((
    "NFC", "Nmt", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "Digits", "Punctuation",
    "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts", "CharDelimiterSplit",
    "Metaspace", "RobertaProcessing", "BertProcessing",
), 1.0) | {"NFD": 4.0, "NFKC": 18.0, "NFKD": 18.0, "ByteLevel": 2.0}  # fmt: skip
_MOST_GROWTH: Final = 80.0  # two ByteLevel and one NFKC
_CHAINS: Final = ("normalizers", "pretokenizers", "processors")
_ENCODES: Final = ("normalizer", "pre_tokenizer", "post_processor")


class TokenizerFile:
    """A tokenizer.json that has been read.

    backend    the tokenizer; without `unknown` parts it encodes, with some it only decodes
    unknown    parts whose cost is not known, by their types
    """

    def __init__(self, file: Path) -> None:
        """Reads `file`, or what is converted of an older one beside it.

        Raises MissingFileError, and CheckpointError where the file cannot be understood.
        """
        data = read_bytes(file, MAX_BYTES)
        if data is None:
            older = converted(file.parent)
            if older is None:
                raise MissingFileError(
                    f"{file} is missing, and so are tokenizer.model, tekken.json and tiktoken's "
                    "files: download it, or make it from the checkpoint's own tokenizer files with "
                    "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
                )
            file, data = older
        content = parse_object(file, data)
        try:
            _check(content)
            self.unknown = sorted(set(_unknown_parts(content)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _unreadable(file, error) from error
        self._parts = {name: content.get(name) for name in _ENCODES}
        if self.unknown:
            data = json.dumps(content | dict.fromkeys(_ENCODES)).encode()
        del content
        try:
            self.backend = tokenizers.Tokenizer.from_buffer(data)
        except BaseException as error:
            if isinstance(error, Exception) or is_panic(error):  # nothing more special is raised
                raise _unreadable(file, error) from error
            raise

    def whole(self, backend: tokenizers.Tokenizer) -> str:
        """tokenizer.json of `backend`, as it has become, with all parts of the file."""
        if not self.unknown:
            return str(backend.to_str())
        content = json.loads(backend.to_str())
        for name, part in self._parts.items():
            if content[name] is None:
                content[name] = part
        return json.dumps(content)


class ConfinedEncoder:
    """Encodes in a child process.  Safe for use by several threads."""

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        self._worker: Worker | None = None
        self._forking = threading.Lock()  # two workers at once would leave one unused
        self._sandbox = Sandbox(
            "hmt.sandbox.tokenizer_encoding:Encoders",
            {},
            lambda: tokenizer_json().encode(),
            prepare=_PREPARE,
            worker=_ENCODING,
        )
        weakref.finalize(self, self._sandbox.close)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids.  Raises RequestError where that passes a limit, CheckpointError."""
        try:
            with self._forking:
                worker = self._worker
                if worker is None or worker.ended:
                    worker = self._worker = self._sandbox.fork()
        except (Refused, Ended, Lost) as error:
            raise CheckpointError(
                f"tokenizer.json cannot be used ({error or 'it was closed'}): download it again"
            ) from error
        try:
            reply = worker.call({"special": add_special_tokens}, text.encode())
        except (Refused, Ended, Lost) as error:
            raise RequestError(
                f"the checkpoint's tokenizer cannot encode this text of {len(text)} characters: "
                f"{error or 'another text has ended its process'}"
            ) from error
        return array("I", reply.blob).tolist()


def is_panic(error: BaseException) -> bool:
    """Whether Rust code has given up, which pyo3 raises as a BaseException of no public type."""
    return type(error).__name__ == "PanicException"


def _unreadable(file: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read by tokenizers {tokenizers.__version__} ({error}): download it "
        "again, or upgrade that package"
    )


def _check(content: Mapping[str, Any]) -> None:
    """Raise ValueError for what makes answers longer than the tokens that were generated."""
    model = content.get("model") or {}
    vocabulary = model.get("vocab") or {}
    pieces = vocabulary if isinstance(vocabulary, dict) else (piece for piece, _ in vocabulary)
    added = (token["content"] for token in content.get("added_tokens") or ())
    for tokens in (pieces, added):
        longest = max(map(len, tokens), default=0)
        if longest > LONGEST_TOKEN:
            raise ValueError(f"a token has {longest} characters, more than {LONGEST_TOKEN}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(name) or "") > _LONGEST_PART:
            raise ValueError(f"{name} has {len(model[name])} characters, not {_LONGEST_PART}")
    decoders = _steps(content.get("decoder"), "decoders")
    if len(decoders) > _MOST_STEPS:
        raise ValueError(f"it joins tokens in {len(decoders)} steps, more than {_MOST_STEPS}")
    for step in decoders:
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else "x"
        put = len(step.get("content") or "")
        if not text or put > _LONGEST_PART or step.get("start", 0) > LONGEST_TOKEN:
            raise ValueError(f"it joins tokens with a {step.get('type')} that makes them too long")


def _unknown_parts(content: Mapping[str, Any]) -> Iterator[str]:
    """Types of parts whose cost is not known."""
    factor, count = 1.0, 0
    for name, chain in zip(_ENCODES, _CHAINS, strict=True):
        for step in _steps(content.get(name), chain):
            grows = _factor(step)
            factor, count = factor * max(grows, 1.0), count + 1
            if not grows:
                yield str(step.get("type"))
    if factor > _MOST_GROWTH:
        yield f"a chain that makes texts {factor:.0f} times as long"
    if count > len(_ENCODES) * _MOST_STEPS:
        yield f"a chain of {count} steps"


def _steps(part: Any, chain: str) -> list[dict[str, Any]]:
    """The parts that are applied one after the other, in nested sequences or not."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for inner in part[chain] for step in _steps(inner, chain)]


def _factor(step: Mapping[str, Any]) -> float:
    """How many times as long a text may become; 0 where time or length are not known."""
    kind = step.get("type")
    if kind == "Split":
        return float(is_known(step["pattern"]))
    if kind == "Replace":
        content, replaced = step["content"], len(step["pattern"].get("String", "x"))
        bounded = len(content) <= _LONGEST_PART and is_known(step["pattern"])
        return max(1.0, len(content) / replaced) if bounded else 0.0
    if kind == "Prepend":
        return float(len(step["prepend"]) <= _LONGEST_PART)
    if kind == "TemplateProcessing":
        texts = sum("Sequence" in piece for piece in step["single"])
        return float(texts) if len(step["single"]) <= _LONGEST_PART else 0.0
    return _FACTORS.get(kind, 0.0)

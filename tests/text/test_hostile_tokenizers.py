"""Tokenizer files that multiply texts, never end, or are no files: errors in bounded memory.

Oracles: the kernel, which holds a process to its limit, and tokenizers itself where a file is good.
"""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from limited_program import run_limited

from hmt.base.errors import CheckpointError, RequestError
from hmt.cli.options import embedded_model
from hmt.text import Tokenizer
from hmt.text.patterns import _KNOWN, is_known

MINI = embedded_model()
PLAIN: dict[str, Any] = json.loads((MINI / "tokenizer.json").read_text())


def sequence(*steps: dict[str, Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def split(pattern: str) -> dict[str, Any]:
    regex = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    return sequence(regex, PLAIN["pre_tokenizer"]["pretokenizers"][-1], name="pretokenizers")


BYTE_LEVEL = PLAIN["pre_tokenizer"]["pretokenizers"][-1] | {"use_regex": False}
MANY_TEXTS = PLAIN["post_processor"] | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 10**5}
# What tokenizer.json says, and a text; each takes gigabytes or minutes.
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "doubling": ({"normalizer": sequence(*[replace("a", "aa")] * 30)}, "a"),
    "one large": ({"normalizer": replace("a", "b" * 10**7)}, "a" * 1000),
    "trigger": ({"normalizer": sequence(replace("xyzzy", "q" * 10**6), replace("q", "z" * 10**4))},
                "xyzzy"),
    "prepends": ({"normalizer": sequence(*[{"type": "Prepend", "prepend": "p" * 10**5}] * 90)},
                 "a"),
    "byte levels": ({"pre_tokenizer": sequence(*[BYTE_LEVEL] * 40, name="pretokenizers")}, "é" * 9),
    "texts": ({"post_processor": MANY_TEXTS}, "a" * 10_000),
    "backtracks": ({"pre_tokenizer": split("a*a*b|a")}, "a" * 20_000),
    "panics": ({"pre_tokenizer": split("(a+)+$")}, "a" * 40 + "b"),
    "at load": ({"normalizer": sequence(*[replace("a", "aa")] * 40), "added_tokens": [
        PLAIN["added_tokens"][0] | {"id": 4096, "content": "a", "normalized": True,
                                    "special": False}]}, "b"),
}  # fmt: skip
PROGRAM = """
from hmt.sandbox import Limits
from hmt.text import tokenizer_file
tokenizer_file._ENCODING = Limits(tokenizer_file._ENCODING.memory_bytes, 0.5)  # 5 s otherwise
tokenizer_file._PREPARE = Limits(1 << 30, 2)
def work(case):
    folder, text = Path(case[0]), case[1]
    return len(Tokenizer.open(folder).encode(text))
"""


def folder_of(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in MINI.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    (folder / "tokenizer.json").write_text(json.dumps(PLAIN | changes))
    return folder


def test_hostile_tokenizers_are_errors_in_bounded_memory(tmp_path: Path) -> None:
    cases = [
        (str(folder_of(tmp_path / name.replace(" ", "-"), **changes)), text)
        for name, (changes, text) in HOSTILE.items()
    ]
    results = run_limited(PROGRAM, [*cases, (str(MINI), "hello")])
    assert [kind for kind, _ in results[:-1]] == [
        "CheckpointError" if name == "at load" else "RequestError" for name in HOSTILE
    ], results
    assert results[-1][0] == "answer"


@pytest.mark.parametrize(
    "changes",
    [
        {"decoder": sequence(replace("a", "b" * 10**6), name="decoders")},
        {"decoder": sequence(*[replace("a", "aa")] * 40, name="decoders")},
        {"decoder": replace("", "aa")},
        {"model": PLAIN["model"] | {"continuing_subword_prefix": "#" * 10**6}},
        {"added_tokens": [PLAIN["added_tokens"][0] | {"content": "x" * 10**6}]},
        {"normalizer": {"type": "Sequence"}},
        {"normalizer": 3},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_what_makes_answers_long_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        Tokenizer.open(folder_of(tmp_path, **changes)).encode("a")


def test_unknown_parts_encode_as_tokenizers_does(tmp_path: Path) -> None:
    unknown = {
        "pre_tokenizer": split(r"\w+(?=\s)|(?:[a-z]|[0-9])+?"),
        "normalizer": sequence({"type": "Replace", "pattern": {"Regex": "(o|0)+"}, "content": "o"}),
        "post_processor": PLAIN["post_processor"]
        | {"single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
                      {"Sequence": {"id": "A", "type_id": 0}}],
           "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0],
                                            "tokens": ["<|begin|>"]}}},
    }  # fmt: skip
    folder = folder_of(tmp_path, **unknown)
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours, rng = Tokenizer.open(folder), random.Random(5)
    assert ours._confined is not None
    for _ in range(50):
        text = "".join(rng.choices("abo0 9\n\té世<|end|>", k=rng.randrange(60)))
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids and ids[0] == 0
        assert ours.decode(ids) == theirs.decode(ids)
    messages = [{"role": "user", "content": "good 0oo"}]
    assert ours.decode(ours.chat_prompt(messages)).endswith("god o")


@pytest.mark.parametrize("kind", ["endless", "pipe", "folder", "large"])
@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "config.json"]
)
def test_only_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    file = folder_of(tmp_path) / name
    file.unlink(missing_ok=True)
    if kind == "endless":
        file.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        with file.open("wb") as sparse:
            sparse.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"regular file|is read of such a file"):
        Tokenizer.open(tmp_path)


def test_a_link_to_a_file_is_a_file(tmp_path: Path) -> None:
    file = folder_of(tmp_path / "model") / "chat_template.jinja"
    target = tmp_path / "blob"
    target.write_bytes(b"{{ messages[0].content }}\r\n!")
    file.unlink(missing_ok=True)
    file.symlink_to(target)
    ours = Tokenizer.open(tmp_path / "model")
    assert ours.decode(ours.chat_prompt([{"role": "user", "content": "hi"}])) == "hi\n!"


def test_json_that_is_larger_in_memory_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "tokenizer_config.json").write_bytes(b'{"x": [' + b"[]," * 5_000_000 + b"[]]}")
    with pytest.raises(CheckpointError, match="lists and objects"):
        Tokenizer.open(folder)


def test_a_panic_is_the_requests_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hmt.text.tokenizer_file.is_known", lambda pattern: True)
    ours = Tokenizer.open(folder_of(tmp_path, pre_tokenizer=split("(a+)+$")))
    assert ours._confined is None
    with pytest.raises(RequestError, match=r"41 characters: .*retry-limit"):
        ours.encode("a" * 40 + "b")


@pytest.mark.parametrize("text", ["a" * 100_000, " " * 100_000, "1" * 100_000, " \n" * 50_000,
                                  "'" * 100_000, "\u0301" * 100_000, "aB" * 50_000])  # fmt: skip
def test_known_patterns_take_time_in_proportion(text: str) -> None:
    for pattern in (*_KNOWN, r"\s?\p{L}+", r"\p{N}{1,3}", " {2,}", r"[^\s\p{L}]+"):
        assert is_known({"Regex": pattern}), pattern
        rule = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        assert rule.pre_tokenize_str(text)  # quadratic, it would take minutes


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "a*a*b|a",
        "a+b",
        r"\s+$",
        "(?:a|b)+",
        ".*",
        "a{1,1000}",
        r"(a)\1",
        "",
        "[a",
        "a++b",
    ],
)
def test_other_patterns_are_not_known(pattern: str) -> None:
    assert not is_known({"Regex": pattern})
    assert is_known({"String": "a"}) and not is_known({"String": ""})

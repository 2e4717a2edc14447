"""Checkpoints without tokenizer.json: ids are those of the library that wrote the tokenizer."""

import base64
import io
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hmt.base.errors import CheckpointError, MissingFileError
from hmt.text import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")
pytest.importorskip("google.protobuf")

WORDS = [
    "the",
    "cache",
    "of",
    "a",
    "page",
    "has",
    "many",
    "tokens",
    "and",
    "each",
    "token",
    "is",
    "read",
    "once",
    "from",
    "the",
    "disk",
]
TEXTS = (
    "the cache of tokens", "two  spaces\n\nlines", "Zürich, 北京 and 東京: 12345 times!",
    "x = {'a': [1, 2]}  # what", "don't",
)  # fmt: skip
PARTS = (
    r"[\p{Han}]+", r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+", r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
)  # fmt: skip
PATTERN = "|".join(PARTS)
CODE = '''
"""A tokenizer."""
import os
os.abort()  # nobody runs this

class TikTokenTokenizer:
    num_reserved_special_tokens = 12
    pat_str = "|".join([r"""[\\p{Han}]+""", r"""[^\\r\\n\\p{L}\\p{N}]?[\\p{L}&&[^\\p{Han}]]+""",
        r"""\\p{N}{1,3}""", r""" ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*""", r"""\\s*[\\r\\n]+""",
        r"""\\s+(?!\\S)""", r"""\\s+"""])
'''


def ranks() -> dict[bytes, int]:
    """Byte pairs that were merged in words, as BPE merges them."""
    found = {bytes([i]): i for i in range(256)}
    rng = random.Random(5)
    words = [list(f" {rng.choice(WORDS)}".encode()) for _ in range(200)]
    pieces = [[bytes([b]) for b in word] for word in words]
    for _ in range(60):
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in pieces:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        found[b"".join(best)] = len(found)
        pieces = [_merged(word, best) for word in pieces]
    return found


def _merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    for piece in word:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return out


def lines(found: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(t) + b" %d\n" % rank for t, rank in found.items())


def config(folder: Path, **fields: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_sentencepiece(tmp_path: Path) -> None:
    model = io.BytesIO()
    rng = random.Random(3)
    sentences = [" ".join(rng.choices(WORDS, k=9)) for _ in range(400)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=330, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    config(tmp_path, tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>",
           unk_token="<unk>", add_bos_token=True, legacy=False)  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ours = Tokenizer.open(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == [1, *theirs.encode(text)]
        assert ours.decode(theirs.encode(text)) == text


def test_tiktoken_with_the_pattern_of_code_that_is_not_run(tmp_path: Path) -> None:
    found = ranks()
    (tmp_path / "tiktoken.model").write_bytes(lines(found))
    (tmp_path / "tokenization_kimi.py").write_text(CODE)
    named = {len(found): "[BOS]", len(found) + 1: "[EOS]", len(found) + 4: "<|im_end|>"}
    added = {str(i): {"content": text, "special": True} for i, text in named.items()}
    config(tmp_path, added_tokens_decoder=added, bos_token="[BOS]", eos_token="[EOS]")
    special = {
        named.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(found), len(found) + 12)
    }
    theirs = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=found, special_tokens=special)
    ours = Tokenizer.open(tmp_path)
    assert ours.vocab_size == theirs.n_vocab
    for text in (*TEXTS, "北京the cache", "a<|im_end|>b"):
        wanted = theirs.encode(text, allowed_special="all")
        assert ours.encode(text) == wanted
        assert ours.decode(wanted) == text.replace("<|im_end|>", "")


def test_tiktoken_lines_in_a_tokenizer_model(tmp_path: Path) -> None:
    """As Llama 3 was published, with its pattern."""
    found = ranks()
    (tmp_path / "tokenizer.model").write_bytes(lines(found))
    llama = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    theirs = tiktoken.Encoding("x", pat_str=llama, mergeable_ranks=found, special_tokens={})
    ours = Tokenizer.open(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


def test_tekken(tmp_path: Path) -> None:
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    found = ranks()
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
        for t, rank in found.items()
    ]
    special = [
        {"rank": i, "token_str": text, "is_control": True}
        for i, text in enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    ]
    head = {
        "pattern": PATTERN.replace(r"&&[^\p{Han}]", ""), "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) + 10, "default_num_special_tokens": 10, "version": "v11",
    }  # fmt: skip
    content = {"config": head, "vocab": vocab, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    theirs = tekken.Tekkenizer.from_file(tmp_path / "tekken.json")
    ours = Tokenizer.open(tmp_path)
    for text in TEXTS:
        wanted = theirs.encode(text, bos=False, eos=False)
        assert ours.encode(text)[-len(wanted) :] == wanted
        assert ours.decode(wanted) == text


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.model", b"\x0a\xff\xff\xff\xff\x07"),
        ("tekken.json", b'{"config": 3}'),
        ("tiktoken.model", b"AAAA 1\nBB"),
        ("tiktoken.model", b""),
    ],
)
def test_broken_files_are_named(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.open(tmp_path)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(lines(ranks()))
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "tiktoken.py").write_text("raise ImportError('none')")
    monkeypatch.syspath_prepend(str(blocked))
    with pytest.raises(CheckpointError, match="pip install tiktoken"):
        Tokenizer.open(tmp_path)


def test_nothing_to_convert(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"tokenizer\.model"):
        Tokenizer.open(tmp_path)

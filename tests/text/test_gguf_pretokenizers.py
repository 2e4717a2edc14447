"""Ids are llama.cpp's, by every name of a pre-tokenizer that it knows; so are the end tokens.

gguf_golden.json.gz holds what llama.cpp answered (gguf_vocabularies.py asked it); where
llama-cpp-python is installed it is asked again, with other texts.
"""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gguf_vocabularies import (
    AT,
    END_CASES,
    GOLDEN,
    SPACED,
    LlamaCpp,
    byte_pairs,
    sentencepiece,
    texts,
)

from hmt.text.pretokenizers import PRE_TOKENIZERS
from hmt.text.tokenizer import Tokenizer

ANSWERS = json.loads(gzip.decompress(GOLDEN.read_bytes()))
FILE = Path("vocabulary.gguf")
with_llama_cpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="needs llama-cpp-python (the extra `peers`)"
)


def metadata_of(name: str) -> dict[str, Any]:
    if name == "SentencePiece":
        return sentencepiece(ANSWERS["merges"]["True"])
    return byte_pairs(name, ANSWERS["merges"][str(name in SPACED)])


def one_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """llama.cpp puts BOS before a text that begins with it; HMT does not."""
    bos = tokenizer.encode("")
    return ids[1:] if bos and ids[:2] == 2 * bos else ids


def test_every_name_is_compared() -> None:
    assert set(ANSWERS["names"]) == {*PRE_TOKENIZERS, "SentencePiece"}
    assert len(ANSWERS["rows"]) == 400


@pytest.mark.parametrize("name", ANSWERS["names"])
def test_ids_are_what_llama_cpp_answered(name: str) -> None:
    tokenizer = Tokenizer.of_gguf(FILE, metadata_of(name))
    column = ANSWERS["names"].index(name)
    for text, distinct, places in ANSWERS["rows"]:
        assert tokenizer.encode(text) == one_bos(distinct[places[column]], tokenizer), repr(text)


def test_names_differ_in_the_texts() -> None:
    """Or the comparison would show nothing; qwen2's and bailingmoe's rules are the same at last."""
    by_name = {
        name: tuple(row[2][column] for row in ANSWERS["rows"])
        for column, name in enumerate(ANSWERS["names"])
    }
    rules = set(PRE_TOKENIZERS.values())
    assert len(set(by_name.values())) >= len(rules) - 1


@with_llama_cpp
@pytest.mark.parametrize("name", ANSWERS["names"])
def test_ids_and_texts_are_llama_cpps(name: str) -> None:
    metadata = metadata_of(name)
    ours, theirs = Tokenizer.of_gguf(FILE, metadata), LlamaCpp(metadata)
    for text in texts(60, seed=sum(name.encode())):
        ids = ours.encode(text)
        assert ids == one_bos(theirs.encode(text), ours), repr(text)
        written = theirs.decode(ids).decode(errors="replace")
        assert ours.decode(ids) == written.removeprefix(" " * (name == "SentencePiece"))
    assert ours.eos_ids == theirs.ends()


@pytest.mark.parametrize("case", END_CASES)
def test_end_tokens_are_what_llama_cpp_answered(case: str) -> None:
    more, ids = END_CASES[case]
    metadata = byte_pairs("gpt-2", [("a", "b")], more, **ids)
    ends = Tokenizer.of_gguf(FILE, metadata).eos_ids
    assert sorted(metadata[f"{AT}tokens"][n] for n in ends) == ANSWERS["ends"][case]


@pytest.mark.each_once
@pytest.mark.parametrize("name", ("afmoe", "deepseek-llm", "default", "tekken"))
@pytest.mark.parametrize("unit", "1 a\n")
@pytest.mark.timeout(20)
def test_long_runs_take_time_with_their_length(name: str, unit: str) -> None:
    """200,000 characters take 0.2 s; with the square of the length it would be an hour."""
    tokenizer = Tokenizer.of_gguf(FILE, metadata_of(name))
    run = unit * 200_000
    assert tokenizer.decode(tokenizer.encode(run + "!")) == run + "!"

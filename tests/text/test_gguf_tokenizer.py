# ruff: noqa: RUF001  (the characters are meant)
"""What a GGUF file says of its tokens holds, however they are spelled; nonsense is refused."""

import random
from pathlib import Path
from typing import Any

import pytest
from gguf_vocabularies import AT, CONTROL, LlamaCpp, byte_pairs, sentencepiece, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gguf_pretokenizers import ANSWERS, with_llama_cpp

from hmt.base.errors import CheckpointError, HMTError, MissingFileError
from hmt.text.gguf_vocabulary import read_vocabulary
from hmt.text.pretokenizers import PRE_TOKENIZERS
from hmt.text.tokenizer import Tokenizer

FILE = Path("vocabulary.gguf")
MERGES = ANSWERS["merges"]
USER = {"role": "user", "content": "hi"}
TURN = "<｜User｜>{{ messages[0].content }}<｜Assistant｜>"


def opened(metadata: dict[str, Any], **others: Any) -> Tokenizer:
    return Tokenizer.of_gguf(FILE, metadata | {AT + key: value for key, value in others.items()})


def with_template(template: str, adds_bos: bool) -> Tokenizer:
    metadata = byte_pairs("deepseek-v3", MERGES["False"]) | {"tokenizer.chat_template": template}
    return opened(metadata, add_bos_token=adds_bos)


def test_tokens_with_characters_outside_the_byte_alphabet() -> None:
    """Each is one token, wherever it stands; control tokens write nothing, others their text."""
    metadata = byte_pairs("deepseek-v3", MERGES["False"])
    tokenizer, tokens = opened(metadata, add_bos_token=True), metadata[f"{AT}tokens"]
    parts = ["<｜User｜>", "世界は", "   \n", "<é>", "▁<go>", "<think>", "<｜end▁of▁sentence｜>"]
    expected = [tokens.index("<|begin|>"), *map(tokens.index, parts)]
    assert tokenizer.encode("".join(parts)) == expected
    assert tokenizer.encode("a".join(parts))[1::2] == expected[1:]
    assert tokenizer.decode(expected) == "世界は   \n<é><think>"
    assert tokenizer.token_bytes(tokens.index("<é>")) == "<é>".encode()
    assert tokenizer.eos_ids == {tokens.index("<｜end▁of▁sentence｜>")}


@pytest.mark.parametrize("kind", ["deepseek-v3", "gemma4", "SentencePiece"])
def test_streamed_text_is_the_text_of_all_tokens(kind: str) -> None:
    spaced = MERGES["True"]
    metadata = sentencepiece(spaced) if kind == "SentencePiece" else byte_pairs(
        kind, MERGES[str(kind == "gemma4")]
    )  # fmt: skip
    tokenizer = opened(metadata)
    for text in texts(50, seed=5):
        ids = tokenizer.encode(text)
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "adds_bos", "begins"),
    [
        ("{{ bos_token }}" + TURN, True, True),
        (TURN, True, True),
        ("{{ bos_token }}" + TURN, False, True),
        (TURN, False, False),
    ],
)
def test_a_chat_begins_with_one_bos_where_the_file_or_the_template_wants_it(
    template: str, adds_bos: bool, begins: bool
) -> None:
    """As llama.cpp's server has it: common/chat.cpp takes the template's BOS, and adds one."""
    tokenizer = with_template(template, adds_bos)
    ids = tokenizer.chat_prompt([USER])
    [bos] = with_template(template, adds_bos=False).encode("<|begin|>")
    [user] = with_template(template, adds_bos=False).encode("<｜User｜>")
    assert ids[:2] == ([bos, user] if begins else [user, ids[1]])
    assert ids.count(bos) == begins


def test_sentencepiece_without_ids_has_llamas() -> None:
    tokenizer = opened(sentencepiece(MERGES["True"]))
    assert tokenizer.encode("")[0] == 1
    assert 2 in tokenizer.eos_ids
    assert tokenizer.encode("a</s>")[-1] == 2


def test_equal_scores_merge_what_was_learned_first() -> None:
    """Converters without SentencePiece's model write -1000 for all; ids keep the order."""
    metadata = sentencepiece(MERGES["True"])
    alike = opened(metadata, scores=[-1000.0] * len(metadata[f"{AT}tokens"]))
    known = opened(metadata)
    for text in texts(100, seed=6):
        assert alike.encode(text) == known.encode(text)


def phi3_metadata(name: str) -> dict[str, Any]:
    metadata = sentencepiece(MERGES["True"]) | {"general.name": name}
    marks = ["<|user|>", "<|end|>", "<|endoftext|>"]
    metadata[f"{AT}tokens"] += marks
    metadata[f"{AT}token_type"] += [CONTROL] * len(marks)
    metadata[f"{AT}scores"] += [0.0] * len(marks)
    return metadata


def test_spaces_behind_phi3s_marks_belong_to_them() -> None:
    """As llama.cpp decides it by the model's name, and transformers by tokenizer.json."""
    plain, phi3 = (opened(phi3_metadata(name)) for name in ("Qwen", "Phi-3 Mini"))
    text = "<|user|>\n hello <|end|> \n<s> x"
    assert phi3.encode(text) == plain.encode("<|user|>hello <|end|><s> x")
    assert phi3.encode(text) != plain.encode(text)


@with_llama_cpp
@pytest.mark.parametrize("name", ["Phi-3 Mini", "phi3", "Phi 4", "Qwen"])
def test_spaces_behind_marks_are_llama_cpps(name: str) -> None:
    ours, theirs = opened(phi3_metadata(name)), LlamaCpp(phi3_metadata(name))
    for text in texts(40, seed=7):
        spaced = text.replace(">", "> \n ").replace("<", " <s> <|user|> <")
        assert ours.encode(spaced) == theirs.encode(spaced)


def test_a_file_that_names_no_pre_tokenizer_gets_llama_cpps_default() -> None:
    metadata = byte_pairs("default", MERGES["False"])
    named = opened(metadata)
    del metadata[f"{AT}pre"]
    unnamed = opened(metadata)
    for text in texts(50, seed=8):
        assert unnamed.encode(text) == named.encode(text)


@pytest.mark.parametrize("name", ["gpt-5", " qwen2", "whitespace", 7, None, ["qwen2"]])
def test_an_unknown_pre_tokenizer_is_refused_with_those_that_are_known(name: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre") as caught:
        opened(byte_pairs("qwen2", MERGES["False"]), pre=name)
    assert all(known in str(caught.value) for known in PRE_TOKENIZERS)


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "whitespace", "hybriddna", 3])
def test_other_kinds_of_tokenizers_are_refused(kind: Any) -> None:
    with pytest.raises(CheckpointError, match=r"of kind .*gpt2 \(byte pairs\).*llama"):
        opened(byte_pairs("qwen2", MERGES["False"]), model=kind)


@pytest.mark.parametrize("changed", [{"model": "none"}, {"tokens": []}])
def test_a_file_without_a_vocabulary_says_so(changed: dict[str, Any]) -> None:
    with pytest.raises(MissingFileError, match="has no tokenizer"):
        opened(byte_pairs("qwen2", MERGES["False"]), **changed)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"token_type": [1, 1]}, "2 items for"),
        ({"token_type": ["1"] * 5000}, "token_type is no array of int"),
        ({"token_type": 3}, "token_type is no array of int"),
        ({"scores": [0.0]}, "scores has 1 items"),
        ({"scores": [float("nan")] * 5000}, "scores that are no numbers"),
        ({"tokens": [1, 2]}, "tokens is no array of str"),
        ({"tokens": ["a", "b", "a"]}, "token 0, 'a', is token 2, too"),
        ({"merges": ["a zz\u0142"]}, "is not of two tokens that make a third"),
        ({"merges": ["ab"]}, "is not of two tokens that make a third"),
        ({"merges": [""]}, "is not of two tokens that make a third"),
        ({"merges": {}}, "merges is no array of str"),
        ({"merges": []}, "no tokenizer.ggml.merges"),
        ({"model": "llama", "tokens": ["a" * 600]}, "pieces of 600 characters"),
        (
            {"tokens": ["a" * (5 << 20), "a", "aa"], "token_type": [3, 1, 1], "merges": ["a a"]},
            "have 5242880 characters",
        ),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(
    changed: dict[str, Any], reason: str
) -> None:
    metadata = byte_pairs("qwen2", MERGES["False"])
    if "tokens" in changed and "token_type" not in changed:
        del metadata[f"{AT}token_type"]
    with pytest.raises(CheckpointError, match=reason):
        opened(metadata, **changed)


@pytest.mark.parametrize("key", ["bos", "eos", "eot", "padding", "unknown", "fim_pad"])
@pytest.mark.parametrize("wild", [-1, 1 << 31, "1", None, [1], 2.0, True])
def test_ids_that_are_none_count_for_nothing(key: str, wild: Any) -> None:
    """As in llama.cpp, which says so and goes on."""
    metadata = byte_pairs("qwen2", MERGES["False"])
    del metadata[f"{AT}{key}_token_id" if key in ("bos", "eos") else f"{AT}pre"]
    assert opened(metadata, **{f"{key}_token_id": wild}).encode("a") == opened(metadata).encode("a")


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_nonsense_is_read_or_refused(rng: random.Random) -> None:
    """Any value in place of any, and lists that are cut, repeated and shuffled."""
    spaced = rng.random() < 0.5
    metadata = sentencepiece(_FEW) if spaced else byte_pairs("llama-bpe", _FEW)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(list(metadata))
        metadata[key] = _changed(metadata[key], rng)
    try:
        tokenizer = Tokenizer.of_gguf(FILE, metadata)
    except HMTError:
        return
    ids = tokenizer.encode("Hello <s> 世界\n")
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in [*ids, *tokenizer.eos_ids])
    tokenizer.decode(ids)


_FEW = [("a", "b"), ("ab", "c"), ("l", "l"), ("H", "e")]
_WILD = ("", "a", "\0", "\ufffd", 0, -1, 1 << 63, 1e308, float("nan"), True, None, [], {}, ["a"])


def _changed(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, list) or not value or rng.random() < 0.2:
        return rng.choice(_WILD)
    value, at = list(value), rng.randrange(len(value))
    match rng.randrange(5):
        case 0:
            return value[:at]
        case 1:
            return value + value[at:]
        case 2:
            rng.shuffle(value)
            return value
        case 3:
            value[at] = rng.choice(_WILD)
            return value
        case _:
            value[at] = rng.choice(value)
            return value


def test_falcons_end_is_token_11_only_where_that_is_a_control_token() -> None:
    """llama.cpp takes token 11 of every vocabulary that names no end."""
    metadata = byte_pairs("falcon", MERGES["False"])
    for name in ("bos", "eos"):
        del metadata[f"{AT}{name}_token_id"]
    assert 11 not in read_vocabulary(metadata, "file").ends
    metadata[f"{AT}token_type"][11] = CONTROL
    assert 11 in read_vocabulary(metadata, "file").ends

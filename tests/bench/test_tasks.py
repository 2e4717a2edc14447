"""The generator's random sequence is part of what the models were trained and measured with."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from hmt.base.errors import ConfigError
from hmt.bench import BEGIN, Corpus, short_task

MODEL = Path(__file__).parents[2] / "src" / "hmt" / "embedded" / "mini-dense"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
TEXT = (np.arange(50000) % 4088 + 8).astype(np.uint16)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# Digests of what the generator gave when the reference models were trained.
@pytest.mark.parametrize(
    ("seed", "expected"),
    [(0, "9c40da602092e01f"), (123, "039c488128e39c03"), (2024, "a4bc5d8204f2f36f")],
)
def test_short_tasks_are_those_of_the_training(seed, expected):
    rng = random.Random(seed)
    tasks = [list(short_task(rng)) for _ in range(500)]
    assert digest(json.dumps(tasks).encode()) == expected


@pytest.mark.parametrize(
    ("seed", "length", "facts", "questions", "ids", "answers"),
    [
        (123, 512, 8, 8, "bbf698f5ce217f2d", "a6c370e08b43ca02"),
        (123, 2048, 8, 8, "e78ad69433045675", "5ad08857d3d10ccb"),
        (7, 1024, None, None, "01727c362c6a237d", "62daa21ff1c8c4dc"),
        (7, 300, 2, 2, "80bbe02b65f56109", "2c212af45c77cd7e"),
        (8, 4096, 3, None, "45df1ab8fe765a57", "451e6bad745752ad"),
    ],
)
def test_retrieval_is_that_of_the_training(seed, length, facts, questions, ids, answers):
    corpus = Corpus(encode, TEXT, seed)
    for _ in range(3):
        drawn = corpus.retrieval(length, facts, questions)
    assert digest(drawn.ids.tobytes()) == ids
    assert digest(json.dumps(drawn.answers).encode()) == answers


def test_the_first_tasks_of_the_protocol_read_as_they_should():
    rng = random.Random(123)
    assert short_task(rng) == (
        "<|user|>What is 34 - 11?<|end|><|assistant|>",
        "23<|end|>",
    )
    assert short_task(rng) == (
        "<|user|>Clara took the white shoe to the kitchen. Yusuf took the orange kite to the "
        "attic. Ines took the white star to the attic. What did Ines take?<|end|><|assistant|>",
        "Ines took the white star.<|end|>",
    )


@pytest.mark.parametrize("length", [400, 1000, 5000])
def test_retrieval_has_the_length_asked_for_and_hides_every_answer(length):
    corpus = Corpus(encode, TEXT, seed=5)
    for _ in range(5):
        drawn = corpus.retrieval(length, 4, 6)
        assert len(drawn.ids) == length
        assert drawn.ids[:2].tolist() == encode(BEGIN + "<|user|>")
        hidden = TOKENIZER.decode(drawn.ids[: drawn.first_question].tolist())
        assert len(drawn.answers) == 6
        for at, answer in drawn.answers:
            assert tuple(drawn.ids[at : at + len(answer)]) == answer
            number = TOKENIZER.decode(list(answer))
            assert f"is {number}." in hidden


def test_ids_keep_the_dtype_of_the_text():
    assert Corpus(encode, TEXT.astype(np.int32), 1).retrieval(512).ids.dtype == np.int32


def test_too_short_sequences_and_texts_say_what_is_needed():
    with pytest.raises(ConfigError, match="more than the 100 asked for"):
        Corpus(encode, TEXT, 1).retrieval(100, 8, 8)
    with pytest.raises(ConfigError, match="the text has 1000"):
        Corpus(encode, TEXT[:1000], 1).retrieval(4096, 2, 2)

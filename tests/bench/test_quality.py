"""The protocol, asked of doubles whose answers are known, and of the embedded model."""

import json
import math
from pathlib import Path

import pytest
import torch
from score import load
from tokenizers import Tokenizer

from hmt.base.errors import ConfigError
from hmt.bench import (
    Extent,
    Quality,
    Quiz,
    Score,
    evaluate,
    grade,
    perplexity,
    retrievals,
    short_tasks,
)

ROOT = Path(__file__).parents[2]
MODELS = {
    "mini-dense": ROOT / "src" / "hmt" / "embedded" / "mini-dense",
    "mini-moe": ROOT / "assets" / "mini-moe",
}
TOKENIZER = Tokenizer.from_file(str(MODELS["mini-dense"] / "tokenizer.json"))
TEXT = (ROOT / "assets" / "text" / "valid.txt").read_text(encoding="utf-8")
VOCABULARY = 4096


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


class Oracle:
    """Knows the next token, except where `wrong` says otherwise, with certainty `margin`."""

    def __init__(self, margin=50.0, wrong=lambda tokens, row: False):
        self.margin, self.wrong = margin, wrong

    def logits(self, tokens, rows):
        assert list(rows) == sorted(set(rows))
        logits = torch.zeros(len(rows), VOCABULARY)
        for i, row in enumerate(rows):
            shift = 1 if self.wrong(tokens, row) else 0
            logits[i, (tokens[row + 1] + shift) % VOCABULARY] = self.margin
        return logits


def test_who_knows_everything_gets_full_marks():
    parts = []
    quality = evaluate(
        Oracle(),
        encode,
        TEXT[:20000],
        Extent(tasks=20, retrieval={512: 2, 1024: 1}, windows=1),
        progress=lambda part, score: parts.append((part, score)),
    )
    assert quality.tasks == Score(20, 20)
    assert quality.retrieval == {512: Score(16, 16), 1024: Score(8, 8)}
    assert quality.perplexity == pytest.approx(1.0)
    assert parts[-1] == ("retrieval 1024", Score(8, 8))
    assert [part for part, _ in parts].count("tasks") == 20


def test_one_wrong_token_makes_one_answer_wrong():
    quiz = Quiz([5, 6, 7, 8, 9, 10, 11], answers=((1, (6, 7)), (4, (9, 10, 11))))
    assert grade(Oracle(), quiz) == Score(2, 2)
    for row, right in [(0, 1), (1, 1), (2, 2), (3, 1), (5, 1)]:
        assert grade(Oracle(wrong=lambda t, r, row=row: r == row), quiz) == Score(right, 2)


def test_who_guesses_has_the_vocabulary_as_perplexity():
    ids = encode(TEXT[:20000])
    assert perplexity(Oracle(margin=0.0), ids, 2) == pytest.approx(VOCABULARY, rel=1e-4)


def test_perplexity_is_the_mean_over_all_predictions_of_all_windows():
    ids = encode(TEXT[:20000])
    margin = 5.0
    model = Oracle(margin, wrong=lambda tokens, row: row % 4 == 0)
    normaliser = math.log(math.exp(margin) + VOCABULARY - 1)
    wrong_share = 512 / 2047
    expected = math.exp(normaliser - margin * (1 - wrong_share))
    assert perplexity(model, ids, 2) == pytest.approx(expected, rel=1e-4)


def test_sequences_hold_their_answers():
    ids = torch.tensor(encode(TEXT), dtype=torch.int32).numpy()
    quizzes = [*short_tasks(encode, 5), *retrievals(encode, ids, 600, 2)]
    for tokens, answers in quizzes:
        assert tokens[0] == 0
        for at, answer in answers:
            assert tuple(tokens[at : at + len(answer)]) == answer
            assert answer[-1] == 1
    assert [len(quiz.tokens) for quiz in quizzes[5:]] == [600, 600]
    assert [quiz.tokens[-1] for quiz in quizzes] == [1] * 7


def test_a_smaller_extent_is_a_part_of_the_larger():
    assert [*short_tasks(encode, 8)][:3] == [*short_tasks(encode, 3)]
    ids = torch.tensor(encode(TEXT), dtype=torch.int32).numpy()
    assert [*retrievals(encode, ids, 512, 4)][:2] == [*retrievals(encode, ids, 512, 2)]


def test_parts_can_be_left_out():
    quality = evaluate(Oracle(), encode, TEXT[:9000], Extent(tasks=0, retrieval={}, windows=1))
    assert quality.tasks is None
    assert quality.as_json() == {"heldout_ppl": 1.0, "retrieval": {}}


def test_a_text_that_is_too_short_says_how_much_there_is():
    with pytest.raises(ConfigError, match="windows of 2048 tokens were asked for"):
        evaluate(Oracle(), encode, TEXT[:9000], Extent(tasks=0, retrieval={}, windows=9))
    with pytest.raises(ConfigError, match="the text has"):
        evaluate(Oracle(), encode, TEXT[:9000], Extent(tasks=0, retrieval={8192: 1}, windows=0))


def test_a_tokenizer_without_the_chat_format_is_refused():
    def letters(text: str) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]

    with pytest.raises(ConfigError, match=r"no <\|begin\|>"):
        evaluate(Oracle(), letters, TEXT, Extent(tasks=1, retrieval={}, windows=0))
    without = Extent(tasks=0, retrieval={}, windows=1)
    assert evaluate(Oracle(), letters, TEXT[:9000], without).perplexity == pytest.approx(1.0)


def test_scores_survive_their_file(tmp_path):
    quality = Quality(Score(174, 200), {2048: Score(64, 64), 8192: Score(31, 32)}, 81.82)
    file = tmp_path / "quality.json"
    file.write_text(json.dumps({"measured_with": "a double", **quality.as_json()}))
    assert Quality.read(file) == quality


@pytest.mark.parametrize("content", ["[]", "{", '{"tasks": [1]}', '{"retrieval": {"x": [1, 2]}}'])
def test_a_file_without_scores_is_refused(tmp_path, content):
    file = tmp_path / "quality.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"quality\.json"):
        Quality.read(file)


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_models_scores_are_those_of_transformers(name):
    published = Quality.read(MODELS[name] / "quality.json")
    model = load(MODELS[name])
    measured = evaluate(model, encode, TEXT, Extent(retrieval={2048: 2}, windows=0))
    assert measured.tasks.total == published.tasks.total
    # BF16 sums in another order on another CPU: an answer on the edge may fall the other way.
    assert abs(measured.tasks.right - published.tasks.right) <= 2
    assert measured.retrieval[2048].right >= 15

"""How much a model still knows: tasks with one right answer, retrieval, perplexity.

HMT's protocol.  Every number that HMT calls quality is measured this way, so that two runs differ
only in how the model was stored and computed:

tasks        200 short tasks from `random.Random(123)`.  A sequence is <|begin|>, the prompt, the
             answer.  The seed was picked among fourteen because it gives the counts that were first
             published for both reference models; other unseen seeds give 174 to 184.
retrieval    per length, a fresh Corpus with seed 999 over the held-out text: so many sequences of
             exactly that length, with 8 facts and 8 questions each.
perplexity   the held-out text in consecutive windows of 2048 tokens, without <|begin|>; every
             window by itself; exp of the mean over the 2047 predictions of each.

Answers are teacher-forced: the model reads the right answer, and has answered rightly where every
token of it, <|end|> included, was the model's likeliest.  That is when greedy decoding would have
written exactly this answer, and it costs one prefill per sequence.  Among logits of equal value
the lowest token id counts as the likeliest.

The training data used the seeds 0 to 11; they measure memory of the training data, not skill.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch

from hmt.base.errors import ConfigError
from hmt.bench.tasks import BEGIN, END, Corpus, Encode, Tokens, short_task

TASKS_SEED = 123
RETRIEVAL_SEED = 999
FACTS = QUESTIONS = 8
WINDOW = 2048


class TeacherForced(Protocol):
    """What is measured: anything that gives the logits of a known sequence."""

    def logits(self, tokens: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Logits that follow `tokens[: row + 1]`, for ascending `rows`: f32 [rows, vocab]."""
        ...


class Score(NamedTuple):
    """Right answers, of so many."""

    right: int
    total: int

    def __str__(self) -> str:
        return f"{self.right} of {self.total}"


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.  0 leaves a part out; smaller extents measure the same, less surely.

    tasks       number of short tasks
    retrieval   sequence length -> number of sequences
    windows     windows of text for the perplexity; None: all that the text has
    """

    tasks: int = 200
    retrieval: Mapping[int, int] = field(default_factory=lambda: {2048: 8, 8192: 4})
    windows: int | None = None


@dataclass(frozen=True, slots=True)
class Quality:
    """What was measured.  None, or an empty mapping, stands for a part that was left out.

    tasks        short tasks answered rightly
    retrieval    sequence length -> questions answered rightly
    perplexity   of the held-out text
    images       kind of question about images -> questions answered rightly (image_questions.py)
    """

    tasks: Score | None = None
    retrieval: Mapping[int, Score] = field(default_factory=dict)
    perplexity: float | None = None
    images: Mapping[str, Score] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, depth: float = 1) -> Self:
        """The scores in a quality.json, at `depth`.  Raises ConfigError where it is not one."""
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if depth != 1:
                data = data.get("at_depth", {}).get(str(depth), {})
            return cls(
                tasks=Score(*data["tasks"]) if "tasks" in data else None,
                retrieval={int(n): Score(*score) for n, score in data.get("retrieval", {}).items()},
                perplexity=data.get("heldout_ppl"),
                images={kind: Score(*score) for kind, score in data.get("images", {}).items()},
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{file} does not hold the scores of a model ({error!r})") from error

    def as_json(self) -> dict[str, Any]:
        """The content of a quality.json, without the parts that were left out."""
        data: dict[str, Any] = {}
        if self.perplexity is not None:
            data["heldout_ppl"] = round(self.perplexity, 2)
        data["retrieval"] = {str(n): list(score) for n, score in self.retrieval.items()}
        if self.tasks is not None:
            data["tasks"] = list(self.tasks)
        if self.images:
            data["images"] = {kind: list(score) for kind, score in self.images.items()}
        return data


def evaluate(
    model: TeacherForced,
    encode: Encode,
    text: str,
    extent: Extent | None = None,
    progress: Callable[[str, Score], None] = lambda part, so_far: None,
) -> Quality:
    """Measure `model` by the protocol above, on held-out `text`.

    `encode` turns text into ids, adding none.  `progress(part, score so far)` is called after
    every sequence.  Raises ConfigError for a tokenizer without the chat format of the tasks, or a
    text that is too short for the extent; and whatever the model raises.
    """
    extent = Extent() if extent is None else extent
    quizzes = bool(extent.tasks or extent.retrieval)
    if quizzes:
        _check_chat_format(encode)
    ids = np.array(encode(text), np.int32)
    tasks = _tally(model, short_tasks(encode, extent.tasks), "tasks", progress)
    retrieval = {
        length: _tally(
            model, retrievals(encode, ids, length, count), f"retrieval {length}", progress
        )
        for length, count in extent.retrieval.items()
    }
    windows = len(ids) // WINDOW if extent.windows is None else extent.windows
    return Quality(
        tasks=tasks if extent.tasks else None,
        retrieval=retrieval,
        perplexity=perplexity(model, ids.tolist(), windows) if windows else None,
    )


class Quiz(NamedTuple):
    """A sequence with right answers in it: (index of its first token, its tokens) each."""

    tokens: list[int]
    answers: tuple[tuple[int, tuple[int, ...]], ...]


def short_tasks(encode: Encode, count: int) -> Iterator[Quiz]:
    """The protocol's short tasks, one to a sequence."""
    rng = random.Random(TASKS_SEED)
    for _ in range(count):
        prompt, answer = short_task(rng)
        before, after = encode(BEGIN + prompt), encode(answer)
        yield Quiz(before + after, ((len(before), tuple(after)),))


def retrievals(encode: Encode, text: Tokens, length: int, count: int) -> Iterator[Quiz]:
    """The protocol's retrieval sequences of one length.  Raises ConfigError: see Corpus."""
    corpus = Corpus(encode, text, RETRIEVAL_SEED)
    for _ in range(count):
        drawn = corpus.retrieval(length, FACTS, QUESTIONS)
        yield Quiz(drawn.ids.tolist(), drawn.answers)


def grade(model: TeacherForced, quiz: Quiz) -> Score:
    """How many of a sequence's answers the model gives, in one prefill."""
    rows = [row for at, ids in quiz.answers for row in range(at - 1, at - 1 + len(ids))]
    likeliest = model.logits(quiz.tokens, rows).argmax(-1).tolist()
    right = position = 0
    for _, ids in quiz.answers:
        right += likeliest[position : position + len(ids)] == list(ids)
        position += len(ids)
    return Score(right, len(quiz.answers))


def perplexity(model: TeacherForced, text: Sequence[int], windows: int) -> float:
    """exp of the mean negative log-likelihood over the text's first `windows` windows.

    Raises ConfigError where the text has fewer.
    """
    if len(text) < windows * WINDOW:
        raise ConfigError(
            f"{windows} windows of {WINDOW} tokens were asked for, and the text has "
            f"{len(text)} tokens; ask for {len(text) // WINDOW} at most"
        )
    loss = 0.0
    for begin in range(0, windows * WINDOW, WINDOW):
        tokens = list(text[begin : begin + WINDOW])
        logits = model.logits(tokens, range(WINDOW - 1))
        loss += torch.nn.functional.cross_entropy(
            logits, torch.tensor(tokens[1:]), reduction="sum"
        ).item()
    return math.exp(loss / (windows * (WINDOW - 1)))


def _tally(
    model: TeacherForced,
    quizzes: Iterator[Quiz],
    part: str,
    progress: Callable[[str, Score], None],
) -> Score:
    total = Score(0, 0)
    for quiz in quizzes:
        right, count = grade(model, quiz)
        total = Score(total.right + right, total.total + count)
        progress(part, total)
    return total


def _check_chat_format(encode: Encode) -> None:
    for token in (BEGIN, END):
        if len(encode(token)) != 1:
            raise ConfigError(
                f"this tokenizer has no {token}: the tasks are written in the chat format of "
                "HMT's reference models and say nothing about a model that was not trained on "
                "them; measure its perplexity alone"
            )

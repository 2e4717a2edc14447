"""Tasks whose answers are right or wrong, generated from a seed.

The reference models learned these tasks (`training/`), and `hmt.bench.quality` asks them again, to
measure what a cheaper encoding or a smaller memory costs.  One seed gives one sequence of tasks on
every Python; seeds 0 to 11 produced the training data and measure nothing.

A prompt is one user turn in the reference models' chat format; an answer ends with `<|end|>`.
"""
# ruff: noqa: SIM905  (words read better unquoted)

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hmt.base.errors import ConfigError

BEGIN, END, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"

NAMES = (
    "Alice Ben Clara David Emma Frank Grace Henry Iris Jack Kate Liam Mia Noah Olive Peter Quinn "
    "Rose Sam Tara Umar Vera Will Xena Yusuf Zoe Amos Bella Cyrus Dora Elsa Felix Gita Hugo Ines "
    "Joel Kira Leo Maya Nina Omar Paul Rita Seth Tess Ursa Vito Wanda Yara Zane"
).split()
OBJECTS = (
    "apple book ball key lamp cup coat ring boat drum kite rope bell coin map pen rose shoe star "
    "tent"
).split()
PLACES = (
    "kitchen garden attic cellar market library stable harbour tower chapel school bakery"
).split()
COLOURS = "red blue green yellow black white brown purple orange grey".split()

Encode = Callable[[str], list[int]]
Tokens = npt.NDArray[np.integer]


def short_task(rng: random.Random) -> tuple[str, str]:
    """One (prompt, answer) pair of text, of a kind drawn from `rng`, which advances."""
    question, answer = _KINDS[rng.randrange(len(_KINDS))](rng)
    return f"{USER}{question}{END}{ASSISTANT}", f"{answer}{END}"


@dataclass(frozen=True, eq=False, slots=True)
class Retrieval:
    """A long text with facts hidden in it, then questions about them, each with its answer.

    ids             [length], in the dtype of the corpus
    first_question  index in `ids` where the text ends and the first question begins
    answers         (index of its first token in `ids`, token ids up to and with <|end|>)
    """

    ids: Tokens
    first_question: int
    answers: tuple[tuple[int, tuple[int, ...]], ...]


class Corpus:
    """Book text from which passages and retrieval sequences are drawn, repeatably.

    Every draw advances `rng`, so the same calls in the same order give the same sequences.
    """

    def __init__(self, encode: Encode, text: Tokens, seed: int) -> None:
        """`encode` gives token ids without adding any; `text` is the books' ids, [tokens]."""
        self.encode = encode
        self.text = text
        self.rng = random.Random(seed)

    def passage(self, length: int) -> Tokens:
        """A view of `length` tokens of the text.  Raises ConfigError when the text is shorter."""
        starts = len(self.text) - length - 1
        if starts < 1:
            raise ConfigError(
                f"a passage of {length} tokens was asked for, and the text has {len(self.text)}; "
                "use a longer text or a shorter sequence"
            )
        start = self.rng.randrange(starts)
        return self.text[start : start + length]

    def retrieval(
        self, length: int, n_facts: int | None = None, n_questions: int | None = None
    ) -> Retrieval:
        """A sequence of `length` tokens: facts at random places of a passage, then questions.

        The numbers of facts (up to 12, one per 128 tokens) and questions are drawn when they are
        not given; one fact may be asked for twice.  Raises ConfigError when they do not fit.
        """
        rng = self.rng
        n_facts = n_facts or rng.randint(1, min(12, max(1, length // 128)))
        names = rng.sample(NAMES, n_facts)
        numbers = ["".join(rng.choice("0123456789") for _ in range(5)) for _ in names]
        asked = [rng.randrange(n_facts) for _ in range(n_questions or min(8, n_facts * 2))]
        tail, answers = self._questions([(names[i], numbers[i]) for i in asked])
        facts = [
            self.encode(f" The secret number of {name} is {number}.")
            for name, number in zip(names, numbers, strict=True)
        ]
        opening = self.encode(BEGIN + USER)
        body = length - len(opening) - sum(map(len, facts)) - len(tail)
        if body < 1:
            raise ConfigError(
                f"{n_facts} facts and {len(asked)} questions need {length - body} tokens, more "
                f"than the {length} asked for; use longer sequences"
            )
        passage = self.passage(body)
        cuts = sorted(rng.randrange(body) for _ in facts)
        order = list(range(n_facts))
        rng.shuffle(order)
        dtype = self.text.dtype
        parts = [np.array(opening, dtype)]
        for begin, end, fact in zip([0, *cuts[:-1]], cuts, order, strict=True):
            parts += [passage[begin:end], np.array(facts[fact], dtype)]
        parts += [passage[cuts[-1] :], np.array(tail, dtype)]
        first = length - len(tail)
        return Retrieval(
            np.concatenate(parts), first, tuple((first + at, ids) for at, ids in answers)
        )

    def _questions(
        self, asked: list[tuple[str, str]]
    ) -> tuple[list[int], list[tuple[int, tuple[int, ...]]]]:
        """Token ids of all questions and answers, and where in them each answer stands."""
        tail: list[int] = []
        answers = []
        for i, (name, number) in enumerate(asked):
            # The first question goes on in the user's turn that the text began.
            turn = USER if i else " "
            tail += self.encode(f"{turn}What is the secret number of {name}?{END}{ASSISTANT}")
            answer = self.encode(number + END)
            answers.append((len(tail), tuple(answer)))
            tail += answer
        return tail, answers


def _arithmetic(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    if rng.random() < 0.5:
        return f"What is {a} + {b}?", str(a + b)
    a, b = max(a, b), min(a, b)
    return f"What is {a} - {b}?", str(a - b)


def _copying(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(OBJECTS, rng.randint(3, 7))
    if rng.random() < 0.5:
        return "Repeat: " + " ".join(words), " ".join(words)
    return "Reverse: " + " ".join(words), " ".join(reversed(words))


def _story(rng: random.Random) -> tuple[str, str]:
    count = rng.randint(3, 6)
    who, what = rng.sample(NAMES, count), rng.sample(OBJECTS, count)
    where = [rng.choice(PLACES) for _ in range(count)]
    colour = [rng.choice(COLOURS) for _ in range(count)]
    told = " ".join(
        f"{who[i]} took the {colour[i]} {what[i]} to the {where[i]}." for i in range(count)
    )
    i = rng.randrange(count)
    question, answer = rng.choice(
        [
            (f"Where is the {what[i]}?", f"The {what[i]} is in the {where[i]}."),
            (f"What did {who[i]} take?", f"{who[i]} took the {colour[i]} {what[i]}."),
            (f"Who took the {what[i]}?", f"{who[i]} took the {what[i]}."),
            (f"What colour is the {what[i]}?", f"The {what[i]} is {colour[i]}."),
        ]
    )
    return f"{told} {question}", answer


def _extraction(rng: random.Random) -> tuple[str, str]:
    who, age = rng.choice(NAMES), rng.randrange(5, 90)
    what, where = rng.choice(OBJECTS), rng.choice(PLACES)
    question = f"Make JSON: {who} is {age} years old, owns a {what} and lives near the {where}."
    return question, json.dumps({"name": who, "age": age, "owns": what, "lives": where})


def _choosing(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randrange(100) for _ in range(rng.randint(3, 6))]
    which, answer = rng.choice(
        [
            ("largest", max(numbers)),
            ("smallest", min(numbers)),
            ("first", numbers[0]),
            ("last", numbers[-1]),
        ]
    )
    return f"Which is the {which} of {', '.join(map(str, numbers))}?", str(answer)


def _chain(rng: random.Random) -> tuple[str, str]:
    count = rng.randint(2, 4)
    variables = rng.sample("ABCDEFGH", count)
    value = rng.randrange(100)
    links = [f"{b} = {a}." for a, b in pairwise(variables)]
    told = " ".join([f"{variables[0]} = {value}.", *links])
    return f"{told} What is {variables[-1]}?", str(value)


def _counting(rng: random.Random) -> tuple[str, str]:
    rng.choice(COLOURS)  # unused, but the models were trained with this draw in the sequence
    what, count = rng.choice(OBJECTS), rng.randint(1, 9)
    plural = "s" if count > 1 else ""
    return f"How many? {' '.join([what] * count)}", f"{count} {what}{plural}"


_KINDS = (_arithmetic, _copying, _story, _extraction, _choosing, _chain, _counting)

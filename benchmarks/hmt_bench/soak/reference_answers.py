"""What greedy answers have to be: from the plain executor, one request at a time."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hmt.contracts.request import Request
from hmt.engine import Engine

_LONGEST, _SHORTEST = 1800, 8  # characters of prompts


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, the longest its answer may be, and the answer: its text and its tokens."""

    prompt: str
    tokens: int
    text: str
    count: int


def questions(
    model: Path, text: str, count: int, seed: int, options: dict[str, Any]
) -> list[Question]:
    """So many, of pieces of `text`; `options` are the engine's.  Raises what the engine raises."""
    draw = random.Random(seed)
    found = []
    with Engine(**options | {"executor": "plain"}) as engine, engine.load_model(model) as loaded:
        for _ in range(count):
            begin = draw.randrange(len(text) - _LONGEST)
            length = round(_SHORTEST * (_LONGEST / _SHORTEST) ** draw.random())
            prompt, tokens = text[begin : begin + length], draw.choice((4, 16, 48))
            answer = loaded.infer(Request(prompt, tokens))
            found.append(Question(prompt, tokens, answer.text, len(answer.token_ids)))
    return found

"""Calibration sequences that the model writes itself: no text of others is needed.

What a model says of itself resembles what it was trained for (LLM-QAT, arXiv 2305.17888).  One that
has a chat template writes the user's turn as well, given what stands in front of it (Magpie, arXiv
2406.08464), and then answers it.
"""

from collections.abc import Callable
from pathlib import Path

from hmt.contracts.request import Completion, FinishReason, Request, Sampling
from hmt.engine import Engine
from hmt.engine.api import LoadedModel
from hmt.text import Tokenizer

_USER = "user"


def own_sequences(
    path: Path, count: int, length: int, host_memory_bytes: int, said: Callable[[int], None]
) -> list[list[int]]:
    """`count` sequences of up to `length` tokens that the model in folder `path` writes.

    Sampled at temperature 1 from seeds, so that they are the same each time.  `said` is told how
    many sequences are complete.  Raises what `Engine.load_model` raises.
    """
    # Drafts would be sampled otherwise where a model has them, not worse.
    with Engine(
        host_memory=host_memory_bytes, context=length, speculate="off"
    ) as engine:
        model = engine.load_model(path)
        return _written(model, count, length, said)


def _written(
    model: LoadedModel, count: int, length: int, said: Callable[[int], None]
) -> list[list[int]]:
    tokenizer = model.tokenizer
    begin = _beginning(tokenizer)
    requests = [_request(begin, length, number) for number in range(count)]
    first = model.infer_batch(requests)
    said(count // 2)
    sequences = [begin + list(made.token_ids) for made in first]
    if tokenizer.has_chat_template:
        asked = {
            number: tokenizer.chat_prompt([{"role": _USER, "content": made.text}])
            for number, made in enumerate(first)
            if _ended(made)
        }
        asked = {number: ids for number, ids in asked.items() if len(ids) < length}
        answers = model.infer_batch(
            [_request(ids, length, count + number) for number, ids in asked.items()]
        )
        for (number, ids), made in zip(asked.items(), answers, strict=True):
            sequences[number] = ids + list(made.token_ids)
    said(count)
    return sequences


def _beginning(tokenizer: Tokenizer) -> list[int]:
    """What stands in front of a text, or of a user's first words."""
    if tokenizer.has_chat_template:
        return tokenizer.chat_prompt([{"role": _USER, "content": ""}], goes_on=True)
    return tokenizer.encode("")


def _request(prompt: list[int], length: int, seed: int) -> Request:
    return Request(
        input=prompt,
        max_new_tokens=length - len(prompt),
        sampling=Sampling(temperature=1.0, seed=seed),
    )


def _ended(made: Completion) -> bool:
    return made.finish_reason is FinishReason.STOP and bool(made.text.strip())

"""Calibration sequences that the model writes itself.

What a model writes resembles what it was trained for (LLM-QAT, arXiv 2305.17888).  One that has a
chat template writes the user's turn as well, given what stands in front of it (Magpie, arXiv
2406.08464), and then answers it.
"""

from pathlib import Path
from typing import Final

from hmt.base.errors import ConfigError
from hmt.contracts.request import Completion, FinishReason, Request, Sampling
from hmt.engine import Engine
from hmt.engine.api import LoadedModel
from hmt.quantizing.calibration_text import BUILTIN, calibration_sequences

_USER: Final = "user"
_TRIES: Final = 4  # turns that are begun for each sequence: many models do not end every one
_LEAST: Final = 4  # of so many sequences one is there at least, if only by turns that do not end
_TURN: Final = 8  # a user's turn may take this share of a sequence


def own_sequences(path: Path, count: int, length: int, host_memory_bytes: int) -> list[list[int]]:
    """Sequences of up to `length` tokens: what the model in folder `path` writes, and other text.

    It writes up to `count`, sampled at temperature 1 from seeds, so that they are the same each
    time: a user's turn and its answer; where less than a quarter of them comes to an end, turns
    without answers follow.  The text that comes with the package adds about as many tokens, so that
    long prose is not forgotten; more of it, and chats suffer.
    Raises ConfigError where the model has no chat template, and what `Engine.load_model` raises.
    """
    with Engine(host_memory=host_memory_bytes, context=length, speculate="off") as engine:
        model = engine.load_model(path)
        if not model.tokenizer.has_chat_template:
            raise ConfigError(
                f"{path} has no chat template, so that it cannot be asked to write: give a text "
                "with --calibration FILE, or take the builtin one"
            )
        written = _chats(model, count, length)
        pieces = max(1, sum(map(len, written)) // length)
        return written + calibration_sequences(BUILTIN, model.tokenizer, pieces, length)


def _chats(model: LoadedModel, count: int, length: int) -> list[list[int]]:
    tokenizer = model.tokenizer
    begin = tokenizer.chat_prompt([{"role": _USER, "content": ""}], goes_on=True)
    most = min(length, len(begin) + length // _TURN)
    turns = _write(model, [begin] * (_TRIES * count), most, 0)
    ended = [one.text for one in turns if one.finish_reason is FinishReason.STOP]
    prompts = [
        tokenizer.chat_prompt([{"role": _USER, "content": text}]) for text in ended if text.strip()
    ]
    prompts = [ids for ids in prompts if len(ids) < length][:count]
    answers = _write(model, prompts, length, len(turns))
    chats = [ids + list(one.token_ids) for ids, one in zip(prompts, answers, strict=True)]
    open_turns = [
        begin + list(one.token_ids) for one in turns if one.finish_reason is FinishReason.LENGTH
    ]
    return chats + open_turns[: max(0, count // _LEAST - len(chats))]


def _write(
    model: LoadedModel, prompts: list[list[int]], length: int, seed: int
) -> list[Completion]:
    """What the model makes of prompts, up to `length` tokens with them."""
    requests = [
        Request(
            input=ids,
            max_new_tokens=length - len(ids),
            sampling=Sampling(temperature=1.0, seed=seed + number),
        )
        for number, ids in enumerate(prompts)
    ]
    return model.infer_batch(requests)

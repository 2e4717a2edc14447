"""Calibration sequences that the model writes itself.

What a model writes resembles what it was trained for (LLM-QAT, arXiv 2305.17888).  One that has a
chat template writes the user's turn as well, given what stands in front of it (Magpie, arXiv
2406.08464), and then answers it.  What was written stays in HMT's cache folder, for a run that goes
on, and for another method.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import ConfigError
from hmt.base.folders import cache_folder
from hmt.base.json_store import write_atomically
from hmt.contracts.request import Completion, FinishReason, Request, Sampling
from hmt.engine import Engine
from hmt.engine.api import LoadedModel
from hmt.engine.loading.kv_scales import identity
from hmt.engine.loading.source import open_source
from hmt.quantizing.calibration_text import BUILTIN, calibration_sequences
from hmt.quantizing.options import QuantizeOptions

_USER: Final = "user"
_TRIES: Final = 4  # turns that are begun for each sequence: many models do not end every one
_LEAST: Final = 4  # of so many sequences one is there at least, if only by turns that do not end
_TURN: Final = 8  # a user's turn may take this share of a sequence


def own_sequences(path: Path, count: int, length: int, options: QuantizeOptions) -> list[list[int]]:
    """Sequences of up to `length` tokens: what the model in folder `path` writes, and other text.

    It writes up to `count`, sampled at temperature 1 from seeds, so that they are the same each
    time: a user's turn and its answer; where less than a quarter of them comes to an end, turns
    without answers follow.  The text that comes with the package adds about as many tokens, so that
    long prose is not forgotten; more of it, and chats suffer.  What it wrote at an earlier call for
    the same weights, template, count and length is read from the cache folder instead.
    `options` say what it may take to write.
    Raises ConfigError where the model has no chat template, and what `Engine.load_model` raises.
    """
    source = open_source(path)
    tokenizer = source.tokenizer()
    if not tokenizer.has_chat_template:
        raise ConfigError(
            f"{path} has no chat template, so that it cannot be asked to write: give a text "
            "with --calibration FILE, or take the builtin one"
        )

    def write() -> list[list[int]]:
        memory: dict[str, Any] = {"host_memory": options.host_memory_bytes}
        if options.gpu is not None:
            memory |= {"gpus": options.gpu, "gpu_memory": options.gpu_memory_bytes}
        with Engine(context=length, speculate="off", **memory) as engine:
            return _chats(engine.load_model(path), count, length)

    asked = tokenizer.chat_prompt([{"role": _USER, "content": "1"}])
    settings = [identity(source), asked, count, length, _TRIES, _LEAST, _TURN]
    written = _kept(settings, write)
    pieces = max(1, sum(map(len, written)) // length)
    return written + calibration_sequences(BUILTIN, tokenizer, pieces, length)


def _kept(settings: list[Any], write: Callable[[], list[list[int]]]) -> list[list[int]]:
    """What `write` gives, or what it gave for these settings before."""
    name = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()
    file = cache_folder() / "own-text" / f"{name}.json"
    try:
        kept = json.loads(file.read_text())
        if all(isinstance(token, int) for text in kept for token in text):
            return list(map(list, kept))
    except (OSError, ValueError, TypeError):
        pass  # there is none, or it is damaged
    written = write()
    write_atomically(file, json.dumps(written))
    return written


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

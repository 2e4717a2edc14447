"""A model that says what clients are to make something of."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hmt.engine import LoadedModel
from hmt.engine.outputs import sampler

ANSWER = "It is sunny in Rome."


@contextmanager
def replying(model: LoadedModel, reply: Callable[[str], str]) -> Iterator[None]:
    """Every answer is what `reply` says to its prompt, as far as its form allows that."""
    begin, choose = sampler.SamplerState.__init__, sampler.SamplerState.choose
    tokenizer = model.tokenizer

    def prepared(self: Any, sampling: Any, prompt: Any) -> None:
        begin(self, sampling, prompt)
        text = b"".join(map(tokenizer.token_bytes, prompt)).decode("utf-8", "replace")
        said = tokenizer._encode(reply(text), add_special_tokens=False)
        self.reply = [*said, *tokenizer.eos_ids]

    def scripted(self: Any, logits: Any, known: Any = None, allowed: Any = None) -> Any:
        chosen = choose(self, logits, known, allowed)
        number = min(sum(self._output.values()), len(self.reply)) - 1
        token = self.reply[number]
        if allowed is not None and token not in allowed.tolist():
            return chosen
        return dataclasses.replace(chosen, token_id=token)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler.SamplerState, "__init__", prepared)
        patch.setattr(sampler.SamplerState, "choose", scripted)
        yield


def said_to(prompt: str) -> str:
    """What the model of these tests answers: a call first, then in words."""
    offered = re.findall(r'"name": "([\w.-]+)"', prompt.partition("<|user|>")[0])
    if "as data" in prompt:
        data = '{"place": {"city": "Rome"}, "days": 2}'
        name = next((one for one in offered if one not in ("place", "city")), None)
        return data if name is None else call(name, data)
    if "get_weather" in offered and "<|tool|>" not in prompt:
        return call("get_weather", '{"city": "Rome", "days": 2}')
    return ANSWER


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclasses.dataclass(frozen=True)
class Served:
    """A server that listens, and the folder of its model."""

    url: str
    name: str
    folder: str

"""What an answer's text consists of: reasoning, the answer itself, calls of tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hmt.base.errors import HMTError
from hmt.contracts.request import Grammar
from hmt.server.errors import ApiError, as_api_error
from hmt.text import (
    CallReader,
    HarmonyReader,
    ReasoningReader,
    Tokenizer,
    ToolCall,
    ToolStyle,
)


@dataclass(slots=True)
class ParsedAnswer:
    """What became known with some text."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(slots=True)
class AnswerParser:
    """Reads one answer as it comes: by its channels where it has some."""

    channels: HarmonyReader | None = None
    reasoning: ReasoningReader | None = None
    calls: CallReader | None = None
    several: bool = True
    _called: int = 0

    def read(self, text: str, *, last: bool) -> ParsedAnswer:
        """What `text` adds; all that was held back with the last."""
        said = ParsedAnswer(text=text)
        if self.channels is not None:
            said = ParsedAnswer(*self.channels.push(text))
            if last:
                reasoning, rest, calls = self.channels.flush()
                said = ParsedAnswer(
                    said.reasoning + reasoning, said.text + rest, said.calls + calls
                )
        if self.reasoning is not None:
            said.reasoning, said.text = self.reasoning.push(text)
            if last:
                reasoning, rest = self.reasoning.flush()
                said.reasoning, said.text = said.reasoning + reasoning, said.text + rest
        if self.calls is not None:
            said.text, said.calls = self.calls.push(said.text)
            if last:
                rest, calls = self.calls.flush()
                said.text, said.calls = said.text + rest, said.calls + calls
        if self.several:
            return said
        if self._called:
            said.reasoning = said.text = ""
        first: list[ToolCall] = []
        for call in said.calls:
            self._called += bool(call.name)
            if self._called <= 1:
                first.append(call)
        said.calls = first
        return said


@dataclass(frozen=True, slots=True)
class OutputParser:
    """How the answers to one prompt are read.

    style    of calls of tools; None: none may be called
    tools    those that may be called, in OpenAI's form
    formed   whether answers are held to a form: then they have no room for reasoning, but for
             that of models with channels, which are part of it
    several  whether one answer may have several calls; if not, it ends with the first
    """

    tokenizer: Tokenizer
    prompt: list[int]
    style: ToolStyle | None
    tools: Sequence[Mapping[str, Any]]
    formed: bool
    several: bool = True

    def id_of(self, call: ToolCall) -> str:
        """What a call is known by: what the model called it, or a new one."""
        assert self.style is not None
        length = self.style.id_length
        if call.id is not None and length in (None, len(call.id)):
            return call.id
        return self.style.new_id()

    def reader(self, *, early: bool = False) -> AnswerParser:
        """For one answer.  early: calls are passed on as they come."""
        names = [tool["function"]["name"] for tool in self.tools]
        channels = self.tokenizer.channels(self.prompt, names)
        if channels is not None:
            return AnswerParser(channels, several=self.several)
        reasoning = None if self.formed else self.tokenizer.reasoning(self.prompt)
        marks, style = self.tokenizer.call_marks, self.style
        if style is None and marks:
            style = self.tokenizer.tool_style  # which leaves them out
        calls = None
        if style is not None:
            calls = style.reader(names, self.tools, early=early, hidden=marks)
        return AnswerParser(None, reasoning, calls, self.several)


def object_of(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; what a model wrote that is none is left out."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def style_of(tokenizer: Tokenizer) -> ToolStyle:
    """How calls are written.  Raises ApiError where the model has no place for tools."""
    style = tokenizer.tool_style
    if style is None:
        raise ApiError(
            400,
            "this model's chat template has no place for tools: leave them out, or serve a model "
            "that was trained to call them",
            param="tools",
            code="unsupported",
        )
    return style


def form_of_calls(
    style: ToolStyle, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> Grammar:
    """The form of an answer that has to be a call of one of `tools`.  Raises ApiError."""
    try:
        return style.grammar(tools, tokenizer.call_marks)
    except HMTError as error:
        raise as_api_error(error, "tools") from error

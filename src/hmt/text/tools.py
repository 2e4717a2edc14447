"""Calls of tools: how models write them, and how what they write is read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from hmt.contracts.request import Grammar, GrammarKind
from hmt.text.stream import StopStrings

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
# What nobody reads needs no layout.
_COMPACT: Final = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name, and its arguments as JSON."""

    name: str
    arguments: str


class CallReader(Protocol):
    """Takes calls out of one answer's text as it comes.  What is no call stays text."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certain to be none of a call, and the calls that are complete."""
        ...

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The same at the end."""
        ...


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How a model writes calls, as its chat template shows.

    tagged      each between <tool_call> and </tool_call> (Hermes, Qwen); otherwise the whole answer
                is an object, or a list of them (Llama 3, Mistral)
    arguments   what they are called in the object
    """

    tagged: bool
    arguments: str = "arguments"

    @classmethod
    def of(cls, template: str) -> "ToolStyle":
        """That of a chat template."""
        if _OPEN in template:
            return cls(tagged=True)
        return cls(tagged=False, arguments="parameters" if '"parameters": ' in template or
                   "'parameters'" in template else "arguments")  # fmt: skip

    def reader(self, names: Iterable[str]) -> CallReader:
        """For one answer, to a request with tools of these names."""
        known = frozenset(names)
        return _TaggedReader(known) if self.tagged else _WholeReader(known)

    def grammar(self, tools: Sequence[Mapping[str, Any]]) -> Grammar:
        """Of answers that are a call of one of `tools`, in OpenAI's form."""
        calls = [self._call(tool["function"]) for tool in tools]
        schema = {"x-guidance": _COMPACT, **(calls[0] if len(calls) == 1 else {"anyOf": calls})}
        if not self.tagged:
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        rule = f'start: "{_OPEN}\\n" call "\\n{_CLOSE}"\ncall: %json {json.dumps(schema)}'
        return Grammar(GrammarKind.GRAMMAR, rule)

    def _call(self, function: Mapping[str, Any]) -> dict[str, Any]:
        parameters = function.get("parameters") or {"type": "object"}
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.arguments: parameters},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


@dataclass(slots=True)
class _TaggedReader:
    known: frozenset[str]
    _outside: StopStrings = field(default_factory=lambda: StopStrings([_OPEN]))
    _inside: str | None = None  # what came since a call began; None outside of calls

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        shown, calls = "", []
        while text:
            if self._inside is None:
                before = self._outside
                passed = before.push(text)
                shown += passed
                if before.matched is None:
                    break
                # What it held and `text` began with `passed` and the tag.
                text = before.rest
                self._outside, self._inside = StopStrings([_OPEN]), ""
            self._inside += text
            body, closed, text = self._inside.partition(_CLOSE)
            if not closed:
                break
            found = _calls(body, self.known)
            calls += found
            shown += "" if found else _OPEN + body + _CLOSE
            self._inside = None
        return (shown if not calls or shown.strip() else ""), calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        if self._inside is None:
            return self._outside.flush(), []
        calls = _calls(self._inside, self.known)  # the end tag may be an end token
        return ("" if calls else _OPEN + self._inside), calls


@dataclass(slots=True)
class _WholeReader:
    known: frozenset[str]
    _held: str = ""
    _is_text: bool = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        if self._is_text:
            return text, []
        self._held += text
        begin = self._held.lstrip()
        if begin and begin[0] not in "[{":
            self._is_text = True
            held, self._held = self._held, ""
            return held, []
        return "", []

    def flush(self) -> tuple[str, list[ToolCall]]:
        held, self._held = self._held, ""
        calls = _calls(held, self.known)
        return ("" if calls else held), calls


def _calls(text: str, known: frozenset[str]) -> list[ToolCall]:
    """The calls that `text` consists of: objects or lists of them, with ; between; else none."""
    decoder, calls, place = json.JSONDecoder(), list[ToolCall](), 0
    text = text.strip()
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError):
            return []
        for one in value if isinstance(value, list) else [value]:
            call = _call(one, known)
            if call is None:
                return []
            calls.append(call)
        while place < len(text) and text[place] in "; \n":
            place += 1
    return calls


def _call(value: Any, known: frozenset[str]) -> ToolCall | None:
    if not isinstance(value, dict) or value.get("name") not in known:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))

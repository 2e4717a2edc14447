"""Calls of tools: how models write them, and how what they write is read."""

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hmt.contracts.request import Grammar, GrammarKind
from hmt.text.harmony import harmony_rules, is_harmony
from hmt.text.stream import StopStrings

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_DEEPSEEK: Final = "<\uff5ctool\u2581{}\uff5c>"  # tags that its tokenizers have as ordinary tokens
_CALLS: Final = tuple(_DEEPSEEK.format(f"calls\u2581{end}") for end in ("begin", "end"))
_CALL: Final = tuple(_DEEPSEEK.format(f"call\u2581{end}") for end in ("begin", "end"))
_SEPARATOR: Final = _DEEPSEEK.format("sep")
_FENCE: Final = "```json\n", "\n```"
_MISTRAL: Final = "[TOOL_CALLS]"
# What nobody reads needs no layout.
_COMPACT: Final = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name, its arguments as JSON, and what the model calls the call, if anything."""

    name: str
    arguments: str
    id: str | None = None


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
    harmony     gpt-oss's messages instead, which `HarmonyReader` reads
    fenced      DeepSeek's tags instead: True where the arguments stand in a block of code behind
                the word "function" (V3, R1), False where they do not (V3.1); None: not DeepSeek's
    id_length   of calls' ids where the template demands one (Mistral); else they may be any
    """

    tagged: bool
    arguments: str = "arguments"
    fenced: bool | None = None
    id_length: int | None = None
    harmony: bool = False

    @classmethod
    def of(cls, template: str) -> "ToolStyle":
        """That of a chat template."""
        if is_harmony(template):
            return cls(tagged=False, harmony=True)
        if _CALLS[0] in template:
            return cls(tagged=True, fenced="```json" in template)
        if _OPEN in template:
            return cls(tagged=True)
        parameters = '"parameters": ' in template or "'parameters'" in template
        return cls(
            tagged=False,
            arguments="parameters" if parameters else "arguments",
            id_length=9 if _MISTRAL in template and "length" in template else None,
        )

    def reader(self, names: Iterable[str]) -> CallReader:
        """For one answer, to a request with tools of these names."""
        known = frozenset(names)
        if self.fenced is not None:
            return _TaggedReader(_CALLS[0], _CALLS[1], lambda body: _deepseek_calls(body, known))
        if self.tagged:
            return _TaggedReader(_OPEN, _CLOSE, lambda body: _calls(body, known))
        return _WholeReader(known)

    def new_id(self) -> str:
        """For a call that has none."""
        name = uuid.uuid4().hex
        return f"call_{name[:24]}" if self.id_length is None else name[: self.id_length]

    def grammar(self, tools: Sequence[Mapping[str, Any]]) -> Grammar:
        """Of answers that are a call of one of `tools`, in OpenAI's form."""
        functions = [tool["function"] for tool in tools]
        if self.harmony:
            return Grammar(GrammarKind.GRAMMAR, harmony_rules(functions, _COMPACT))
        if self.fenced is not None:
            return Grammar(GrammarKind.GRAMMAR, _deepseek_rules(functions, fenced=self.fenced))
        calls = [self._call(function) for function in functions]
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


class _TaggedReader:
    def __init__(self, begin: str, end: str, parse: Callable[[str], list[ToolCall]]) -> None:
        self._begin, self._end, self._parse = begin, end, parse
        self._outside = StopStrings([begin])
        self._inside: str | None = None  # what came since a call began; None outside of calls

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
                self._outside, self._inside = StopStrings([self._begin]), ""
            self._inside += text
            body, closed, text = self._inside.partition(self._end)
            if not closed:
                break
            found = self._parse(body)
            calls += found
            shown += "" if found else self._begin + body + self._end
            self._inside = None
        return (shown if not calls or shown.strip() else ""), calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        if self._inside is None:
            return self._outside.flush(), []
        calls = self._parse(self._inside)  # the end tag may be an end token
        return ("" if calls else self._begin + self._inside), calls


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
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = value.get("id")
    return ToolCall(value["name"], arguments, name if isinstance(name, str) and name else None)


def _deepseek_calls(text: str, known: frozenset[str]) -> list[ToolCall]:
    """The calls that `text` between DeepSeek's outer tags consists of; else none."""
    calls = []
    for part in text.split(_CALL[0])[1:]:
        head, parted, rest = part.rpartition(_CALL[1])[0].partition(_SEPARATOR)
        name, arguments = head, rest
        if head == "function":  # V3 and R1
            name, _, arguments = rest.partition("\n" + _FENCE[0])
            arguments = arguments.strip().removesuffix(_FENCE[1].strip())
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return []
        if not parted or name.strip() not in known or not isinstance(value, dict):
            return []
        name = name.strip()
        calls.append(ToolCall(name, json.dumps(value, ensure_ascii=False)))
    return calls


def _deepseek_rules(functions: Sequence[Mapping[str, Any]], *, fenced: bool) -> str:
    """A grammar of one call of one of `functions`, in DeepSeek's tags."""
    rules, begin = [], "function" + _SEPARATOR if fenced else ""
    for number, function in enumerate(functions):
        between, end = ("\n" + _FENCE[0], _FENCE[1]) if fenced else (_SEPARATOR, "")
        before = json.dumps(begin + function["name"] + between, ensure_ascii=False)
        after = json.dumps(end, ensure_ascii=False) if end else ""
        schema = {"x-guidance": _COMPACT, **(function.get("parameters") or {"type": "object"})}
        rules.append(f"call{number}: {before} args{number} {after}")
        rules.append(f"args{number}: %json {json.dumps(schema)}")
    choices = " | ".join(f"call{number}" for number in range(len(functions)))
    opening = json.dumps(_CALLS[0] + _CALL[0], ensure_ascii=False)
    closing = json.dumps(_CALL[1] + _CALLS[1], ensure_ascii=False)
    return "\n".join([f"start: {opening} ({choices}) {closing}", *rules])

"""How models write calls of tools, by their chat templates."""

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hmt.contracts.request import Grammar, GrammarKind
from hmt.text.harmony import harmony_rules, is_harmony
from hmt.text.stream import StopStrings
from hmt.text.tool_calls.dialect_parsers import (
    ARGS,
    CALL_ID,
    TOOL_CALLS,
    TaggedReader,
    UntaggedReader,
)
from hmt.text.tool_calls.grammars import (
    Rules,
    arguments_of,
    named_calls,
    object_schema,
    python_calls,
    xml_calls,
)
from hmt.text.tool_calls.parameters import Parameters, as_json
from hmt.text.tool_calls.parser import CallReader, ToolCall
from hmt.text.tool_calls.xml_dialect import FUNCTION, PARAMETER, XmlReader

_TAGS: Final = ("<tool_call>", "</tool_call>")
_LFM: Final = ("<|tool_call_start|>", "<|tool_call_end|>")
_DEEPSEEK: Final = "<\uff5ctool\u2581{}\uff5c>"  # tags that its tokenizers have as ordinary tokens
_CALLS: Final = tuple(_DEEPSEEK.format(f"calls\u2581{end}") for end in ("begin", "end"))
_CALL: Final = tuple(_DEEPSEEK.format(f"call\u2581{end}") for end in ("begin", "end"))
_SEPARATOR: Final = _DEEPSEEK.format("sep")
_FENCE: Final = "```json\n", "\n```"
# Templates of Llama 3.2 and 4 show it so: [func_name1(params_name1=params_value1, ...), ...]
_PYTHON: Final = re.compile(r"\[\s*\w+\((?:\w+\s*=|params)")
# Special tokens of tokenizers, by which calls are told.
MARKS: Final = (*_TAGS, *_LFM, TOOL_CALLS, ARGS, CALL_ID)


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How a model writes calls, as its chat template shows.

    tagged      each between `tags` (Hermes, Qwen); otherwise the whole answer is an object, or a
                list of them (Llama 3, Mistral)
    arguments   what they are called in the object
    harmony     gpt-oss's messages instead, which `HarmonyReader` reads
    fenced      DeepSeek's tags instead: True where the arguments stand in a block of code behind
                the word "function" (V3, R1), False where they do not (V3.1); None: not DeepSeek's
    id_length   of calls' ids where the template demands one (Mistral); else they may be any
    xml         Qwen3-Coder's: each argument between its own tags
    python      Llama 3.2's and 4's, LFM2's: [f(x="y")]
    named       Mistral's newer: [TOOL_CALLS]f[ARGS]{...}
    """

    tagged: bool
    arguments: str = "arguments"
    fenced: bool | None = None
    id_length: int | None = None
    harmony: bool = False
    xml: bool = False
    python: bool = False
    named: bool = False
    tags: tuple[str, str] = _TAGS

    @classmethod
    def of(cls, template: str) -> "ToolStyle":
        """That of a chat template."""
        if is_harmony(template):
            return cls(tagged=False, harmony=True)
        if _CALLS[0] in template:
            return cls(tagged=True, fenced="```json" in template)
        if FUNCTION in template and PARAMETER in template:
            return cls(tagged=True, xml=True)
        if _LFM[0] in template:
            return cls(tagged=True, python=True, tags=_LFM)
        if _TAGS[0] in template:
            return cls(tagged=True)
        if TOOL_CALLS in template:
            length = 9 if "length" in template else None
            return cls(False, id_length=length, named=ARGS in template)
        parameters = '"parameters": ' in template or "'parameters'" in template
        return cls(
            tagged=False,
            arguments="parameters" if parameters else "arguments",
            python=_PYTHON.search(template) is not None,
        )

    def reader(
        self,
        names: Iterable[str],
        tools: Iterable[Mapping[str, Any]] = (),
        *,
        early: bool = False,
        hidden: Iterable[str] = (),
    ) -> CallReader:
        """For one answer, to a request with tools of these names.

        tools   the same in OpenAI's form, for ways to write calls that leave types to the schema
        early   results have calls as far as they have come, where they can be passed on in pieces
        hidden  marks that are special tokens, and are not shown where there is no call
        """
        known = frozenset(names)
        if self.fenced is not None:
            return _DeepSeekReader(known)
        functions = [tool["function"] for tool in tools]
        parameters = {one["name"]: Parameters(one.get("parameters")) for one in functions}
        kind = XmlReader if self.xml else TaggedReader if self.tagged else UntaggedReader
        return kind(known, parameters, self.tags, early=early, hidden=hidden)

    def new_id(self) -> str:
        """For a call that has none."""
        name = uuid.uuid4().hex
        return f"call_{name[:24]}" if self.id_length is None else name[: self.id_length]

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], marks: Mapping[str, int] | None = None
    ) -> Grammar:
        """Of answers that are a call of one of `tools`, in OpenAI's form.

        marks   special tokens of the tokenizer, by their text

        Raises RequestError for a tool whose schema no arguments can meet.
        """
        functions = [tool["function"] for tool in tools]
        rules = Rules(marks or {})
        if self.harmony:
            schemas = [(one["name"], arguments_of(one)) for one in functions]
            return Grammar(GrammarKind.GRAMMAR, harmony_rules(schemas))
        if self.fenced is not None:
            return Grammar(GrammarKind.GRAMMAR, _deepseek_rules(functions, fenced=self.fenced))
        if self.xml:
            return xml_calls(functions, self.tags, rules)
        if self.python:
            return python_calls(functions, self.tags if self.tagged else ("", ""), rules)
        if self.named:
            return named_calls(functions, TOOL_CALLS, ARGS, rules)
        schema = object_schema(functions, self.arguments)
        if not self.tagged:
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        begin, end = self.tags
        return rules.grammar(rules.text(begin + "\n"), rules.json(schema), rules.text("\n" + end))


class _DeepSeekReader:
    """Calls between DeepSeek's outer tags, each passed on when the end tag has come."""

    def __init__(self, known: frozenset[str]) -> None:
        """known: names of tools that may be called."""
        self._known = known
        self._begin, self._end = _CALLS
        self._outside = StopStrings([self._begin])
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
            found = _deepseek_calls(body, self._known)
            calls += found
            shown += "" if found else self._begin + body + self._end
            self._inside = None
        return (shown if not calls or shown.strip() else ""), calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        if self._inside is None:
            return self._outside.flush(), []
        calls = _deepseek_calls(self._inside, self._known)  # the end tag may be an end token
        return ("" if calls else self._begin + self._inside), calls


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
        calls.append(ToolCall(name, as_json(value)))
    return calls


def _deepseek_rules(functions: Sequence[Mapping[str, Any]], *, fenced: bool) -> str:
    """A grammar of one call of one of `functions`, in DeepSeek's tags."""
    rules, begin = [], "function" + _SEPARATOR if fenced else ""
    for number, function in enumerate(functions):
        between, end = ("\n" + _FENCE[0], _FENCE[1]) if fenced else (_SEPARATOR, "")
        before = json.dumps(begin + function["name"] + between, ensure_ascii=False)
        after = json.dumps(end, ensure_ascii=False) if end else ""
        rules.append(f"call{number}: {before} args{number} {after}")
        rules.append(f"args{number}: %json {json.dumps(arguments_of(function))}")
    choices = " | ".join(f"call{number}" for number in range(len(functions)))
    opening = json.dumps(_CALLS[0] + _CALL[0], ensure_ascii=False)
    closing = json.dumps(_CALL[1] + _CALLS[1], ensure_ascii=False)
    return "\n".join([f"start: {opening} ({choices}) {closing}", *rules])

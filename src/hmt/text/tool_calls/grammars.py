"""Grammars of answers that are one call of one of several tools, in each way of writing it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from hmt.contracts.request import Grammar, GrammarKind
from hmt.text.json_schema import prepare

# Arguments are parsed and not shown: they need no layout.
COMPACT: Final = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
_ANY: Final = r"/(.|\n)*/"

Function = Mapping[str, Any]


def arguments_of(function: Function, prefix: str = "d") -> dict[str, Any]:
    """The schema of a function's arguments, which stands alone.

    prefix   that names in its `$defs` begin with

    Raises RequestError for one that no arguments can meet.
    """
    schema = function.get("parameters") or {"type": "object"}
    name = f"schema of the tool {function['name']}"
    made = prepare(schema, COMPACT, name, prefix)
    return {"type": "object", **made} if "$ref" not in made else made


def object_schema(functions: Sequence[Function], key: str) -> dict[str, Any]:
    """Of {"name": ..., key: ...}: `$defs` of each function have another prefix in it."""
    calls, shared = list[dict[str, Any]](), dict[str, Any]()
    for number, function in enumerate(functions):
        arguments = arguments_of(function, f"t{number}d")
        shared.update(arguments.pop("$defs", {}))
        arguments.pop("x-guidance", None)
        calls.append({
            "type": "object",
            "properties": {"name": {"const": function["name"]}, key: arguments},
            "required": ["name", key],
            "additionalProperties": False,
        })  # fmt: skip
    whole = calls[0] if len(calls) == 1 else {"anyOf": calls}
    options = {"x-guidance": {"coerce_one_of": True, **COMPACT}}
    return options | whole | ({"$defs": shared} if shared else {})


class Rules:
    """A grammar in Lark's form, in the making.

    marks   special tokens by their text: where it stands in the answer, these are meant
    """

    def __init__(self, marks: Mapping[str, int]) -> None:
        self._marks = marks
        self._rules: list[str] = []

    def text(self, text: str) -> str:
        """What stands for `text`."""
        for mark, token in self._marks.items():
            if mark in text:
                before, _, after = text.partition(mark)
                return f"{self.text(before)} <[{token}]> {self.text(after)}".strip()
        return json.dumps(text, ensure_ascii=False) if text else ""

    def add(self, rule: str, options: str = "") -> str:
        """A rule; what it is called."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {rule}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """A rule of values in JSON."""
        return self.add(f"%json {json.dumps({'x-guidance': COMPACT, **schema})}")

    def choice(self, options: Iterable[str]) -> str:
        """One of several, in parentheses."""
        return f"({' | '.join(options)})"

    def grammar(self, *start: str) -> Grammar:
        """All of it."""
        return Grammar(
            GrammarKind.GRAMMAR,
            "\n".join([f"start: {' '.join(filter(None, start))}", *self._rules]),
        )


def named_calls(functions: Sequence[Function], begin: str, between: str, rules: Rules) -> Grammar:
    """Mistral's: the function's name, `between`, and its arguments in JSON."""
    calls = [
        f"{rules.text(function['name'] + between)} {rules.json(arguments_of(function))}"
        for function in functions
    ]
    return rules.grammar(rules.text(begin), rules.choice(calls))


def python_calls(functions: Sequence[Function], tags: tuple[str, str], rules: Rules) -> Grammar:
    """Llama's: [f(x="y")]."""
    calls = []
    for function in functions:
        needed, others = list[str](), list[str]()
        for name, schema, required in _properties(arguments_of(function)):
            truth = schema.get("type") == "boolean"
            value = '("True" | "False")' if truth else rules.json(schema)
            (needed if required else others).append(f"{rules.text(name + '=')} {value}")
        given = ' ", " '.join(needed)
        if needed:
            given += "".join(f' (", " {one})?' for one in others)
        elif others:
            given = _some_of(others, rules)
        calls.append(f"{rules.text(function['name'] + '(')} {given} {rules.text(')')}")
    begin, end = tags
    return rules.grammar(rules.text(begin + "["), rules.choice(calls), rules.text("]" + end))


def xml_calls(functions: Sequence[Function], tags: tuple[str, str], rules: Rules) -> Grammar:
    """Qwen3-Coder's: each parameter between its own tags, as text or in JSON."""
    calls = []
    for function in functions:
        parts = [rules.text(f"<function={function['name']}>\n")]
        for name, schema, required in _properties(arguments_of(function)):
            value = _xml_value(schema, rules)
            part = f"{rules.text(f'<parameter={name}>')} {value}"
            parts.append(part if required else f"({part})?")
        calls.append(" ".join([*parts, rules.text("</function>")]))
    begin, end = tags
    return rules.grammar(rules.text(begin + "\n"), rules.choice(calls), rules.text("\n" + end))


def _xml_value(schema: Mapping[str, Any], rules: Rules) -> str:
    """A value with its end tag."""
    end = "\n</parameter>\n"
    names = [schema["const"]] if "const" in schema else schema.get("enum")
    begin = rules.text("\n")
    if isinstance(names, list):
        words = [one if isinstance(one, str) else json.dumps(one) for one in names]
        return f"{begin} {rules.choice(map(rules.text, words))} {rules.text(end)}"
    types = schema.get("type")
    if types is None or types == "string" or (isinstance(types, list) and "string" in types):
        most = schema.get("maxLength")
        form = rf"/(.|\n){{0,{most}}}/" if isinstance(most, int) else _ANY
        return f"{begin} {rules.add(form, f'[suffix={json.dumps(end)}]')}"
    return f"{begin} {rules.json(schema)} {rules.text(end)}"


def _some_of(options: Sequence[str], rules: Rules) -> str:
    """None, one or several, in their order, with commas between."""
    after = first = ""
    for option in reversed(options):
        alone = f"{option} {after}".strip()
        first = rules.add(f"{alone} | {first}" if first else alone)
        after = rules.add(f'(", " {option})? {after}'.strip())
    return f"{first}?"


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Names, schemas that stand alone, and whether they must be there, of an object's."""
    shared = schema.get("$defs", {})
    root = shared.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    properties, required = root.get("properties"), root.get("required")
    needed = required if isinstance(required, list) else []
    found = []
    for name, value in (properties if isinstance(properties, dict) else {}).items():
        if value is False:
            continue
        alone = dict(value) if isinstance(value, dict) else {}
        target = shared.get(str(alone.get("$ref", "")).rpartition("/")[2])
        if isinstance(target, dict) and len(alone) == 1:
            alone = dict(target)
        found.append((name, {**alone, "$defs": shared} if shared else alone, name in needed))
    return found

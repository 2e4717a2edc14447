"""What a tool's schema says of its parameters, for calls that write them as plain text."""

import json
from collections.abc import Mapping
from typing import Any, Final

from hmt.text.tool_calls.python_literal import read_literal

_MAX_DEPTH: Final = 16  # schemas inside one another
_NAMES: Final = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip


class Parameters:
    """The parameters of one tool."""

    def __init__(self, schema: Mapping[str, Any] | None = None) -> None:
        """schema: of its arguments; None: not known."""
        self._schema = schema if isinstance(schema, Mapping) else {}
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._properties

    def name_of(self, number: int) -> str:
        """That of a parameter that is told by its place."""
        names = list(self._properties)
        return names[number] if number < len(names) else f"argument{number}"

    def is_text(self, name: str) -> bool:
        """Whether a value is text, whatever it looks like."""
        types = self._types(name)
        return types is None or types == {"string"}

    def typed(self, name: str, said: str) -> Any:
        """The value that `said` stands for."""
        types, word = self._types(name), said.strip()
        if types is None:
            return said
        if "null" in types and word in ("null", "None"):
            return None
        if "string" in types:
            return said
        if (types & {"boolean"} or not types) and word.lower() in ("true", "false"):
            return word.lower() == "true"
        try:
            value = read_json(word)
        except (ValueError, RecursionError):
            try:
                value = read_literal(word)
            except ValueError:
                return said
        if isinstance(value, float) and "number" not in types and "integer" in types:
            return int(value) if value.is_integer() else value
        return value

    def _types(self, name: str) -> set[str] | None:
        """Those it may have: none where its schema does not say, None without a schema."""
        if name not in self._properties:
            return None
        return self._types_of(self._properties[name], _MAX_DEPTH)

    def _types_of(self, schema: Any, depth: int) -> set[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return set()
        types = schema.get("type")
        if isinstance(types, str):
            return {types}
        if isinstance(types, list):
            return {one for one in types if isinstance(one, str)}
        if "const" in schema:
            return {_NAMES.get(type(schema["const"]), "string")}
        if isinstance(schema.get("enum"), list):
            return {_NAMES.get(type(one), "string") for one in schema["enum"]}
        if isinstance(schema.get("$ref"), str):
            return self._types_of(self._referred(schema["$ref"]), depth - 1)
        found: set[str] = set()
        for key in ("anyOf", "oneOf", "allOf"):
            several = schema.get(key)
            for one in several[:64] if isinstance(several, list) else ():
                found |= self._types_of(one, depth // 2)
        return found

    def _referred(self, reference: str) -> Any:
        target: Any = self._schema
        for step in reference.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        return target


def read_json(text: str) -> Any:
    """A value in JSON; line breaks in strings are taken as they are.  Raises ValueError."""

    def refuse(word: str) -> Any:
        raise ValueError(f"JSON has no {word}")

    return json.loads(text, strict=False, parse_constant=refuse)


def as_json(value: Any) -> str:
    """As arguments have it."""
    return json.dumps(value, ensure_ascii=False)

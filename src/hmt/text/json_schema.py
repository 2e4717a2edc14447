"""JSON schemas as llguidance takes them: https://json-schema.org/draft/2020-12.

Clients send what pydantic, zod and others make of types.  llguidance has no `not` and no format
that it does not know, and goes on for ever in a schema that needs itself.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote

from hmt.base.errors import RequestError
from hmt.base.log import warn_once
from hmt.text.json_pattern import without_lookaround

MAX_DEPTH: Final = 64  # schemas inside one another
MAX_SCHEMAS: Final = 20_000  # in one document
_MAX_WORK: Final = 300_000  # schemas looked at to see which can be met: half a second

_TYPES: Final = ("null", "boolean", "object", "array", "number", "string")
FORMATS: Final = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
_VERBATIM: Final = frozenset({
    "type", "const", "enum", "required", "minItems", "maxItems", "minProperties", "maxProperties",
    "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "x-guidance",
})  # fmt: skip
_ONE: Final = frozenset({"items", "additionalProperties", "additionalItems"})
_LIST: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAP: Final = frozenset({"properties", "patternProperties"})
_UNHELD: Final = frozenset({
    "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "unevaluatedItems", "$dynamicRef", "$recursiveRef",
})  # fmt: skip


def prepared(source: str, layout: Mapping[str, Any], name: str = "json_schema") -> str:
    """`prepare` of a schema that is text."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the {name} is not JSON that can be read: {error}") from error
    return json.dumps(prepare(schema, layout, name))


def prepare(
    schema: Any,
    layout: Mapping[str, Any] | None = None,
    name: str = "json_schema",
    prefix: str = "d",
) -> dict[str, Any]:
    """What llguidance can hold an answer to, of `schema`, which is not changed.

    layout   what llguidance is told of white space, unless the schema says so itself
    name     what errors call it
    prefix   that names in the result's `$defs` begin with

    The result stands alone: it has what it refers to in its own `$defs`, and nothing else.
    Annotations are left out, unknown formats among them, and with a warning what grammars lack of
    patterns.  `oneOf` is held to as `anyOf` is where its alternatives overlap.  `not` may forbid
    types, values of an enum, a property, or everything.  What cannot be met is left out of
    alternatives and of properties that may be missing.

    Raises RequestError for a schema that no answer can meet, for keywords that answers cannot be
    held to, for references to what is not in it, and above MAX_DEPTH or MAX_SCHEMAS.
    """
    if not isinstance(schema, dict | bool):
        raise RequestError(f"the {name} must be an object, not {type(schema).__name__}")
    document = _Document(schema, name, prefix)
    root = document.convert(schema, 0)
    document.convert_targets()
    possible = _Possible(document.targets, name)
    endless = [document.references[one] for one in document.targets if one not in possible.met]
    root = possible.prune(root)
    if root is False:
        why = "it allows nothing"
        if endless:
            why = f"it needs {', '.join(endless)[:200]}, and that itself again without end"
        raise RequestError(
            f"no answer can have the form of the {name}: {why}; let one of its properties be "
            "missing, or give an alternative that ends"
        )
    result = dict(root) if isinstance(root, dict) else {}
    if document.targets:
        result["$defs"] = document.targets
    options = result.get("x-guidance")
    chosen = dict(layout or {}) if not isinstance(options, dict) else options
    # Both alternatives may hold: what one says in JSON is rarely meant to be in no other.
    return {**result, "x-guidance": {"coerce_one_of": True, **chosen}}


class _Document:
    """One schema, and those in it that are referred to, by the names they have in the result."""

    def __init__(self, root: Any, name: str, prefix: str) -> None:
        self._root, self._name, self._prefix = root, name, prefix
        self._count = 0
        self._known: dict[int, str] = {}  # names by the identity of what is referred to
        self._pending: list[tuple[str, Any]] = []
        self._places: dict[str, Any] | None = None  # by $id and $anchor
        self.references: dict[str, str] = {}  # how the schema writes what has a name in `targets`
        self.targets: dict[str, Any] = {}

    def convert_targets(self) -> None:
        """All that was referred to until nothing new is."""
        while self._pending:
            name, schema = self._pending.pop()
            self.targets[name] = self.convert(schema, 0)

    def convert(self, schema: Any, depth: int) -> Any:
        """One schema and those inside it."""
        self._count += 1
        if self._count > MAX_SCHEMAS or depth > MAX_DEPTH:
            raise RequestError(
                f"the {self._name} is too large: it may have {MAX_SCHEMAS} schemas, "
                f"{MAX_DEPTH} inside one another; leave out what answers do not need"
            )
        if not isinstance(schema, dict):
            return schema
        made: dict[str, Any] = {}
        for key, value in schema.items():
            self._keyword(made, key, value, depth + 1)
        if "not" in schema and not self._exclude(made, schema["not"], depth + 1):
            return False
        if "propertyNames" in schema:
            self._name_properties(made, schema["propertyNames"])
        if isinstance(made.get("items"), list):  # of draft 7 and before
            made["prefixItems"] = made.pop("items")
            if "additionalItems" in made:
                made["items"] = made.pop("additionalItems")
        made.pop("additionalItems", None)
        return made

    def _keyword(self, made: dict[str, Any], key: str, value: Any, depth: int) -> None:
        def many(schemas: list[Any]) -> list[Any]:
            return [self.convert(one, depth) for one in schemas]

        if key in _VERBATIM:
            made[key] = value
        elif key in _LIST or (key == "items" and isinstance(value, list)):
            made[key] = [*made.get(key, ()), *many(value)] if isinstance(value, list) else value
        elif key in _ONE:
            made[key] = self.convert(value, depth)
        elif key in _MAP:
            whole = isinstance(value, dict)
            made[key] = (
                dict(zip(value, many(list(value.values())), strict=True)) if whole else value
            )
        elif key == "$ref":
            made[key] = self._refer(value)
        elif key == "format":
            known = re.sub(r"^uuid[1-8]$", "uuid", str(value))
            if known in FORMATS:
                made[key] = known
        elif key == "pattern":
            if isinstance(value, str):
                self._pattern(made, value)
            else:
                made[key] = value
        elif key in _UNHELD and not (key == "uniqueItems" and value is False):
            raise self._unheld(key)

    def _pattern(self, made: dict[str, Any], pattern: str) -> None:
        patterns, exact = without_lookaround(pattern)
        if not exact:
            warn_once(
                "patterns of schemas",
                f"the pattern {pattern[:100]!r} has look-around, borders of words or references to "
                "groups, which answers are not held to: check it where they are used",
            )
        for number, one in enumerate(patterns):
            if number == len(patterns) - 1:
                made["pattern"] = one
            else:
                made["allOf"] = [*_listed(made, "allOf"), {"pattern": one}]

    def _exclude(self, made: dict[str, Any], excluded: Any, depth: int) -> bool:
        """Forbid what is `excluded`, as far as that can be said; False: all of it is."""
        if _allows_all(excluded):
            return False
        said = [] if not isinstance(excluded, dict) else list(filter(_asserts, excluded))
        match {key: excluded[key] for key in said} if len(said) == 1 else excluded:
            case {"type": types} if len(said) == 1:
                gone = types if isinstance(types, list) else [types]
                if "integer" in gone and "number" not in gone:
                    raise self._unheld("not")  # there are no numbers that are no integers
                return _exclude_types(made, gone)
            case {"const": value} if len(said) == 1 and _is_finite(made):
                return _exclude_values(made, [value])
            case {"enum": list() as values} if len(said) == 1 and _is_finite(made):
                return _exclude_values(made, values)
            case {"required": [str() as name]} if len(said) == 1:
                if "object" not in _types(made):
                    return False
                made["type"] = "object"
                properties = made.get("properties")
                made["properties"] = {
                    **(properties if isinstance(properties, dict) else {}),
                    name: False,
                }
            case {"not": inner} if len(said) == 1:
                made["allOf"] = [*_listed(made, "allOf"), self.convert(inner, depth)]
            case {"anyOf": list() as several} if len(said) == 1 and depth < MAX_DEPTH:
                return all(self._exclude(made, one, depth + 1) for one in several)
            case False:
                pass
            case _:
                raise self._unheld("not")
        return True

    def _name_properties(self, made: dict[str, Any], names: Any) -> None:
        """What properties may be called: as zod says it of records."""
        said = {key for key in names if _asserts(key)} if isinstance(names, dict) else set()
        if names is True or (isinstance(names, dict) and not said - {"type"}):
            return
        if made.keys() & _MAP or not isinstance(names, dict):
            raise self._unheld("propertyNames")
        values, pattern = names.get("enum"), names.get("pattern")
        others = made.get("additionalProperties", True)
        if said <= {"type", "enum"} and isinstance(values, list):
            made["properties"] = {one: others for one in values if isinstance(one, str)}
        elif said <= {"type", "pattern"} and without_lookaround(str(pattern)) == ([pattern], True):
            made["patternProperties"] = {pattern: others}
        else:
            raise self._unheld("propertyNames")
        made["additionalProperties"] = False

    def _refer(self, reference: Any) -> Any:
        """A reference to the same in the result."""
        target, seen = self._target(reference), set[int]()
        # Chains of references, however long, are one.
        while isinstance(target, dict) and id(target) not in seen:
            seen.add(id(target))
            others = [key for key in target if key not in ("$defs", "definitions")]
            if [key for key in others if _asserts(key)] != ["$ref"]:
                break
            target = self._target(target["$ref"])
        name = self._known.get(id(target))
        if name is None:
            name = self._known[id(target)] = f"{self._prefix}{len(self._known)}"
            self._pending.append((name, target))
            self.references[name] = reference
        return f"#/$defs/{name}"

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str):
            raise self._unknown(reference)
        if self._places is None:
            self._places = _places(self._root)
        base, _, fragment = reference.partition("#")
        schema = self._places.get(base) if base else self._root
        if fragment and not fragment.startswith("/"):
            schema = self._places.get("#" + fragment)
        elif fragment and schema is not None:
            for step in unquote(fragment[1:]).split("/"):
                step = step.replace("~1", "/").replace("~0", "~")
                if isinstance(schema, dict):
                    schema = schema.get(step)
                elif isinstance(schema, list) and step.isdecimal() and len(step) < 9:
                    schema = schema[int(step)] if int(step) < len(schema) else None
                else:
                    schema = None
        if not isinstance(schema, dict | bool):
            raise self._unknown(reference)
        return schema

    def _unheld(self, keyword: str) -> RequestError:
        return RequestError(
            f"the {self._name} has {keyword!r} in a way that answers cannot be held to: leave it "
            "out, and check it where the answer is used"
        )

    def _unknown(self, reference: Any) -> RequestError:
        return RequestError(
            f"the {self._name} refers to {str(reference)[:100]!r}, which is not in it: put it into "
            'its "$defs"'
        )


class _Possible:
    """Which schemas can be met by something that ends: `met`, by name."""

    def __init__(self, targets: dict[str, Any], name: str) -> None:
        self._targets, self._name = targets, name
        self._work = 0
        self.met: set[str] = set()
        before = -1
        while len(self.met) != before:
            before = len(self.met)
            # What was referred to last is most often what the others need.
            for one in reversed(targets):
                if one not in self.met and self._can(targets[one]):
                    self.met.add(one)

    def prune(self, root: Any) -> Any:
        """The same without what cannot be met; False where that is all.  Changes the targets."""
        for name in list(self._targets):
            if name in self.met:
                self._targets[name] = self._pruned(self._targets[name])
            else:
                del self._targets[name]
        return self._pruned(root)

    def _can(self, schema: Any) -> bool:
        self._work += 1
        if self._work > _MAX_WORK:
            raise RequestError(
                f"the {self._name} has {len(self._targets)} schemas that refer to one another in "
                "more ways than can be followed: make it simpler"
            )
        return bool(self._ways(schema, self._can))

    def _pruned(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        made = dict(schema)
        for key in _LIST & made.keys():
            parts = map(self._pruned, _listed(made, key))
            made[key] = [one for one in parts if key not in ("anyOf", "oneOf") or one is not False]
        for key in _ONE & made.keys():
            made[key] = self._pruned(made[key])
        for key in _MAP & made.keys():
            if isinstance(made[key], dict):
                made[key] = {name: self._pruned(one) for name, one in made[key].items()}
        ways = self._ways(made, lambda one: one is not False)
        if len(ways) < len(_types(made)):
            made["type"] = ways
        return made if ways else False

    def _ways(self, schema: Any, can: Callable[[Any], bool]) -> list[Any]:
        """The types in which a schema can be met, when `can` tells it of those inside."""
        if not isinstance(schema, dict):
            return [] if schema is False else list(_TYPES)
        if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in self.met:
            return []
        if not all(map(can, _listed(schema, "allOf"))):
            return []
        for key in ("anyOf", "oneOf"):
            if key in schema and not any(map(can, _listed(schema, key))):
                return []
        return [
            one
            for one in _types(schema)
            if not (one == "object" and not _can_be_object(schema, can))
            and not (one == "array" and not _can_be_array(schema, can))
        ]


def _can_be_object(schema: Mapping[str, Any], can: Callable[[Any], bool]) -> bool:
    properties = schema.get("properties")
    named = properties if isinstance(properties, dict) else {}
    free = bool(schema.get("patternProperties")) or can(schema.get("additionalProperties", True))
    return all(
        can(named[name]) if name in named else free
        for name in _listed(schema, "required")
        if isinstance(name, str)
    )


def _can_be_array(schema: Mapping[str, Any], can: Callable[[Any], bool]) -> bool:
    least, first = schema.get("minItems"), _listed(schema, "prefixItems")
    least = max(0, least) if isinstance(least, int) else 0
    return all(map(can, first[:least])) and (least <= len(first) or can(schema.get("items", True)))


def _types(schema: Mapping[str, Any]) -> list[Any]:
    """Those that a schema allows, as far as it says."""
    types = schema.get("type", list(_TYPES))
    return types if isinstance(types, list) else [types]


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _exclude_types(made: dict[str, Any], types: list[Any]) -> bool:
    """Take types from those that are allowed; False: none is left."""
    gone = [*types, "integer"] if "number" in types else types
    made["type"] = [one for one in _types(made) if one not in gone]
    return bool(made["type"])


def _is_finite(schema: Mapping[str, Any]) -> bool:
    """Whether it allows certain values by name."""
    return "const" in schema or isinstance(schema.get("enum"), list)


def _exclude_values(made: dict[str, Any], values: list[Any]) -> bool:
    """Take `values` from those that are allowed by name; False: none is left."""
    if "const" in made:
        return not any(_same(made["const"], one) for one in values)
    made["enum"] = [one for one in made["enum"] if not any(_same(one, other) for other in values)]
    return bool(made["enum"])


def _same(one: Any, other: Any) -> bool:
    """As JSON has it: 1 is 1.0, and true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not any(map(_asserts, schema)))


def _asserts(key: str) -> bool:
    """Whether a keyword says what is allowed, and is no annotation."""
    return key in _VERBATIM | _ONE | _LIST | _MAP | _UNHELD or key in (
        "$ref",
        "not",
        "format",
        "pattern",
        "propertyNames",
    )


def _places(root: Any) -> dict[str, Any]:
    """Schemas by their `$id` and `$anchor`."""
    places: dict[str, Any] = {}
    pending: list[Any] = [root]
    while pending:
        schema = pending.pop()
        if isinstance(schema, dict):
            for key, mark in (("$id", ""), ("id", ""), ("$anchor", "#")):
                if isinstance(schema.get(key), str):
                    places.setdefault(mark + schema[key].removesuffix("#"), schema)
            pending += schema.values()
        elif isinstance(schema, list):
            pending += schema
    return places

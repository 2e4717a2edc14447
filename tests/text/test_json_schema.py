"""JSON schemas as clients send them, held to by grammars; jsonschema_rs judges what comes out."""

import json
import random
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import UUID4, BaseModel, Field

from hmt.base.errors import RequestError
from hmt.cli.options import embedded_model
from hmt.contracts.request import Grammar, GrammarKind
from hmt.text import Tokenizer
from hmt.text.json_pattern import without_lookaround
from hmt.text.json_schema import FORMATS, MAX_DEPTH, MAX_SCHEMAS, prepare

TOKENIZER = Tokenizer.open(embedded_model())
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic 2.12's
PLACES = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"  # likewise
CLOSING = {b'"', b"}", b"]", b'"}', b"]}", b"}}", b'"]'}


def answer(schema: Any, seed: int, most: int = 400) -> Any:
    """What chance says under the grammar of `schema`; strings and lists end before long."""
    chance = random.Random(seed)
    form = TOKENIZER.grammars.open(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    said = b""
    for number in range(most):
        allowed = form.allowed().tolist()
        if form.complete or set(allowed) & TOKENIZER.eos_ids:
            return json.loads(said)
        if number > 24:
            allowed = [t for t in allowed if TOKENIZER.token_bytes(t) in CLOSING] or allowed
        token = chance.choice(allowed)
        form.push(token)
        said += TOKENIZER.token_bytes(token)
        if form.complete:
            return json.loads(said)
    pytest.fail(f"no end after {said!r}")


def allows(schema: Any, text: str) -> bool:
    form = TOKENIZER.grammars.open(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    for token in TOKENIZER.encode(text):
        if form.complete or token not in form.allowed().tolist():
            return False
        form.push(token)
    return form.complete or bool(set(form.allowed().tolist()) & TOKENIZER.eos_ids)


class Inner(BaseModel):
    a: int
    price: Decimal
    kind: Literal["x", "y"] = "x"


class Tree(BaseModel):
    """Refers to itself."""

    name: Annotated[str, Field(max_length=8)]
    children: list["Tree"] = []
    other: "Tree | None" = None


class Everything(BaseModel):
    inner: Inner
    several: Annotated[list[Inner], Field(max_length=2)]
    either: Annotated[Inner | Tree, Field(description="one of them")]
    by_name: Annotated[dict[str, int], Field(max_length=2)]
    exact: Annotated[Decimal, Field(max_digits=5, decimal_places=2)]
    id: UUID4
    path: Path


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False}  # fmt: skip


NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "additionalProperties": False}
INT, STR = {"type": "integer"}, {"type": "string"}
HELD = [
    Inner.model_json_schema(),
    Tree.model_json_schema(),
    Everything.model_json_schema(),
    Inner.model_json_schema(mode="serialization"),  # Decimal is text alone
    {"definitions": {"I": obj(a=INT)}, **obj(i={"$ref": "#/definitions/I"})},
    {"$defs": {"N": NODE}, "$ref": "#/$defs/N"},
    {"$defs": {"I": {"$anchor": "here", **obj(a=INT)}}, **obj(i={"$ref": "#here"})},
    {"$defs": {"I": {"$id": "https://x/y", "type": "integer"}}, **obj(i={"$ref": "https://x/y"})},
    obj(a=INT, b={"$ref": "#/properties/a"}),
    {"$defs": {"x/~y z": INT}, **obj(i={"$ref": "#/$defs/x~1~0y%20z"})},
    obj(v={"oneOf": [{"const": "a"}, {"const": "b"}], "discriminator": {"propertyName": "k"}}),
    obj(a={"not": {"type": ["string", "object", "array"]}}),
    obj(a={"type": ["string", "null"], "not": {"type": "string"}}),
    obj(a={"enum": ["a", "b", 1], "not": {"const": "a"}}),
    obj(a={"enum": ["a", "b", 1, True], "not": {"enum": [1, "b"]}}),
    obj(a={"enum": [1, 2, 3], "not": {"anyOf": [{"const": 1}, {"const": 3}]}}),
    obj(a={"not": {"not": {"enum": [1, 2]}}}),
    {"pattern": "^(?=a)(?!.*b)", "maxLength": 3, "minimum": 5, "maximum": 6, "maxItems": 0,
     "maxProperties": 0},
    {"type": "object", "propertyNames": {"type": "string"}, "properties": {"a": INT},
     "additionalProperties": False},
    {"type": "array", "uniqueItems": False, "maxItems": 1},
    {**NODE, "$defs": {"N": INT}, "not": {"required": ["n"]}},
    obj(a={"anyOf": [{"not": {}}, {"enum": [1, 2]}]}),  # zod's optional
    {"type": "object", "properties": {"a": {"not": {}}, "b": INT}, "required": ["b"],
     "additionalProperties": False},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INT,
     "maxProperties": 2},  # zod's record
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT,
     "required": ["a"]},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": INT,
     "maxProperties": 1},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
     "items": [INT, {"const": "x"}], "additionalItems": False, "minItems": 2},
    {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,9}$"},
    {"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-c.]{2,5}$"},
    {"type": "string", "pattern": r"^(?!0)\d{2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "pattern": DECIMAL},
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": PLACES}]},
    {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/C", "title": "b"}, "C": INT},
     "$ref": "#/$defs/A"},
    obj(a={"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}),
    {"type": "object", "properties": {"$ref": {"type": "integer"}, "not": {"type": "boolean"}},
     "required": ["$ref", "not"], "additionalProperties": False},
    obj(a={"const": {"$ref": "nowhere", "not": {}}}),
    # What cannot be met is no trap.
    {"$defs": {"E": obj(e={"$ref": "#/$defs/E"})},
     "type": "object", "properties": {"e": {"$ref": "#/$defs/E"}, "b": INT}, "required": ["b"],
     "additionalProperties": False},
    {"$defs": {"E": obj(e={"$ref": "#/$defs/E"})},
     **obj(a={"anyOf": [{"$ref": "#/$defs/E"}, INT]})},
    {"$defs": {"E": obj(e={"$ref": "#/$defs/E"})},
     **obj(a={"type": "array", "items": {"$ref": "#/$defs/E"}})},
    {"$defs": {"E": {**obj(e={"$ref": "#/$defs/E"}), "type": ["object", "null"]}},
     "$ref": "#/$defs/E"},
]  # fmt: skip


@pytest.mark.parametrize("schema", HELD, ids=lambda schema: json.dumps(schema)[:60])
def test_answers_are_what_the_schema_says(schema: Any) -> None:
    judge = jsonschema_rs.validator_for(schema, validate_formats=True)
    before = json.dumps(schema)
    for seed in range(6):
        said = answer(schema, seed)
        assert judge.is_valid(said), (said, prepare(schema))
    assert json.dumps(schema) == before


ANNOTATED = [
    *({"type": "string", "format": name} for name in
      ("int32", "phone", "binary", "password", "idn-email", "uri-reference", "regex", "uuid4")),
    {"type": "integer", "format": "int64", "title": "T", "default": 1, "examples": [2],
     "deprecated": True, "readOnly": True, "x-foo": {"$ref": "nowhere"}, "example": 3},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://x/", "type": "object"},
]  # fmt: skip


@pytest.mark.parametrize("schema", ANNOTATED, ids=lambda schema: json.dumps(schema)[:60])
def test_annotations_change_nothing(schema: Any) -> None:
    answer(schema, 1)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_known_formats_are_known(name: str) -> None:
    assert not allows({"type": "string", "format": name}, '"no such {thing}"')


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": INT}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "integer", "if": {"minimum": 3}, "then": {"multipleOf": 2}}, "if"),
        ({"type": "integer", "not": {"multipleOf": 2}}, "not"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"type": "number", "not": {"type": "integer"}}, "not"),
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": INT}}, "propertyNames"),
        (obj(a={"anyOf": [INT, {"unevaluatedProperties": False}]}), "unevaluatedProperties"),
    ],
    ids=str,
)
def test_what_answers_cannot_be_held_to_is_refused(schema: Any, keyword: str) -> None:
    with pytest.raises(RequestError, match=f"has '{keyword}'"):
        prepare(schema)


@pytest.mark.parametrize("pattern", [r"^[a-c]+(?=x)x?$", r"^([ab])\1$", r"^a\b.{0,3}$"])
def test_what_patterns_lose_is_told_in_the_log(
    pattern: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hmt.base.log._warned", set())
    schema = {"type": "string", "pattern": pattern, "maxLength": 9}
    answer(schema, 1)
    prepare(schema)
    (record,) = caplog.records
    assert "not held to" in record.message and pattern[:20] in record.message.replace("\\\\", "\\")


ENDLESS = obj(n={"$ref": "#/$defs/N"})
NEVER = [
    {"$defs": {"N": ENDLESS}, "$ref": "#/$defs/N"},
    {"$ref": "#"},
    {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
    {"$defs": {"N": {"type": "array", "items": {"$ref": "#/$defs/N"}, "minItems": 1}},
     "$ref": "#/$defs/N"},
    {"$defs": {"N": {"anyOf": [ENDLESS, {"allOf": [INT, {"$ref": "#/$defs/N"}]}]}},
     "$ref": "#/$defs/N"},
    {"$defs": {"N": {"type": "object", "required": ["x"], "additionalProperties": {
        "$ref": "#/$defs/N"}}}, "$ref": "#/$defs/N"},
    {"not": {}}, {"not": True}, obj(a={"not": {}}), obj(a=False), {"anyOf": []}, {"type": []},
    {"type": "string", "not": {"type": "string"}}, {"enum": [1], "not": {"const": 1.0}},
    {"const": 3, "not": {"enum": [3]}},
]  # fmt: skip


@pytest.mark.parametrize("schema", NEVER, ids=lambda schema: json.dumps(schema)[:60])
def test_what_no_answer_can_meet_is_refused(schema: Any) -> None:
    judge = (
        jsonschema_rs.validator_for(schema) if schema not in ({"type": []}, {"anyOf": []}) else None
    )
    with pytest.raises(RequestError, match="no answer can have the form"):
        TOKENIZER.grammars.open(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    values = [None, 1, "a", [], {}, [[]], {"n": {}}, {"x": 1}]
    if judge is not None and "$ref" not in schema:
        assert not any(judge.is_valid(value) for value in values)


def deep(levels: int) -> Any:
    schema: Any = INT
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#/$defs/nowhere"}, "not in it"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "not in it"),
        ({"$ref": 3}, "not in it"),
        ({"$ref": "#/enum/0", "enum": [1]}, "not in it"),
        (deep(MAX_DEPTH + 1), "too large"),
        (deep(100), "too large"),
        ({"anyOf": [INT] * MAX_SCHEMAS}, "too large"),
        ({"not": {"not": deep(MAX_DEPTH)}}, "too large"),
        ([1], "object"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bounds_and_references(schema: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        prepare(schema)


def test_chains_of_references_are_short() -> None:
    """However long: the grammar's compiler follows each with one more nested call."""
    many = 4000
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(many)}
    made = prepare({"$defs": {**chain, f"d{many}": INT}, "$ref": "#/$defs/d0"})
    assert len(made["$defs"]) == 1
    # Each needs the next: found out backwards in one pass, and told when the order is against it.
    chain = {f"d{n}": obj(a={"$ref": f"#/$defs/d{n + 1}"}) for n in range(many)}
    assert len(prepare({"$defs": {**chain, f"d{many}": INT}, "$ref": "#/$defs/d0"})["$defs"]) > many


KEYWORDS = st.sampled_from(
    ["$ref", "not", "anyOf", "allOf", "oneOf", "items", "properties", "type", "enum", "const",
     "required", "pattern", "format", "prefixItems", "propertyNames", "minItems", "$defs",
     "additionalProperties", "$id", "x-guidance", "if", "patternProperties"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9)
    | st.sampled_from(["#", "#/$defs/a", "a", "object", "(?=", "[", "array"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(KEYWORDS | st.sampled_from("ab"), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None, max_examples=120)
@given(st.dictionaries(KEYWORDS, VALUES, max_size=5))
def test_anything_is_taken_or_refused(schema: Any) -> None:
    try:
        made = prepare(schema)
    except RequestError:
        return
    prepare({**made, "x-guidance": {}})  # which has what it refers to


TEXTS = st.text(alphabet="ab.0+-", max_size=6)


@pytest.mark.parametrize(
    "pattern",
    [
        DECIMAL, "^(?=.*a)(?=b)[ab.]*$", r"^(?!\.)(?!.*\.\.)[a.]*$", r"^(?!.*[ab])", "^(?!$)[ab]*$",
        r"^(?![^a])", r"^(?!\d)", r"^(?!-)[-a]*$", r"^(?=a|b).b$", r"^(?!.*\.{2})", "plain", "^a$",
        r"^(?=a\)|[)b])[)ab]*$",
    ],
)  # fmt: skip
def test_lookahead_becomes_conditions(pattern: str) -> None:
    """Python's own look-ahead is the oracle."""

    @given(TEXTS)
    def check(text: str) -> None:
        patterns, exact = without_lookaround(pattern)
        assert exact and not any("(?=" in one or "(?!" in one for one in patterns)
        assert bool(re.search(pattern, text)) == all(re.search(one, text) for one in patterns)

    check()


@pytest.mark.parametrize(
    "pattern",
    [r"a(?=b)b", r"^(?!abc)a", r"(?<!a)b", r"\bab\b", r"^[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\.a)$"],
)
def test_other_lookaround_is_left_out(pattern: str) -> None:
    @given(TEXTS)
    def check(text: str) -> None:
        patterns, exact = without_lookaround(pattern)
        assert not exact and not any("(?=" in one or "(?!" in one for one in patterns)
        if re.search(pattern, text):
            assert all(re.search(one, text) for one in patterns)

    check()


@given(st.text(alphabet="^$()[]?!=<*+|\\ab.b1k{}", max_size=12))
def test_any_pattern_is_read(pattern: str) -> None:
    without_lookaround(pattern)

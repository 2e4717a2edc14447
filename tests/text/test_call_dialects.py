"""Calls in the ways that models write them, as their templates and vLLM's parsers document them.

What grammars allow is read back, and how an answer is cut makes no difference.
"""

import ast
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hmt.base.errors import RequestError
from hmt.cli.options import embedded_model
from hmt.contracts.request import GrammarKind
from hmt.text import Tokenizer, ToolCall, ToolStyle, whole_calls
from hmt.text.tool_calls.python_literal import MAX_DEPTH, read_literal

TOKENIZER = Tokenizer.open(embedded_model())
HERMES = ToolStyle.of("{{ tools }}<tool_call>")
# As in the templates of Qwen3-Coder, Llama 4 (and vLLM's for 3.2), LFM2 and Mistral Small 3.2.
CODER = ToolStyle.of(
    "{{ tools }}<tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>"
)
LLAMA = ToolStyle.of(
    "{{ tools }}[func_name1(params_name1=params_value1, params_name2=...), f(params)]"
)
LFM = ToolStyle.of("{{ tools }}<|tool_call_start|>")
MISTRAL = ToolStyle.of("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}")
OLD = ToolStyle.of("{{ tools }}[TOOL_CALLS] [{% if id|length != 9 %}")
LLAMA3 = ToolStyle.of("""{{ tools }}'{"name": ' + x + ', "parameters": '""")
STYLES = {"hermes": HERMES, "coder": CODER, "llama": LLAMA, "lfm": LFM, "mistral": MISTRAL,
          "old": OLD, "llama3": LLAMA3}  # fmt: skip

WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"}, "text": {"type": "string"}, "lines": {"type": "integer"},
        "share": {"type": "number"}, "force": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"anyOf": [{"$ref": "#/$defs/More"}, {"type": "null"}]},
        "mode": {"enum": ["a", "w"]}, "maybe": {"type": ["string", "null"]}, "any": {},
    },
    "$defs": {"More": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": WRITE}},
         {"type": "function", "function": {"name": "get-time"}}]  # fmt: skip
NAMES = ["write", "get-time"]


def read(style: ToolStyle, *parts: str, early: bool = False) -> tuple[str, list[Any]]:
    reader = style.reader(NAMES, TOOLS, early=early)
    shown, calls = "", list[ToolCall]()
    for part in parts:
        text, found = reader.push(part)
        shown, calls = shown + text, calls + found
    text, found = reader.flush()
    return shown + text, [(one.name, one.arguments, one.id) for one in whole_calls(calls + found)]


def xml(name: str, **values: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


FILE = 'if a < b:\n    print("<parameter=x>")\n</parameter>\nx = "</tool_call>"\n</function> \\ é\n'
CASES: list[tuple[ToolStyle, str, str, list[tuple[str, Any]]]] = [
    (CODER, xml("write", path="a/b", lines="3", share="0.5", force="True", tags='["a", "b"]',
                more='{"x": 1}', mode="w", maybe="null", any='{"y": [2]}'), "",
     [("write", {"path": "a/b", "lines": 3, "share": 0.5, "force": True, "tags": ["a", "b"],
                 "more": {"x": 1}, "mode": "w", "maybe": None, "any": {"y": [2]}})]),
    (CODER, xml("write", path="5", lines="five", more="None", maybe="x", tags="['a']", any="a b",
                other="7", share="5"), "",
     [("write", {"path": "5", "lines": "five", "more": None, "maybe": "x", "tags": ["a"],
                 "any": "a b", "other": "7", "share": 5})]),
    (CODER, xml("write", text=FILE, path=""), "", [("write", {"text": FILE, "path": ""})]),
    (CODER, "Well.\n\n" + xml("get-time") + "\n" + xml("write", path="x"), "Well.",
     [("get-time", {}), ("write", {"path": "x"})]),
    (CODER, "<function=write>\n<parameter=path>\nx\n</parameter>\n</function>", "",
     [("write", {"path": "x"})]),
    (CODER, "<tool_call> <function=write>\n<parameter=path> x   </tool_call>", "",
     [("write", {"path": " x   "})]),
    (CODER, "<tool_call><function=write><parameter=path>x</parameter><parameter=lines>4</parameter>"
            "</function></tool_call> Done.", " Done.", [("write", {"path": "x", "lines": 4})]),
    (CODER, "<tool_call>\n<function=write>\n<parameter=path>\nx\n<parameter=lines>\n4\n"
            "</function>\n</tool_call>", "", [("write", {"path": "x", "lines": 4})]),
    (CODER, xml("other", path="x"), xml("other", path="x"), []),
    (CODER, '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>', "",
     [("get-time", {})]),
    (CODER, "a <b> </tool_call> <function", "a <b> </tool_call> <function", []),
    (LLAMA, "[write(path='special', lines=7890, share=-1.5e3)]", "",
     [("write", {"path": "special", "lines": 7890, "share": -1500.0})]),
    (LLAMA, '[write(path="a, (b]", force=True, more={"x": None}, tags=[\'a\', "b\'"]), get-time()]',
     "", [("write", {"path": "a, (b]", "force": True, "more": {"x": None}, "tags": ["a", "b'"]}),
          ("get-time", {})]),
    (LLAMA, '[write("p", "it\\\'s\\n\\u00e9", lines=4)]', "",
     [("write", {"path": "p", "text": "it's\né", "lines": 4})]),
    (LLAMA, "[write(path=Paris)]", "", [("write", {"path": "Paris"})]),
    (LLAMA, "[other(path='x')]", "[other(path='x')]", []),
    (LLAMA, "[1, 2] is a list", "[1, 2] is a list", []),
    (LFM, "<|tool_call_start|>[write(path='x')]<|tool_call_end|>Now.", "Now.",
     [("write", {"path": "x"})]),
    (MISTRAL, '[TOOL_CALLS]write[ARGS]{"path": "x[ARGS]"}[TOOL_CALLS]get-time[ARGS]{}', "",
     [("write", {"path": "x[ARGS]"}), ("get-time", {})]),
    (MISTRAL, 'So: [TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]{"lines": 1}', "So:",
     [("write", {"lines": 1})]),
    (MISTRAL, 'write[ARGS]{"path": "x"}', "", [("write", {"path": "x"})]),
    (MISTRAL, 'write it [down]', "write it [down]", []),
    (OLD, '[TOOL_CALLS] [{"name": "write", "arguments": {"path": "x"}, "id": "abcdefghi"}]', "",
     [("write", {"path": "x"})]),
    (OLD, '[{"name": "write", "arguments": {"path": "x"}}]', "", [("write", {"path": "x"})]),
    (HERMES, '<tool_call>{"name": "write", "arguments": {"text": "</tool_call>"}}</tool_call>', "",
     [("write", {"text": "</tool_call>"})]),
    (HERMES, '<tool_call>{"name": "write", "arguments": {"text": "a\nb\t"}}</tool_call>', "",
     [("write", {"text": "a\nb\t"})]),
    (HERMES, "<tool_call>{'name': 'write', 'arguments': {'path': 'it\\'s', 'force': True}}"
             "</tool_call>", "", [("write", {"path": "it's", "force": True})]),
    (HERMES, '<tool_call>\n```json\n{"name": "write", "arguments": {"lines": 1}}\n```\n'
             "</tool_call>", "", [("write", {"lines": 1})]),
    (HERMES, '<tool_call>{"arguments": {"lines": 1}, "name": "write"}</tool_call>', "",
     [("write", {"lines": 1})]),
    (HERMES, '<tool_call>{"name": "get-time", "arguments": null}</tool_call> Bye', " Bye",
     [("get-time", {})]),
    (LLAMA3, '<|python_tag|>{"type": "function", "name": "write", "parameters": {"path": "x"}}', "",
     [("write", {"path": "x"})]),
    (LLAMA3, '```json\n{"name": "write", "parameters": {"path": "x"}}\n```', "",
     [("write", {"path": "x"})]),
    (LLAMA3, '[write(path="x")]', "", [("write", {"path": "x"})]),
    (LLAMA3, '{"a": 1} and {"name": "write", "parameters": {}}',
     '{"a": 1} and {"name": "write", "parameters": {}}', []),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "shown", "calls"), CASES, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("early", [False, True])
def test_calls_are_read_however_they_are_cut(
    style: ToolStyle, text: str, shown: str, calls: list[tuple[str, Any]], early: bool
) -> None:
    whole = read(style, text, early=early)
    assert whole[0] == shown
    assert [(name, json.loads(arguments)) for name, arguments, _ in whole[1]] == calls
    for at in range(1, len(text)):
        assert read(style, text[:at], text[at:], early=early) == whole
    assert read(style, *text, early=early) == whole


@pytest.mark.parametrize(("style", "text"), [(one[0], one[1]) for one in CASES if one[3]])
def test_an_answer_that_is_cut_off_never_says_more(style: ToolStyle, text: str) -> None:
    """Nor shows marks where a call had begun."""
    _, calls = read(style, text)
    for at in range(len(text)):
        shown, some = read(style, text[:at], early=True)
        assert len(calls) > 1 or not some or "<" not in shown
        for (name, arguments, _), (wanted, all_of_it, _) in zip(some, calls, strict=False):
            assert name == wanted
            try:
                said = json.loads(arguments)
            except ValueError:
                assert all_of_it.startswith(arguments)
            else:
                everything = json.loads(all_of_it)
                assert said == everything or style.xml or not said


def test_ids_of_mistral_are_kept() -> None:
    _, calls = read(OLD, '[TOOL_CALLS][{"name": "write", "arguments": {}, "id": "abcdefghi"}]')
    assert calls == [("write", "{}", "abcdefghi")]
    _, calls = read(MISTRAL, "[TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]{}")
    assert calls == [("write", "{}", "abcdefghi")]


@pytest.mark.parametrize(
    ("style", "before", "piece", "after"),
    [
        (HERMES, '<tool_call>{"name": "write", "arguments": {"text": "', "abc ", '"}}</tool_call>'),
        (MISTRAL, '[TOOL_CALLS]write[ARGS]{"text": "', "abc ", '"}'),
        (CODER, "<tool_call>\n<function=write>\n<parameter=text>\n", "abc ",
         "\n</parameter>\n</function>\n</tool_call>"),
        (LLAMA, "[write(", 'tags=["abcdefghi", "abc"], ', "path='x')]"),
    ],
    ids=["hermes", "mistral", "coder", "llama"],
)  # fmt: skip
def test_long_arguments_come_as_they_are_written(
    style: ToolStyle, before: str, piece: str, after: str
) -> None:
    reader = style.reader(NAMES, TOOLS, early=True)
    reader.push(before)
    said, late = "", 0
    for number in range(60):
        _, calls = reader.push(piece)
        said += "".join(call.arguments for call in calls)
        late = max(late, (number + 1) * len(piece) - len(said))
        assert [call.name for call in calls if call.name] in ([], ["write"])
    assert late < 100
    text, calls = reader.push(after)
    assert text == ""
    said += "".join(call.arguments for call in [*calls, *reader.flush()[1]])
    json.loads(said)


PIECES = ["<tool_call>", "</tool_call>", "<function=write>", "</function>", "<parameter=path>",
          "<parameter=lines>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "write",
          "[write(", "path=", ")", "]", "{", "}", '"', "'", '{"name": "write", "arguments": ',
          "{'name': 'write'}", '{"path": "x"}', "\n", " ", "a", "\\", "```json\n", "```", ",",
          "<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>", "True"]  # fmt: skip


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_any_answer_reads_the_same_however_it_is_cut(style: ToolStyle) -> None:
    @given(st.lists(st.sampled_from(PIECES), max_size=12), st.data())
    def check(pieces: list[str], data: st.DataObject) -> None:
        text = "".join(pieces)
        whole = read(style, text)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(style, *parts) == read(style, *text, early=True) == whole

    check()


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_a_long_answer_takes_its_length(style: ToolStyle) -> None:
    """Whatever is left open: 200,000 characters, a few at a time."""
    for begin, piece in (
        ("", "<"), ("", "[TOOL"), ("<tool_call>", "{"),
        ("<tool_call>\n<function=write>\n<parameter=text>", "</"),
        ('{"name": "write", "parameters": {"a": "', "x"), ("[write(path='", "\\'"),
        ("[TOOL_CALLS]write[ARGS]", '{"'),
    ):  # fmt: skip
        reader = style.reader(NAMES, TOOLS, early=True)
        reader.push(begin)
        for _ in range(1000):
            reader.push(piece * 4)
        reader.flush()


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_what_a_grammar_allows_is_read(style: ToolStyle) -> None:
    """Chance fills the form; a tool's own `$defs` are known in it."""
    schema = {
        "type": "object",
        "properties": {
            "mode": {"enum": ["a", "w"]},
            "more": {"$ref": "#/$defs/More"},
            "tree": {"$ref": "#/$defs/Tree"},
            "name": {"type": "string", "maxLength": 5},
            "force": {"type": "boolean"},
        },
        "required": ["mode", "more", "force"],
        "additionalProperties": False,
        "$defs": {
            "More": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"],
                     "additionalProperties": False},
            "Tree": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2},
        },
    }  # fmt: skip
    other = {"$defs": {"More": {"enum": ["only"]}}, "properties": {"a": {"$ref": "#/$defs/More"}},
             "required": ["a"], "additionalProperties": False, "type": "object"}  # fmt: skip
    tools = [{"function": {"name": "write", "parameters": schema}},
             {"function": {"name": "get-time", "parameters": other}}, {"function": {"name": "now"}},
             {"function": {"name": "opt", "parameters": {
                 "type": "object", "additionalProperties": False, "properties": {
                     "a": {"type": "integer"}, "b": {"const": 1}, "c": {"type": "null"}}}}}
    ]  # fmt: skip
    names, chance = [tool["function"]["name"] for tool in tools], random.Random(5)
    form = style.grammar(tools)
    called = set()
    for _ in range(12):
        constraint, text = TOKENIZER.grammars.open(form), b""
        for number in range(600):
            allowed = constraint.allowed().tolist()
            if constraint.complete or set(allowed) & TOKENIZER.eos_ids:
                break
            closing = [
                t
                for t in allowed
                if TOKENIZER.token_bytes(t)[:1] in (b'"', b"}", b"]", b"<", b"\n")
            ]
            token = chance.choice(closing if number > 30 and closing else allowed)
            constraint.push(token)
            text += TOKENIZER.token_bytes(token)
            if constraint.complete:
                break
        reader = style.reader(names, tools)
        shown, calls = reader.push(text.decode("utf-8", "replace"))
        more, others = reader.flush()
        (call,) = calls + others
        assert shown + more == ""
        called.add(call.name)
        arguments = json.loads(call.arguments)
        if call.name == "write":
            assert arguments["mode"] in ("a", "w") and arguments["more"]["x"] in (1, 2)
            assert type(arguments["force"]) is bool
            assert isinstance(arguments.get("tree", []), list)
            assert isinstance(arguments.get("name", ""), str)
        elif call.name == "get-time":
            assert arguments == {"a": "only"}
        elif call.name == "opt":
            assert set(arguments) <= {"a", "b", "c"} and arguments.get("b", 1) == 1
    assert len(called) > 1


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_a_tool_that_cannot_be_called_is_told(style: ToolStyle) -> None:
    endless = {"$defs": {"N": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}},
                               "required": ["n"]}}, "$ref": "#/$defs/N"}  # fmt: skip
    with pytest.raises(RequestError, match="tool f"):
        style.grammar([{"function": {"name": "f", "parameters": endless}}])


def test_special_tokens_are_meant_as_such() -> None:
    tools = [{"function": {"name": "f"}}]
    source = MISTRAL.grammar(tools, {"[TOOL_CALLS]": 5, "[ARGS]": 32}).source
    assert "<[5]>" in source and "<[32]>" in source and "TOOL_CALLS" not in source
    assert "TOOL_CALLS" in MISTRAL.grammar(tools).source
    assert LLAMA3.grammar(tools).kind is GrammarKind.JSON_SCHEMA


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(
        st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(LITERALS)
def test_pythons_literals_are_read(value: Any) -> None:
    """As Python writes them, which ast.literal_eval reads; and as JSON does."""
    assert read_literal(repr(value)) == ast.literal_eval(repr(value)) == value
    assert read_literal(json.dumps(value)) == read_literal(json.dumps(value, indent=1)) == value


@given(st.text(alphabet="[](){}'\"\\,:x1.-eTrueNone \n", max_size=30))
def test_other_text_is_no_literal(text: str) -> None:
    try:
        value = read_literal(text)
    except ValueError:
        return
    json.dumps(value)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "(" * (MAX_DEPTH + 2), "-" * 5000 + "1", "9" * 5000, "{[1]: 2}", "1e999",
     "__import__('os')", "f'x'", "", "1 2"],
)  # fmt: skip
def test_what_is_too_much_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_literal(text)

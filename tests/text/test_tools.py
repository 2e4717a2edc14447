"""Calls of tools, taken out of text however it is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hmt.cli.options import embedded_model
from hmt.contracts.request import GrammarKind
from hmt.text import Tokenizer, ToolCall, ToolStyle

V3, V31 = ToolStyle(tagged=True, fenced=True), ToolStyle(tagged=True, fenced=False)
TAGGED, WHOLE = ToolStyle(tagged=True), ToolStyle(tagged=False)
NAMES = ["add", "find"]
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "<tool_call>"]}}'
FIND = '{"name": "find", "parameters": {"what": "é"}}'
ADDED = ToolCall("add", '{"a": 1, "b": [2, "<tool_call>"]}')
FOUND = ToolCall("find", '{"what": "é"}')


def read(style: ToolStyle, parts: list[str]) -> tuple[str, list[ToolCall]]:
    reader = style.reader(NAMES)
    shown, calls = "", list[ToolCall]()
    for part in parts:
        text, found = reader.push(part)
        shown, calls = shown + text, calls + found
    text, found = reader.flush()
    return shown + text, calls + found


def mark(*words: str) -> str:
    return f"<\uff5c{chr(0x2581).join(['tool', *words])}\uff5c>"


def deepseek(*calls: str) -> str:
    inside = "".join(mark("call", "begin") + call + mark("call", "end") for call in calls)
    return mark("calls", "begin") + inside + mark("calls", "end")


SEPARATOR = mark("sep")
FENCED = f'function{SEPARATOR}find\n```json\n{{"what": "é"}}\n```'
PLAIN = f'find{SEPARATOR}{{"what": "é"}}'


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("style", "text", "shown", "calls"),
    [
        (TAGGED, "no call < at all <tool", "no call < at all <tool", []),
        (TAGGED, tagged(ADD), "", [ADDED]),
        (TAGGED, "Well. " + tagged(ADD, FIND), "Well. ", [ADDED, FOUND]),
        (TAGGED, "<tool_call>" + FIND, "", [FOUND]),  # </tool_call> may be an end token
        (TAGGED, tagged("{not json}"), tagged("{not json}"), []),
        (TAGGED, tagged('{"name": "other", "arguments": {}}'), None, []),
        (TAGGED, "<tool_call> cut", "<tool_call> cut", []),
        (TAGGED, tagged('{"name": "add"}'), "", [ToolCall("add", "{}")]),
        (TAGGED, tagged('{"name": "add", "arguments": "{}"}'), "", [ToolCall("add", "{}")]),
        (WHOLE, "no call", "no call", []),
        (WHOLE, "  \n" + ADD, "", [ADDED]),
        (WHOLE, ADD + "; " + FIND, "", [ADDED, FOUND]),
        (WHOLE, f"[{ADD}, {FIND}]", "", [ADDED, FOUND]),
        (WHOLE, '{"answer": 42}', '{"answer": 42}', []),
        (WHOLE, '{"name": "add", "argu', '{"name": "add", "argu', []),
        (WHOLE, "See: " + ADD, "See: " + ADD, []),
        (WHOLE, "", "", []),
        (
            WHOLE,
            '[{"name": "add", "arguments": {}, "id": "abcdefghi"}]',
            "",
            [ToolCall("add", "{}", "abcdefghi")],
        ),
        (V3, "Well. " + deepseek(FENCED, FENCED), "Well. ", [FOUND, FOUND]),
        (V31, deepseek(PLAIN), "", [FOUND]),
        (V31, deepseek(PLAIN, "other"), deepseek(PLAIN, "other"), []),
        (V31, deepseek(PLAIN.replace("find", "other")), None, []),
        (V3, deepseek(FENCED.replace("}", "")), None, []),
        (WHOLE, "[" * 5000, "[" * 5000, []),
    ],
)
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_calls_are_read(
    style: ToolStyle, text: str, shown: str | None, calls: list[ToolCall], cut: int
) -> None:
    parts = [text[begin : begin + cut] for begin in range(0, len(text), cut)]
    found, read_calls = read(style, parts)
    assert read_calls == calls
    if calls:
        assert found.strip() == (shown or "").strip()
    else:
        assert found == (text if shown is None else shown)


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", ADD, FIND, "<", "tool_call>", "a", "\n", "{"]
)


@given(st.lists(PIECES, max_size=8), st.booleans(), st.data())
@example(["<tool_call>", "<tool_call>", ADD, "</tool_call>"], True, None)
def test_how_it_is_cut_makes_no_difference(
    pieces: list[str], has_tags: bool, data: st.DataObject | None
) -> None:
    text, style = "".join(pieces), TAGGED if has_tags else WHOLE
    cuts = [] if data is None else data.draw(st.lists(st.integers(0, len(text))))
    places = sorted({0, len(text), *cuts})
    parts = [text[a:b] for a, b in pairwise(places)]
    (some, calls), (other, others) = read(style, parts), read(style, list(text))
    assert calls == others and some.split() == other.split()


def test_templates_tell_the_style() -> None:
    assert ToolStyle.of("{% if tools %}<tool_call>{% endif %}") == TAGGED
    assert ToolStyle.of("""'{"name": ' + x + ', "parameters": '""").arguments == "parameters"
    assert ToolStyle.of("{% if tools %}[TOOL_CALLS]{% endif %}") == WHOLE


def test_grammars_are_of_the_style() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
    schema = json.loads(WHOLE.grammar(tools).source)
    assert [one["properties"]["name"]["const"] for one in schema["anyOf"]] == NAMES
    grammar = TAGGED.grammar(tools[:1])
    assert grammar.kind is GrammarKind.GRAMMAR and "<tool_call>" in grammar.source


def test_styles_are_told_by_templates() -> None:
    begin = mark("calls", "begin")
    assert ToolStyle.of(begin + "```json") == V3 and ToolStyle.of(begin) == V31
    mistral = ToolStyle.of("[TOOL_CALLS] {% if id|length != 9 %}")
    assert not mistral.tagged and len(mistral.new_id()) == 9 and mistral.new_id().isalnum()
    assert ToolStyle.of("tools").new_id().startswith("call_")


@pytest.mark.parametrize("style", [V3, V31])
def test_what_deepseeks_grammar_allows_is_read(style: ToolStyle) -> None:
    tools = [{"function": {"name": name, "parameters": {
        "type": "object", "properties": {"what": {"const": "é"}}, "required": ["what"],
        "additionalProperties": False}}} for name in NAMES]  # fmt: skip
    grammar = style.grammar(tools)
    tokenizer = Tokenizer.open(embedded_model())
    for call in (FENCED if style.fenced else PLAIN,):
        form = tokenizer.grammars.open(grammar)
        for token in tokenizer.encode(deepseek(call)):
            assert token in form.allowed().tolist()
            form.push(token)
        assert form.complete or set(form.allowed().tolist()) <= set(tokenizer.eos_ids)
    assert read(style, [deepseek(call)]) == ("", [FOUND])

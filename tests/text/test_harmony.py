"""gpt-oss's messages: read however they are cut, written as its template wants them."""

import json
from itertools import pairwise

import pytest
from harmony_model import harmony_folder
from hypothesis import given
from hypothesis import strategies as st

from hmt.base.errors import RequestError
from hmt.contracts.request import Grammar, GrammarKind
from hmt.text import HarmonyReader, Tokenizer, ToolCall
from hmt.text.gguf_vocabulary import read_vocabulary
from hmt.text.harmony import MARKS

NAMES = ["weather", "clock"]
THOUGHT = "<|channel|>analysis<|message|>The user asks. So <b>.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is late."
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ARGUMENTS = '{"city": "Oslo é"}'
WEATHER = ToolCall("weather", ARGUMENTS)
Said = tuple[str, str, list[ToolCall]]


def read(parts: list[str], begun: str = "assistant") -> Said:
    reader = HarmonyReader(begun, NAMES)
    said = [reader.push(part) for part in parts] + [reader.flush()]
    calls = [call for _, _, found in said for call in found]
    return "".join(one for one, _, _ in said), "".join(one for _, one, _ in said), calls


@pytest.mark.parametrize("cut", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        # From the guide to the format: thoughts, then the answer; thoughts, then a call.
        (THOUGHT + FINAL, ("The user asks. So <b>.", "It is late.", [])),
        (f"{THOUGHT}<|start|>assistant{CALL}{ARGUMENTS}",
         ("The user asks. So <b>.", "", [WEATHER])),
        # As the template writes calls of earlier answers: the recipient stands with the role.
        (f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
         ("", "", [WEATHER])),
        (f"{THOUGHT}<|start|>assistant to=functions.clock<|channel|>commentary<|message|>",
         ("The user asks. So <b>.", "", [ToolCall("clock", "{}")])),
        # What commentary tells the user, before a call and before the answer.
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}{ARGUMENTS}",
         ("", "I look.", [WEATHER])),
        (f"<|channel|>commentary<|message|>I look.<|end|>{FINAL}",
         ("", "I look.\n\nIt is late.", [])),
        (f"{THOUGHT}<|start|>assistant{THOUGHT}", ("The user asks. So <b>.\n\n" * 2)[:-2]),
        # Two calls; one that cannot be made, one that is none, and a tool of the model's own.
        (f"{CALL}{ARGUMENTS}<|end|><|start|>assistant{CALL}{{}}", 
         ("", "", [WEATHER, ToolCall("weather", "{}")])),
        (f"{CALL.replace('weather', 'other')}{ARGUMENTS}", ("", ARGUMENTS, [])),
        (f"{CALL}{{not json", ("", "{not json", [])),
        (f"{CALL}[1]", ("", "[1]", [])),
        (f"{CALL}{'[' * 5000}", ("", "[" * 5000, [])),
        ("<|channel|>analysis to=python code<|message|>print(1)", ("print(1)", "", [])),
        # Cut off, marks left out, no marks at all.
        ("<|channel|>analysis<|message|>Hm <|en", ("Hm <|en", "", [])),
        ("<|channel|>analy", ("", "", [])),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>42", ("Hm.", "42", [])),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assis", ("Hm.", "", [])),
        ("<|message|>42", ("", "42", [])),
        ("42 <b> to=me", ("", "42 <b> to=me", [])),
        (" t", ("", " t", [])),
        ("", ("", "", [])),
    ],
)  # fmt: skip
def test_messages_are_parted(text: str, said: Said | str, cut: int) -> None:
    parts = [text[begin : begin + cut] for begin in range(0, len(text), cut)]
    assert read(parts) == ((said, "", []) if isinstance(said, str) else said)


PIECES = st.sampled_from(
    [*MARKS, "<|call|>", "analysis", "final", "commentary", " to=functions.clock", "{}", "<|", "a"]
)


@given(st.lists(PIECES, max_size=12), st.data())
def test_how_it_is_cut_makes_no_difference(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    places = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text))))})
    parts = [text[a:b] for a, b in pairwise(places)]
    assert read(parts) == read(list(text))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.open(harmony_folder(tmp_path_factory.mktemp("harmony") / "model"))


CHAT = [{"role": "user", "content": "What time is it?"}]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}, "required": ["zone"],
    "additionalProperties": False}}}  # fmt: skip


def test_marks_are_shown_and_other_tokens_are_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(THOUGHT + FINAL + "<|return|>")
    stream = tokenizer.stream()
    said = "".join([*map(stream.push, ids), stream.flush()])
    assert said == tokenizer.decode(ids) == THOUGHT + FINAL
    assert {tokenizer.encode(end)[0] for end in ("<|return|>", "<|call|>")} == tokenizer.eos_ids


def test_the_prompt_tells_where_an_answer_begins(tokenizer: Tokenizer) -> None:
    free, formed = (tokenizer.chat_prompt(CHAT, formed=formed) for formed in (False, True))
    assert formed == free + tokenizer.encode("<|channel|>final<|message|>")
    for prompt, answer in ((free, THOUGHT + FINAL), (formed, "It is late.")):
        reader = tokenizer.channels(prompt, NAMES)
        assert reader is not None and reader.push(answer)[1] == "It is late."
    assert tokenizer.reasoning(free) is None and tokenizer.channels([], ()) is not None
    assert "Effort: high" in tokenizer.decode(
        tokenizer.chat_prompt(CHAT, variables={"reasoning_effort": "high"})
    )


def test_thoughts_have_a_limit(tokenizer: Tokenizer) -> None:
    limit = tokenizer.thought_limit(tokenizer.chat_prompt(CHAT), 2)
    assert limit is not None
    said = tokenizer.encode("<|channel|>analysis<|message|>")
    for token in [*said, *tokenizer.encode("a")]:
        assert limit.allowed() is None
        limit.push(token)
    forced = list[int]()
    while (allowed := limit.allowed()) is not None or not forced:
        forced.append(tokenizer.encode("b")[0] if allowed is None else int(allowed))
        limit.push(forced[-1])
    assert tokenizer.decode(forced).endswith("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert len(tokenizer.decode(forced)) < 60


def test_calls_of_earlier_answers_are_written_one_to_a_message(tokenizer: Tokenizer) -> None:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": n, "arguments": {"in": n}}}
        for n in NAMES
    ]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": n} for n in NAMES[::-1]]
    asked = {"role": "assistant", "content": "I look.", "thinking": "Hm.", "tool_calls": calls}
    written = tokenizer.decode(tokenizer.chat_prompt([*CHAT, asked, *results], [TOOL]))
    assert written.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>'
        '{"in": "weather"}'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"weather"<|end|>'
        '<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{"in": "clock"}'
        '<|start|>functions.clock to=assistant<|channel|>commentary<|message|>"clock"<|end|>'
        "<|start|>assistant"
    )  # fmt: skip
    assert json.dumps(TOOL["function"]["parameters"]["properties"]) in written


def test_a_call_can_be_demanded(tokenizer: Tokenizer) -> None:
    style = tokenizer.tool_style
    assert style is not None and style.harmony
    grammar = style.grammar([TOOL, {"type": "function", "function": {"name": "weather"}}])
    call = '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"zone": "UTC"}'
    form = tokenizer.grammars.open(grammar)
    for token in tokenizer.encode(call):
        assert token in form.allowed().tolist()
        form.push(token)
    assert set(form.allowed().tolist()) == tokenizer.eos_ids
    assert read([call]) == ("", "", [ToolCall("clock", '{"zone": "UTC"}')])
    with pytest.raises(RequestError):
        tokenizer.grammars.open(grammar).push(tokenizer.encode("<|message|>")[0])
    tokenizer.grammars.open(Grammar(GrammarKind.JSON_SCHEMA, "{}"))


def test_a_gguf_file_ends_answers_where_the_format_does() -> None:
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>"]
    said = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1, 3, 3, 1],
            "tokenizer.ggml.eos_token_id": 2}  # fmt: skip
    assert read_vocabulary(said, "file").ends == {2, 3}
    tokens[3] = "<|other|>"
    assert read_vocabulary(said, "file").ends == {1, 2}

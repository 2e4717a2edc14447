"""Reasoning apart from the answer, however the text is cut."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hmt.cli.options import embedded_model
from hmt.text import ReasoningReader, Tokenizer


def read(parts: list[str], *, begun: bool) -> tuple[str, str]:
    reader = ReasoningReader(begun=begun)
    said = [reader.push(part) for part in parts] + [reader.flush()]
    return "".join(one for one, _ in said), "".join(one for _, one in said)


@pytest.mark.parametrize("cut", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "answer"),
    [
        ("42", False, "", "42"),
        (" 42", False, "", " 42"),
        ("<think>\nSum.\n</think>\n\n42", False, "Sum.\n", "42"),
        ("\n<think>Sum.</think>42", False, "Sum.", "42"),
        ("<think></think>42", False, "", "42"),
        ("\nSum.</think>42", True, "Sum.", "42"),
        ("Sum that never ends </thin", True, "Sum that never ends </thin", ""),
        ("<thin", False, "", "<thin"),
        ("<thinker>", False, "", "<thinker>"),
        ("a <think>b</think> c", False, "", "a <think>b</think> c"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_parted(text: str, begun: bool, reasoning: str, answer: str, cut: int) -> None:
    parts = [text[begin : begin + cut] for begin in range(0, len(text), cut)]
    assert read(parts, begun=begun) == (reasoning, answer)


PIECES = st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", " ", "\n"])


@given(st.lists(PIECES, max_size=8), st.booleans(), st.data())
def test_how_it_is_cut_makes_no_difference(
    pieces: list[str], begun: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    places = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text))))})
    parts = [text[a:b] for a, b in pairwise(places)]
    assert read(parts, begun=begun) == read(list(text), begun=begun)


def test_the_template_and_the_prompt_tell(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(embedded_model())
    assert tokenizer.reasoning(tokenizer.encode("<think>")) is None
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / file).write_bytes((embedded_model() / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ '</think>' }}", encoding="utf-8")
    thinking = Tokenizer.open(tmp_path)
    for prompt, said in (("Go. <think>\n", ("a", "b")), ("Go.", ("", "a</think>b"))):
        reader = thinking.reasoning(thinking.encode(prompt))
        assert reader is not None and reader.push("a</think>b") == said

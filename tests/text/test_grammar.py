"""Grammars over the embedded model's tokenizer: what may follow, and no more."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import RequestError
from hmt.contracts.request import Grammar, GrammarKind
from hmt.text import Tokenizer

TOKENIZER = Tokenizer.open(Path(str(files("hmt") / "embedded" / "mini-dense")))
(END,) = TOKENIZER.eos_ids


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    st.sampled_from([r"[a-c]+[0-9]?", r"(ab|abc|é👍){1,3}", r"x?y?z?", r"\{\"k\": [0-9]+\}"]),
)
def test_whatever_is_chosen_the_text_matches(data: st.DataObject, source: str) -> None:
    form = TOKENIZER.grammars.open(regex(source))
    ids: list[int] = []
    while not form.complete and len(ids) < 40:
        allowed = form.allowed().tolist()
        assert allowed == sorted(set(allowed))
        token = data.draw(st.sampled_from(allowed))
        form.push(token)
        if token == END:
            break
        ids.append(token)
    text = b"".join(map(TOKENIZER.token_bytes, ids)).decode("utf-8", "ignore")
    if form.complete:
        assert re.fullmatch(source, text)
    else:
        assert len(ids) == 40


def test_an_end_token_is_allowed_where_the_text_may_end() -> None:
    form = TOKENIZER.grammars.open(regex("[0-9]+"))
    assert END not in form.allowed()
    form.push(TOKENIZER.encode("7")[-1])
    assert END in form.allowed() and not form.complete
    form.push(END)
    assert form.complete


def test_answers_to_one_grammar_are_apart() -> None:
    first, second = (TOKENIZER.grammars.open(regex("ab")) for _ in range(2))
    before = second.allowed()
    first.push(int(first.allowed()[0]))
    assert second.allowed().equal(before)


def test_a_token_that_is_not_allowed_is_refused() -> None:
    form = TOKENIZER.grammars.open(regex("[0-9]+"))
    with pytest.raises(RequestError, match="does not allow token"):
        form.push(TOKENIZER.encode("a")[-1])


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "[a"),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "nothing"})),
        (GrammarKind.JSON_SCHEMA, "[1]"),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.GRAMMAR, "start: nowhere"),
        (GrammarKind.GRAMMAR, ""),
    ],
)
def test_what_is_no_grammar_is_told(kind: GrammarKind, source: str) -> None:
    with pytest.raises(RequestError, match=kind.value):
        TOKENIZER.grammars.open(Grammar(kind, source))


def test_white_space_ends() -> None:
    """A small model would write it for ever."""
    form = TOKENIZER.grammars.open(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'))
    form.push(next(t for t in form.allowed().tolist() if TOKENIZER.token_bytes(t) == b"{"))
    for _ in range(40):
        blank = [t for t in form.allowed().tolist() if TOKENIZER.token_bytes(t).isspace()]
        if not blank:
            return
        form.push(blank[0])
    pytest.fail("white space without end")

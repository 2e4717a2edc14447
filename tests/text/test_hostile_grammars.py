"""Grammars that overflow a stack, grow or take for ever: an error of that request, at most.

Oracles: the kernel, which ends a process that passes its limits, and Python's `re`.
"""

import json
import re
import threading

import pytest
from limited_program import run_limited

from hmt.base.errors import BudgetError, RequestError
from hmt.cli.options import embedded_model
from hmt.contracts.request import Grammar, GrammarKind
from hmt.text import Constraint, Tokenizer, grammar

MINI = embedded_model()
N = 4000
JSON, REGEX, RULES, CHOICE = (
    GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.GRAMMAR, GrammarKind.CHOICE
)  # fmt: skip


def chain(link: str, n: int = N) -> str:
    """A schema of n definitions, each of which names the next one as `link` says."""
    parts = {f"d{i}": json.loads(link.replace("NEXT", f'{{"$ref": "#/$defs/d{i + 1}"}}'))
             for i in range(n)}  # fmt: skip
    return json.dumps({"$defs": parts | {f"d{n}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def rules(first: str, rule: str, last: str) -> str:
    return "\n".join([first, *(rule.format(i, i + 1) for i in range(N)), last.format(N)])


# What is asked, and what is said of it; None: either an error or an answer.
HOSTILE: dict[str, tuple[GrammarKind, str, str | None]] = {
    "gbnf": (RULES, rules("root ::= r0", "r{} ::= r{}", 'r{} ::= "a"'), "nests too deeply"),
    "lark": (RULES, rules("start: r0", "r{}: r{}", 'r{}: "a"'), "nests too deeply"),
    "terminals": (RULES, rules("start: R0", "R{}: R{}", 'R{}: "a"'), "nests too deeply"),
    "deep gbnf": (RULES, "root ::= " + "(" * 9999 + '"a"' + ")" * 9999, "recursion"),
    "deep lark": (RULES, "start: " + "(" * 9999 + '"a"' + ")" * 9999, "too deeply"),
    "deep regex": (REGEX, "(" * 5000 + "a" + ")*" * 5000, "invalid regex"),
    "long regex": (REGEX, "a?" * 12000, "more than 128 MiB of memory"),
    "huge": (REGEX, "a" * 2_000_000, "1048576 are the most"),
    "long choice": (CHOICE, json.dumps(["c" * 900_000]), "more than 128 MiB of memory"),
    "choices": (CHOICE, json.dumps([f"c{i}" for i in range(20_000)]), "max is 2000"),
    "alternatives": (RULES, "root ::= " + " | ".join(f'"a{i}"' for i in range(9000)), "max is"),
    "repeated": (REGEX, "((a{1,1000}){1,1000}){1,1000}", None),
    "repeated rules": (RULES, 'root ::= x{0,100000}\nx ::= y{0,99999}\ny ::= "a" | "b" x', None),
    "$ref": (JSON, chain("NEXT"), None),  # references alone are followed
    "properties": (
        JSON, chain('{"type": "object", "properties": {"a": NEXT}, "required": ["a"]}'), "deeply"
    ),
    "anyOf": (JSON, chain('{"anyOf": [NEXT, {"type": "null"}]}'), "nests too deeply"),
    "allOf": (JSON, chain('{"allOf": [NEXT, NEXT]}'), "nests too deeply"),
    "doubled": (JSON, chain('{"allOf": [NEXT, NEXT]}', 30), None),
    "items": (JSON, chain('{"type": "array", "items": NEXT, "minItems": 1}'), "nests too deeply"),
    "cycle": (JSON, '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "without end"),
    "endless": (RULES, "start: a\na: b\nb: a", "no token"),
    "deep json": (JSON, '{"items":' * 20_000 + "{}" + "}" * 20_000, "recursion"),
    "deep pattern": (JSON, json.dumps({"pattern": "(" * 3000 + "a" + ")*" * 3000}), None),
    "many": (JSON, json.dumps({"type": "array", "minItems": 10**9}), None),
    "multiple": (JSON, '{"type": "integer", "multipleOf": 999999937}', None),
    "states": (REGEX, "(.*a.{30}){3}", None),
    "surrogate": (REGEX, "\ud800", "surrogates"),
    "ambiguous": (RULES, 'start: s\ns: s s s | s s | "a" | "b" | ""', "0.05 s of processor time"),
}  # fmt: skip


def test_hostile_grammars_are_errors_in_bounded_memory() -> None:
    program = """
from hmt.sandbox import Limits
from hmt.text import grammar
grammar._COMPILED = Limits(grammar._COMPILED.memory_bytes, 0.05)  # 0.2 s otherwise
tokenizer = Tokenizer.open(MINI)
def work(case):
    form, count = tokenizer.grammars.open(Grammar(GrammarKind(case[0]), case[1])), 0
    while not form.complete and count < case[2]:
        ids = [token for token in form.allowed().tolist() if token not in tokenizer.eos_ids]
        if not ids:
            break
        form.push(ids[0 if count % 2 else -1])
        count += 1
    return tokenizer.grammars.used_bytes
"""
    cases = [
        (kind.value, text, 600 if name == "ambiguous" else 12)
        for name, (kind, text, _) in HOSTILE.items()
    ]
    results = run_limited(program, [*cases, (REGEX.value, "[0-9]+", 3)])
    *results, (healthy, _) = results
    assert healthy == "answer"
    for (name, (_, _, why)), (kind, said) in zip(HOSTILE.items(), results, strict=True):
        if kind == "answer":
            assert why is None and said <= grammar._ALL_BYTES, name
        else:
            assert kind == "RequestError" and (why or "") in said, (name, said)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MINI)


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> int:
    """What compiled grammars may have together: less than they usually may."""
    monkeypatch.setattr(grammar, "_ALL_BYTES", 64 << 20)
    return grammar._ALL_BYTES


def follow(tokenizer: Tokenizer, form: Constraint, text: str) -> None:
    for token in tokenizer.encode(text):
        form.push(token)


def of_size(number: int) -> Grammar:
    """A grammar that takes some 15 MiB."""
    return Grammar(RULES, "start: " + '"a" ' * 14_000 + '"b" ' * number)


def test_compiled_grammars_are_bounded_in_bytes(tokenizer: Tokenizer, most: int) -> None:
    grammars = tokenizer.grammars
    sizes = []
    for number in range(10):
        grammars.open(of_size(number))
        sizes.append(grammars.used_bytes)
    assert max(sizes) <= most < 10 * sizes[0]
    assert len(grammars._compiled) < 10  # the first ones had to go, and come again
    follow(tokenizer, form := grammars.open(of_size(0)), "aaa")
    assert not form.complete


def test_grammars_in_use_are_not_put_out_by_new_ones(tokenizer: Tokenizer, most: int) -> None:
    grammars, forms = tokenizer.grammars, list[Constraint]()
    with pytest.raises((BudgetError, RequestError), match=r"64.*MiB"):
        for number in range(10):
            forms.append(grammars.open(of_size(number)))
    assert len(forms) >= 2
    goes_on = 0
    for form in forms:
        try:
            follow(tokenizer, form, "aaa")
            goes_on += not form.complete
        except RequestError:  # the largest one, at most
            pass
    assert goes_on >= len(forms) - 1


def test_others_answers_of_a_process_that_ended_go_on(tokenizer: Tokenizer) -> None:
    """The oracle is an answer that nothing has happened to."""
    pattern = Grammar(REGEX, "(ab|cd)+[0-9]{3}")
    form, undisturbed = (tokenizer.grammars.open(pattern) for _ in range(2))
    follow(tokenizer, form, "abcd")
    follow(tokenizer, undisturbed, "abcd1")
    expected = undisturbed.allowed()
    form._compiled.worker.end()
    follow(tokenizer, form, "1")
    assert form.allowed().equal(expected)
    follow(tokenizer, form, "23")
    assert form.complete
    assert undisturbed.allowed().equal(expected)  # which knew its mask


def test_answers_at_once_match(tokenizer: Tokenizer) -> None:
    texts, pattern = list[str](), r"[a-c]{3,9}x"

    def work(turn: int) -> None:
        form, ids = tokenizer.grammars.open(Grammar(REGEX, pattern)), list[int]()
        while not form.complete:
            allowed = form.allowed().tolist()
            ids.append(allowed[(turn * 7 + len(ids)) % len(allowed)])
            form.push(ids[-1])
        texts.append(tokenizer.decode(ids))

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 6 and all(re.fullmatch(pattern, text) for text in texts)


def test_forms_are_ready_after_a_while(tokenizer: Tokenizer) -> None:
    form = tokenizer.grammars.open(Grammar(REGEX, "[0-9]+"))
    assert form.ready
    follow(tokenizer, form, "7")
    assert form.wait(30) and form.ready and not form.complete


def test_what_has_ended_is_forgotten(tokenizer: Tokenizer) -> None:
    digits = Grammar(REGEX, "[0-9]+")
    compiled = tokenizer.grammars.join(digits, 0)
    compiled.closed.append(0)
    for _ in range(5):
        tokenizer.grammars.open(digits)
    form = tokenizer.grammars.open(digits)
    follow(tokenizer, form, "7")
    assert len(compiled.open) == 1 and not compiled.idle
    del form
    assert compiled.idle

"""Attacks by what answers must look like, and by what a chat template does with messages."""

from typing import Any

from target import CHAT, Target, borne, eventually

_CHAIN = 4000


def _formed(target: Target, structured: dict[str, Any], what: str, seconds: float = 30) -> None:
    body = target.chat("x", max_tokens=4, structured_outputs=structured)
    borne(target.post(CHAT, body, timeout_s=seconds), what)


def chains_of_rules(target: Target) -> None:
    """Grammars whose rules lead to one another, thousands deep."""
    numbers = range(_CHAIN)
    gbnf = ["root ::= r0", *(f"r{n} ::= r{n + 1}" for n in numbers), f'r{_CHAIN} ::= "a"']
    lark = ["start: r0", *(f"r{n}: r{n + 1}" for n in numbers), f'r{_CHAIN}: "a"']
    terminals = ["start: R0", *(f"R{n}: R{n + 1}" for n in numbers), f'R{_CHAIN}: "a"']
    for name, rules in (("GBNF", gbnf), ("Lark", lark), ("terminals", terminals)):
        _formed(target, {"grammar": "\n".join(rules)}, f"a chain of rules in {name}")
    nested = "(" * _CHAIN + '"a"' + ")" * _CHAIN
    _formed(target, {"grammar": f"root ::= {nested}"}, "parentheses")
    _formed(target, {"grammar": "root ::= root"}, "a rule of itself")


def chains_of_references(target: Target) -> None:
    """Schemas whose definitions lead to one another, as a format and as a tool's parameters."""

    def chain(step: Any) -> dict[str, Any]:
        definitions = {f"d{n}": step({"$ref": f"#/$defs/d{n + 1}"}) for n in range(_CHAIN)}
        last = {f"d{_CHAIN}": {"type": "integer"}}
        return {"$defs": definitions | last, "$ref": "#/$defs/d0"}

    steps = {
        "references": lambda to: to,
        "properties": lambda to: {"type": "object", "properties": {"a": to}, "required": ["a"]},
        "anyOf": lambda to: {"anyOf": [to, {"type": "null"}]},
    }
    for name, step in steps.items():
        schema = chain(step)
        given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        borne(target.post(CHAT, target.chat("x", response_format=given)), f"a chain of {name}")
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body = target.chat("x", tools=[tool], tool_choice="required")
        borne(target.post(CHAT, body), f"a tool with a chain of {name}")
    itself = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": itself}}
    borne(target.post(CHAT, target.chat("x", response_format=given)), "a schema of itself")


def expressions_that_explode(target: Target) -> None:
    """Regular expressions whose automata are large or take for ever."""
    for expression in (
        "(a{1,1000}){1,1000}", "(a?){1000}a{1000}", "((a|b)*c){500}", "(.*a){200}", "[a-z]{60000}",
        "(" * 2000 + "a" + ")*" * 2000, "(?i:" + "a?" * 2000 + ")", "\\p{L}{3000}", "(a|a)*" * 400,
    ):  # fmt: skip
        _formed(target, {"regex": expression}, f"the expression {expression[:30]}")


def grammars_without_number(target: Target) -> None:
    """Different forms, each of which is kept compiled: their memory is bounded."""
    for number in range(6):
        _formed(target, {"regex": "a?" * 6000 + "b" * number}, "one of several large expressions")
    for number in range(60):
        schema = {"type": "object", "properties": {f"k{number}_{n}": {} for n in range(20)}}
        _formed(target, {"json": schema}, "one of many schemas")
    _formed(target, {"choice": ["a" * n for n in range(1, 900)]}, "many choices")


def forms_that_take_long(target: Target) -> None:
    """An ambiguous grammar: each token takes longer than the one before."""
    ambiguous = 'start: s\ns: s s | s s s | "a" | "a" "a" | ""'
    body = target.chat("x", max_tokens=120, structured_outputs={"grammar": ambiguous})
    body |= {"logit_bias": {}, "ignore_eos": True}
    borne(target.post(CHAT, body, timeout_s=90), "an ambiguous grammar")


def templates_that_never_end(target: Target) -> None:
    """A chat template (of a stranger's checkpoint) that loops: for servers that have such a one."""
    borne(target.post(CHAT, target.chat("LOOP"), timeout_s=60), "a template that loops")
    _still_serves(target)


def templates_that_grow(target: Target) -> None:
    """The same, which repeats a text without bound."""
    for word in ("GROW", "DOUBLE"):
        borne(target.post(CHAT, target.chat(word), timeout_s=60), "a template that grows")
    _still_serves(target)


def templates_that_reach_out(target: Target) -> None:
    """The same, which looks for Python behind the objects that it is given."""
    for word in ("CLASS", "GLOBALS", "FORMAT"):
        answer = target.post(CHAT, target.chat(word, max_tokens=1))
        borne(answer, f"a template that reaches out ({word})")
    _still_serves(target)


def _still_serves(target: Target) -> None:
    eventually(
        lambda: target.post(CHAT, target.chat(max_tokens=1)).status == 200, 30,
        "no client is served after a bad template",
    )  # fmt: skip


# Not of constants alone: Jinja computes those when it compiles, for whatever message.
# What the template of the attacked server does when the last message is one of these words.
TEMPLATE = (
    "{% set word = messages[-1].content %}"
    "{% if word == 'LOOP' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}"
    "{% elif word == 'GROW' %}{{ 'x' * (4000000000 * messages | length) }}"
    "{% elif word == 'DOUBLE' %}{% set n = namespace(t='xxxxxxxxxxxxxxxx') %}"
    "{% for a in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"
    "{% elif word == 'CLASS' %}{{ ''.__class__.__mro__[1].__subclasses__() }}"
    "{% elif word == 'GLOBALS' %}{{ cycler.__init__.__globals__.os.popen('id').read() }}"
    "{% elif word == 'FORMAT' %}{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}"
    "{% endif %}"
)

ATTACKS = (
    chains_of_rules, chains_of_references, expressions_that_explode, grammars_without_number,
    forms_that_take_long,
)  # fmt: skip
TEMPLATE_ATTACKS = (templates_that_never_end, templates_that_grow, templates_that_reach_out)

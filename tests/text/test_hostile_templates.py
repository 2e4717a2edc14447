"""Templates that never end or grow: an error of that request, in bounded time and memory."""

import threading

import pytest
from limited_program import run_limited

from hmt.base.errors import RequestError
from hmt.text.chat_template import ChatTemplate

TIME = "more than 1.5 s of processor time"
MEMORY = "more than 192 MiB of memory"
LENGTH = "more than 33554432 characters"
RECURSION = "recursion"
DOUBLING = (
    "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
)
HOSTILE = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": TIME,
    "{{ lipsum(n=10**9) }}": TIME,
    DOUBLING + "{{ n.s }}": MEMORY,
    "{{ 'a' * 10**11 }}": MEMORY,
    "{{ messages[0].content * 10**10 }}": MEMORY,
    "{{ '%100000000000d' % 1 }}": MEMORY,
    "{{ '{:>1000000000000}'.format(1) }}": MEMORY,
    "{{ 'x' | center(10**11) }}": MEMORY,
    "{{ ('a' * 300) | replace('', 'b' * 10**6) | replace('', 'c' * 10**4) }}": MEMORY,
    "{{ [1] | batch(10**9, fill_with='x') | list }}": MEMORY,
    "{{ ((1, 2) * 10**10) | length }}": MEMORY,
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}": LENGTH,
    "{{ range(10**12) | list }}": "Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": RECURSION,
    "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}": RECURSION,
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": RECURSION,
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000: RECURSION,
}
USER = [{"role": "user", "content": "x"}]


def test_hostile_templates_are_errors_in_bounded_memory() -> None:
    program = """
from hmt.sandbox import Limits
from hmt.text import chat_template
chat_template._LIMITS = Limits(chat_template._LIMITS.memory_bytes, 1.5)  # 3 s otherwise
def work(source):
    return ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
"""
    results = run_limited(program, list(HOSTILE))
    for (source, why), (kind, said) in zip(HOSTILE.items(), results, strict=True):
        assert kind in ("RequestError", "CheckpointError") and why in said, (source[:80], said)


def test_a_template_goes_on_after_a_chat_that_it_could_not_take() -> None:
    source = "{{ messages[0].content * (10**10 if messages[0].content == 'x' else 2) }}"
    template = ChatTemplate(source, {})
    for _ in range(2):
        with pytest.raises(RequestError, match=MEMORY):
            template.render(USER)
        assert template.render([{"role": "user", "content": "y"}]) == "yy"


def test_what_only_dies_is_told_and_rendered_again() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template._worker is not None
    template._worker.end()
    assert template.render(USER) == "x"


@pytest.mark.parametrize("content", [{1, 2}, b"x", object()])
def test_messages_are_json(content: object) -> None:
    with pytest.raises(RequestError, match="not JSON"):
        ChatTemplate("x", {}).render([{"role": "user", "content": content}])


def test_any_text_passes() -> None:
    text = "\x00 \ud800 \u2028 é👍 {{ 1 }}"
    assert (
        ChatTemplate("{{ messages[0].content }}", {}).render([USER[0] | {"content": text}]) == text
    )


def test_chats_at_once() -> None:
    template, results = ChatTemplate("{{ messages[0].content }}", {}), list[str]()

    def work(number: int) -> None:
        for turn in range(20):
            text = f"{number} {turn}"
            assert template.render([{"role": "user", "content": text}]) == text
        results.append("done")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4


def test_a_long_chat_is_rendered() -> None:
    """A million tokens are some five megabytes."""
    messages = [{"role": "user", "content": "hello world " * 100}] * 5000
    text = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).render(messages)
    assert text == "hello world " * 500_000

"""Templates render as in transformers, cannot leave the sandbox, and fail with clear errors."""

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hmt.base.errors import CheckpointError, RequestError
from hmt.text.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Antworte <kurz> & gut"},
    {"role": "user", "content": "  hello 世界 "},
    {"role": "assistant", "content": "Yes.", "tool_calls": [{"name": "f", "args": {"b": 1}}]},
    {"role": "user", "content": "Why?"},
]

LIKE_LLAMA = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant") }}
    {%- endif %}
    {{- '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}
{%- endfor %}
"""
LIKE_QWEN = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}
        {%- set ns.last = (messages | length - 1) - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- macro show(message) %}<{{ message.role }}>{{ message.content }}{% endmacro %}
{%- for message in messages if message.role != "system" %}
    {%- if not message.content %}{% continue %}{% endif %}
    {{- show(message) }}
    {%- if message.tool_calls is defined %}{{ message.tool_calls | tojson }}
{{ message.tool_calls | tojson(indent=2) }}{% endif %}
    {%- if loop.index0 == ns.last %}<last>{% endif %}
{%- endfor %}
{%- if tools is not none %}<tools>{% endif %}{% if documents %}<documents>{% endif %}
{%- if add_generation_prompt %}{{- '<assistant>\\n' }}{% endif %}
"""
BLOCKS = """\
{% for m in messages %}
    {% if m.role == "assistant" %}
        {% generation %}
            {% set mark = "!" %}
{{ m.content }}{{ mark }}{{ eos_token }}
        {% endgeneration %}
{{ mark is defined }}
    {% else %}
{{ m | tojson }}
    {% endif %}
{% endfor %}
{{ pad_token }}{{ strftime_now("%Y") }}{{ dict(a=1) }}{{ "x".upper() }}
"""


@pytest.mark.parametrize("source", [LIKE_LLAMA, LIKE_QWEN, BLOCKS, "plain\n", "", "{{ messages }}"])
def test_rendering_equals_transformers(source: str) -> None:
    ours = ChatTemplate(source, TOKENS)
    for messages in (MESSAGES[1:2], MESSAGES[:2], MESSAGES[1:]):
        try:
            (theirs,), _ = render_jinja_template(
                [messages], chat_template=source, add_generation_prompt=True, **TOKENS
            )
        except Exception as error:
            with pytest.raises(RequestError, match=str(error)):
                ours.render(messages)
        else:
            assert ours.render(messages) == theirs


def test_today_is_known() -> None:
    before = datetime.now().strftime("%d %b %Y")
    text = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).render(MESSAGES)
    assert text in (before, datetime.now().strftime("%d %b %Y"))


def test_what_the_template_refuses_is_the_requests_fault() -> None:
    template = ChatTemplate(LIKE_LLAMA, TOKENS)
    with pytest.raises(RequestError, match=r"2 messages \(assistant, user\): Conversation roles"):
        template.render(MESSAGES[2:])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.missing.missing }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 1 // 0 }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
    ],
)
def test_whatever_a_template_does_ends_in_our_error(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="cannot render these 1 messages"):
        ChatTemplate(source, {}).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x | nofilter }}", "{% unknown %}", "{{", "\n{%"]
)
def test_a_broken_template_is_the_checkpoints_fault(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"broken in line \d"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "messages", [[], ["hello"], [{"content": "x"}], [{"role": 1, "content": "x"}]]
)
def test_messages_need_roles(messages: Any) -> None:
    with pytest.raises(RequestError, match=r"message"):
        ChatTemplate("x", {}).render(messages)

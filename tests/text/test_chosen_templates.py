"""Which template writes a chat, what it is told, and how a message goes on: as in transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from hmt.base.errors import CheckpointError, ConfigError, RequestError
from hmt.cli.options import embedded_model
from hmt.text import Tokenizer, read_template
from hmt.text.chat_template import ChatTemplate, gguf_template_sources

MINI_DENSE = embedded_model()
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "description": "Does.", "parameters": {}}}
THINKING = """\
{{- bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}
{%- if documents %}{{ documents | tojson }}{% endif %}
{%- if style is defined %}{{ style | tojson }}{{ style.names | join(",") }}{% endif %}
{%- if add_generation_prompt %}<assistant>
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- endif %}
"""
# How templates write the content of a message.
SPACING = {
    "kept": "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}",
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>\n{% endfor %}",
    "thought": "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in MINI_DENSE.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    return tmp_path


def opened(folder: Path, template: str) -> tuple[Tokenizer, Any]:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.open(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("variables", [
    {}, {"enable_thinking": False}, {"enable_thinking": True}, {"add_generation_prompt": False},
    {"documents": [{"title": "a", "text": "b"}]}, {"style": {"names": ["a", "b"], "n": None}},
    {"bos_token": "!"}, {"unused": [1, {"a": 2.5}]},
], ids=str)  # fmt: skip
def test_variables_reach_the_template(folder: Path, variables: dict[str, Any]) -> None:
    ours, theirs = opened(folder, THINKING)
    wanted = theirs.apply_chat_template(
        [USER], tokenize=False, **{"add_generation_prompt": True, **variables}
    )
    assert ours.chat_prompt([USER], variables=variables) == ours.encode_bare(wanted)


def test_variables_do_not_replace_what_is_said(folder: Path) -> None:
    ours, _ = opened(folder, THINKING + "{{ tools }}")
    other = {"messages": [{"role": "user", "content": "other"}], "tools": "other"}
    assert "other" not in ours.decode(ours.chat_prompt([USER], variables=other))


@pytest.mark.parametrize("template", SPACING.values(), ids=SPACING)
def test_a_message_goes_on_as_in_transformers(folder: Path, template: str) -> None:
    ours, _ = opened(folder, template)

    @settings(max_examples=60, deadline=None)
    @given(st.text("ab <>\n|\u00e4", min_size=1, max_size=12))
    def equal(text: str) -> None:
        chat = [USER, {"role": "assistant", "content": text}]
        (wanted,), _ = render_jinja_template(
            [chat], chat_template=template, continue_final_message=True
        )
        assert ours.chat_prompt(chat, goes_on=True) == ours.encode_bare(wanted)

    equal()


def test_a_message_that_is_left_out_cannot_go_on(folder: Path) -> None:
    ours, _ = opened(folder, "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match="cannot be continued"):
        ours.chat_prompt([USER, {"role": "assistant", "content": "It"}], goes_on=True)


PLAIN, WITH_TOOLS = "plain{{ messages[0].content }}", "tools{{ tools | tojson }}"


@pytest.mark.parametrize("kept", ["list", "folder", "both"])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
def test_chats_with_tools_have_a_template_of_their_own(
    folder: Path, kept: str, tools: list[dict[str, Any]] | None
) -> None:
    if kept != "folder":
        config = folder / "tokenizer_config.json"
        named = [
            {"name": "default", "template": PLAIN},
            {"name": "tool_use", "template": WITH_TOOLS},
        ]
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": named}))
    if kept != "list":
        (folder / "chat_template.jinja").write_text(PLAIN)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
        (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    ours, theirs = Tokenizer.open(folder), AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template([USER], tools=tools, tokenize=False)
    assert ours.chat_prompt([USER], tools) == ours.encode_bare(wanted)
    assert wanted.startswith("tools" if tools else "plain")
    assert ours.tool_style is not None


def test_tools_have_a_template_where_plain_chats_have_none(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    ours = Tokenizer.open(folder)
    assert not ours.has_chat_template and ours.tool_style is not None
    assert ours.decode(ours.chat_prompt([USER], [TOOL])).startswith("tools")
    with pytest.raises(RequestError, match="no chat template"):
        ours.chat_prompt([USER])


def test_a_gguf_file_names_templates_too() -> None:
    metadata = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.ggml.model": "gpt2",
    }
    assert gguf_template_sources(metadata) == {"default": "a", "tool_use": "b"}
    assert gguf_template_sources({}) == {}


def test_a_template_that_is_no_file(folder: Path) -> None:
    (folder / "chat_template.jinja").mkdir()
    with pytest.raises(CheckpointError, match="no regular file but a folder"):
        Tokenizer.open(folder)


def test_the_users_own_template_replaces_all(folder: Path, tmp_path: Path) -> None:
    ours, _ = opened(folder, PLAIN)
    file = tmp_path / "mine.jinja"
    file.write_text("mine{{ messages[0].content }}")
    ours.use_chat_template(read_template(file))
    assert ours.decode(ours.chat_prompt([USER], [TOOL])) == "mineHello"
    assert ours.tool_style is None
    for content, told in ((b"{% if %}", "Expected an expression"), (b"\xff", "decode byte")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=told):
            read_template(file)
    with pytest.raises(ConfigError, match="no regular file but a folder"):
        read_template(tmp_path)
    with pytest.raises(ConfigError, match="missing cannot be read"):
        read_template(tmp_path / "missing")


def test_what_a_template_reads() -> None:
    read = ChatTemplate("{% if enable_thinking %}{{ m.thinking }}{% endif %}", {}).names
    assert read == {"enable_thinking", "m"}
    assert not ChatTemplate("{% set thinking = 1 %}{{ thinking }} reasoning_effort", {}).names


def test_about_is_what_transformers_reads(folder: Path) -> None:
    ours, theirs = opened(folder, THINKING)
    about = ours.about
    assert about["chat_template"] == theirs.chat_template
    assert (about["bos_token"], about["eos_token"]) == (theirs.bos_token, theirs.eos_token)
    json.dumps(about)

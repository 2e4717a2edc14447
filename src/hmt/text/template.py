"""Chat templates: messages to the text that the model was trained on.

Format: https://huggingface.co/docs/transformers/chat_templating (Jinja, run in a sandbox because
templates come with checkpoints from strangers).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hmt.base.errors import CheckpointError, ConfigError, RequestError
from hmt.text.json_file import read_object

DEFAULT: Final = "default"  # the template of plain chats, where there are several
TOOL_USE: Final = "tool_use"  # that of chats with tools
_FOLDER: Final = "additional_chat_templates"  # of templates beside chat_template.jinja
_GGUF: Final = "tokenizer.chat_template."  # and a name
# Ends in white space, so that it shows whether the template cuts it off.
_MARK: Final = "\U000f0c05CONTINUED\U000f0c05 "


class ChatTemplate:
    """A compiled chat template with the special tokens it may name, such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CheckpointError where `source` is not a template."""
        environment = _environment()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the checkpoint's chat template is broken in line {error.lineno} "
                f"({error.message}): download chat_template.jinja or tokenizer_config.json again"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `messages`, up to where the assistant's answer begins.

        tools       that may be called, in OpenAI's form
        variables   JSON by name, for the template to read: `enable_thinking`, `reasoning_effort`,
                    ...; they replace special tokens of that name, but neither messages nor tools.
                    Without `add_generation_prompt` it is true

        Raises RequestError for messages without a role and for those the template refuses.
        """
        if not messages:
            raise RequestError("a chat needs at least one message; the list is empty")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"message {number} of {len(messages)} has no role; "
                    'write it as {"role": "user", "content": "..."}'
                )
        names: dict[str, Any] = {"documents": None, "add_generation_prompt": True}
        names |= self._special_tokens
        names |= variables or {}
        names |= {"messages": messages, "tools": tools}
        try:
            return self._template.render(names)
        except Exception as error:  # a template may fail in any way that Python knows
            roles = ", ".join(message["role"] for message in messages[:8])
            raise RequestError(
                f"the checkpoint's chat template cannot render these {len(messages)} messages "
                f"({roles}): {error}; give the roles and the contents that this model expects"
            ) from error


def template_sources(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's chat templates by name, `DEFAULT` and perhaps others; {} without any.

    From chat_template.jinja and additional_chat_templates/NAME.jinja, or from older places.
    Raises CheckpointError where they cannot be read.
    """
    sources: dict[str, str] = {}
    files = {file.stem: file for file in sorted((folder / _FOLDER).glob("*.jinja"))}
    for name, file in {**files, DEFAULT: folder / "chat_template.jinja"}.items():
        try:
            sources[name] = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}): download it again") from error
    if sources:
        return sources
    older = read_object(folder / "chat_template.json")
    stated = older.get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(stated, list):
        entries = [entry for entry in stated if isinstance(entry, dict)]
        stated = {entry.get("name"): entry.get("template") for entry in entries}
    else:
        stated = {} if stated is None else {DEFAULT: stated}
    for name, source in stated.items():
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError(
                f"{folder}: the chat_template is a {type(source).__name__} and not text: download "
                "tokenizer_config.json again"
            )
    return stated


def gguf_template_sources(vocabulary: Mapping[str, Any]) -> dict[str, str]:
    """The same of a GGUF file's metadata."""
    named = {
        key.removeprefix(_GGUF): source
        for key, source in vocabulary.items()
        if key.startswith(_GGUF) and isinstance(source, str)
    }
    source = vocabulary.get("tokenizer.chat_template")
    return {**named, DEFAULT: source} if isinstance(source, str) else named


def read_template(file: Path) -> str:
    """A chat template that the user wrote.  Raises ConfigError where it is none."""
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template {file} cannot be read ({error}): give a text file in Jinja"
        ) from error
    try:
        _environment().parse(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template {file} is broken in line {error.lineno} ({error.message}): "
            "correct it, or leave it out to use the checkpoint's own"
        ) from error
    return source


@lru_cache(maxsize=16)
def variables_of(source: str) -> frozenset[str]:
    """Names that a template reads and does not set itself; none of one that is broken."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(source)))
    except (TemplateError, RecursionError):
        return frozenset()  # rendering says what is wrong


def marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`messages` with a mark where the last one ends, so that `cut` finds its end."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}{_MARK}"}]


def cut(text: str) -> str:
    """`text`, rendered of messages that are `marked`, up to the end of the last one's content.

    As transformers does it: where the template strips content, so is what goes on.  Raises
    RequestError where the template leaves the content out.
    """
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark:
        raise RequestError(
            "the chat template leaves out the last message, or a part of it, so that it cannot be "
            "continued: end with a message of the user"
        )
    return before if after.startswith(" ") else before.rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, LoopControlExtension],
    )


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the answer for training; here: its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(value: Any, **layout: Any) -> str:
    """As transformers: Unicode is kept, and HTML is not escaped as Jinja's own filter would."""
    return json.dumps(value, **{"ensure_ascii": False, **layout})


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)

"""Chat templates: messages to the text that the model was trained on.

Format: https://huggingface.co/docs/transformers/chat_templating (Jinja, run in a sandbox because
templates come with checkpoints from strangers).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hmt.base.errors import CheckpointError, RequestError
from hmt.text.json_file import read_object


class ChatTemplate:
    """A compiled chat template with the special tokens it may name, such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CheckpointError where `source` is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, LoopControlExtension],
        )
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
        effort: str | None = None,
    ) -> str:
        """The text of `messages`, up to where the assistant's answer begins.

        tools    that may be called, in OpenAI's form
        effort   how long to reason; None: as the template says

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
        asked = {} if effort is None else {"reasoning_effort": effort}
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
                **asked,
            )
        except Exception as error:  # a template may fail in any way that Python knows
            roles = ", ".join(message["role"] for message in messages[:8])
            raise RequestError(
                f"the checkpoint's chat template cannot render these {len(messages)} messages "
                f"({roles}): {error}; give the roles and the contents that this model expects"
            ) from error


def template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The checkpoint's chat template: from chat_template.jinja, an older place, or None.

    Raises CheckpointError where it cannot be read.
    """
    file = folder / "chat_template.jinja"
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): download it again") from error
    older = read_object(folder / "chat_template.json")
    source = older.get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several by name; "default" is the one for plain chats
        entries = (entry for entry in source if isinstance(entry, dict))
        source = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise CheckpointError(
            f"{folder}: the chat_template is a {type(source).__name__} and not text: download "
            "tokenizer_config.json again"
        )
    return source


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

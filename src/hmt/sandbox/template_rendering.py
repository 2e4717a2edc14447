"""Rendering chat templates, in a child process.

Format: https://huggingface.co/docs/transformers/chat_templating (Jinja, run in Jinja's sandbox,
which keeps templates from Python's objects; the process keeps them from time and memory).
"""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hmt.sandbox.refusal import Refusal


class Templates:
    """A role: a worker compiles a template, and renders it as often as it is asked."""

    def __init__(self, settings: dict[str, Any], blob: bytes) -> None:
        """`settings` has "longest": characters that a rendered text may have."""
        self._longest: int = settings["longest"]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, LoopControlExtension],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self._environment = environment
        self._template: Template | None = None
        environment.from_string("{% for x in y %}{{ x }}{% endfor %}")  # loads what compiles

    def handle(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        """{"source"}: compile, the answer has the "names" that the template reads.

        {"values"}: render, the answer's bytes are the text in UTF-8.

        Lone surrogates in it are kept ("surrogatepass").  Raises Refusal of kinds "syntax" and
        "length"; what a template raises passes through.
        """
        if "source" in message:
            source = message["source"]
            try:
                self._template = self._environment.from_string(source)
                names = meta.find_undeclared_variables(self._environment.parse(source))
            except TemplateSyntaxError as error:
                raise Refusal("syntax", error.message or "", line=error.lineno) from None
            return {"names": sorted(names)}, b""
        assert self._template is not None
        parts, length = [], 0
        for part in self._template.generate(**message["values"]):
            length += len(part)
            if length > self._longest:
                raise Refusal("length", f"more than {self._longest} characters")
            parts.append(part)
        return {}, "".join(parts).encode("utf-8", "surrogatepass")


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

"""Tools as clients of the Responses API offer them, and what a model is told of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from hmt.base.log import warn_once
from hmt.server.fields import Fields, unsupported
from hmt.server.openai.tools import MAX_TOOLS
from hmt.server.responses.items import INPUT, offered_name
from hmt.server.responses.unused import TOOL_IGNORED

_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
_TEXT: Final = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}

# Clients send these unasked, and go on without what they would do.
_LEFT_OUT: Final = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    "image_generation", "tool_search",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the client runs.

    plain    as chat templates take it, with the name by which the model knows it
    custom   whether it takes text as it is, where functions take an object
    """

    plain: dict[str, Any]
    name: str
    namespace: str | None
    custom: bool

    @property
    def known_as(self) -> str:
        """Its name in `plain`."""
        known: str = self.plain["function"]["name"]
        return known


class FunctionTool(Fields):
    """A function.  Forced calls are held to `parameters`, whatever `strict` says."""

    IGNORED = TOOL_IGNORED

    type: Literal["function"]
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def offered(self, namespace: str | None = None) -> OfferedTool:
        """What the model is told of it."""
        return _offered(namespace, self.name, self.description, self.parameters, custom=False)


class CustomFormat(Fields):
    """What the input of a custom tool looks like; the model is told, and not held to it."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Fields):
    """A tool that takes text: for the model it is a function with one argument."""

    IGNORED = TOOL_IGNORED

    type: Literal["custom"]
    name: _Name
    description: str | None = None
    format: CustomFormat | None = None

    def offered(self, namespace: str | None = None) -> OfferedTool:
        """What the model is told of it."""
        told, form = self.description or "", self.format
        if form is not None and form.definition:
            told += f"\n\nThe form of {INPUT} ({form.syntax}):\n{form.definition}"
        return _offered(namespace, self.name, told.strip() or None, _TEXT, custom=True)


class HostedTool(BaseModel):
    """A tool that a server would run."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.type not in _LEFT_OUT:
            raise unsupported("type", "the server itself runs no tools: offer functions")
        name = self.type
        warn_once(f"tool {name}", f"the tool {name!r} is not offered: the server runs no tools")
        return self


def _kind(tool: Any) -> str:
    found = tool.get("type") if isinstance(tool, dict) else None
    return f"item {found}" if found in ("function", "custom", "namespace") else "item hosted"


_ClientTool = Annotated[
    Annotated[FunctionTool, Tag("item function")]
    | Annotated[CustomTool, Tag("item custom")]
    | Annotated[HostedTool, Tag("item hosted")],
    Discriminator(_kind),
]


class NamespaceTool(Fields):
    """Tools under one name."""

    IGNORED = {"description": "no chat template has a place for it"}  # noqa: RUF012

    type: Literal["namespace"]
    name: _Name
    tools: Annotated[list[_ClientTool], Field(max_length=MAX_TOOLS)]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("item function")]
    | Annotated[CustomTool, Tag("item custom")]
    | Annotated[NamespaceTool, Tag("item namespace")]
    | Annotated[HostedTool, Tag("item hosted")],
    Discriminator(_kind),
]


class ChosenTool(Fields):
    """One of the tools."""

    type: str
    name: str | None = None
    namespace: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.type not in ("function", "custom", "allowed_tools"):
            raise unsupported("type", "the server itself runs no tools: choose a function")
        return self

    @property
    def known_as(self) -> set[str]:
        """The name by which the model knows it, if it has one."""
        return set() if self.name is None else {offered_name(self.namespace, self.name)}


class ToolChoice(ChosenTool):
    """The tool that must be called, or with a type of "allowed_tools" those that may be now."""

    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ChosenTool], Field(min_length=1)] | None = None

    @property
    def names(self) -> set[str]:
        """By which the model knows them."""
        if self.type == "allowed_tools":
            return {name for tool in self.tools or () for name in tool.known_as}
        return self.known_as


def offered_tools(tools: Iterable[AnyTool]) -> Iterator[OfferedTool]:
    """Those that clients run, the tools of namespaces among them."""
    for tool in tools:
        if isinstance(tool, FunctionTool | CustomTool):
            yield tool.offered()
        elif isinstance(tool, NamespaceTool):
            clients = (one for one in tool.tools if isinstance(one, FunctionTool | CustomTool))
            yield from (one.offered(tool.name) for one in clients)


def _offered(
    namespace: str | None,
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    *,
    custom: bool,
) -> OfferedTool:
    function: dict[str, Any] = {"name": offered_name(namespace, name)}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return OfferedTool({"type": "function", "function": function}, name, namespace, custom)

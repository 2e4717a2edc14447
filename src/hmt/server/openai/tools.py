"""Tools that may be called, as OpenAI's clients offer them and choose among them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from hmt.server.fields import Fields

MAX_TOOLS = 128


class Function(Fields):
    """What may be called.  Forced calls are held to `parameters`, whatever `strict` says.

    `return`, as transformers describes results, goes to chat templates that have a place for it.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    return_: Annotated[dict[str, Any] | None, Field(alias="return")] = None


class Tool(Fields):
    """A tool that may be called."""

    IGNORED = {  # noqa: RUF012
        "cache_control": "prompts are cached as --prefix-cache says",
        "defer_loading": "all tools are offered at once",
        "eager_input_streaming": "a call comes whole",
    }

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """Which one."""

    name: str


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class Allowed(Fields):
    """Of the tools those that may be called now."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(Fields):
    """OpenAI's tool choice of this name."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As chat templates take them."""
    return [tool.model_dump(exclude_none=True, by_alias=True) for tool in tools]

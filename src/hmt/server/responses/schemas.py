"""What clients may ask for in the words of the Responses API."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from hmt.contracts.request import Grammar, GrammarKind
from hmt.server.fields import Fields, wrong
from hmt.server.openai.sampling import Effort, Longest, Sampler
from hmt.server.openai.tools import MAX_TOOLS
from hmt.server.responses.items import AnyItem
from hmt.server.responses.tools import AnyTool, OfferedTool, ToolChoice, offered_tools
from hmt.server.responses.unused import BODY_IGNORED, BODY_REFUSED

_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"


class TextFormat(Fields):
    """The form of an answer's text.  A schema is always held to, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise wrong("schema", "it belongs to the type json_schema")
        return self


class TextConfig(Fields):
    """What is said of an answer's text."""

    IGNORED = {"verbosity": "no chat template has a place for it"}  # noqa: RUF012

    format: TextFormat | None = None


class Reasoning(Fields):
    """How long the model reasons, and how that is told: as a summary, where one is asked for."""

    IGNORED = {  # noqa: RUF012
        "context": "the chat template says which reasoning a prompt has",
        "mode": "a model reasons in one way",
    }

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def summarised(self) -> bool:
        """Whether reasoning is told as its summary."""
        return (self.summary or self.generate_summary) not in (None, "none")


class StreamOptions(Fields):
    """What is said of a stream."""

    IGNORED = {"include_obfuscation": "events have no padding"}  # noqa: RUF012


class ResponsesBody(Sampler):
    """POST /v1/responses."""

    IGNORED = BODY_IGNORED
    REFUSED = BODY_REFUSED

    input: str | list[AnyItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str | int | float | bool | None] | None = None
    max_output_tokens: Longest | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.input and self.previous_response_id is None:
            raise wrong("input", "there is nothing to answer: give text or items")
        if self.structured_outputs and self.text_grammar:
            raise wrong("structured_outputs", "text.format says what the answer must be")
        names = [tool.known_as for tool in self.offered]
        if len(set(names)) < len(names):
            raise wrong("tools", "two of them have one name")
        if len(names) > MAX_TOOLS:
            raise wrong("tools", f"there are {len(names)}; at most {MAX_TOOLS} are taken")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise wrong("tool_choice", "there are no tools to choose from")
        if isinstance(self.tool_choice, ToolChoice) and not self.tool_choice.names:
            raise wrong("tool_choice", "it names no tool")
        if not self._chosen_names <= set(names):
            raise wrong("tool_choice", "it names a tool that is not among them")
        if self.must_call and self.grammar is not None:
            raise wrong("tool_choice", "the answer cannot be a call and have another form")
        return self

    @property
    def stored(self) -> bool:
        """Whether the response may be asked for later; as with OpenAI, where nothing is said."""
        return self.store is not False

    @property
    def text_grammar(self) -> Grammar | None:
        """The form that `text` says."""
        form = self.text and self.text.format
        if not form or form.type == "text":
            return None
        schema = {"type": "object"} if form.schema_ is None else form.schema_
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))

    @property
    @override
    def grammar(self) -> Grammar | None:
        return super().grammar or self.text_grammar

    @property
    @override
    def formed(self) -> str:
        return "text.format" if self.structured_outputs is None else super().formed

    @property
    def logprobs(self) -> int | None:
        """How many log-probabilities each token of the text has; None: none."""
        if self.top_logprobs is None and _LOGPROBS not in (self.include or ()):
            return None
        return self.top_logprobs or 0

    @property
    def sealed(self) -> bool:
        """Whether reasoning comes in a form that clients give back without reading it."""
        return _SEALED in (self.include or ())

    @property
    def summarised(self) -> bool:
        """Whether reasoning is told as its summary."""
        return self.reasoning is not None and self.reasoning.summarised

    @property
    def offered(self) -> list[OfferedTool]:
        """Tools that the client runs."""
        return list(offered_tools(self.tools or ()))

    @property
    def _chosen_names(self) -> set[str]:
        return self.tool_choice.names if isinstance(self.tool_choice, ToolChoice) else set()

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            return choice.type != "allowed_tools" or choice.mode == "required"
        return choice == "required"

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that are offered, as templates take them; of allowed_tools only those."""
        if self.tool_choice == "none":
            return []
        tools = [tool.plain for tool in self.offered]
        choice = self.tool_choice
        if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
            return [tool for tool in tools if tool["function"]["name"] in choice.names]
        return tools

    @property
    def forced(self) -> list[dict[str, Any]]:
        """Those of which one must be called."""
        if not self.must_call:
            return []
        names = self._chosen_names
        return [tool for tool in self.callable if not names or tool["function"]["name"] in names]

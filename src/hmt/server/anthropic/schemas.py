"""What clients may ask for in Anthropic's words; checked as strictly as OpenAI's."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from hmt.contracts.request import Grammar, GrammarKind, Sampling
from hmt.server.anthropic.unused import (
    BLOCK_IGNORED,
    IGNORED,
    REFUSED,
    TOOL_IGNORED,
    TURN_IGNORED,
    TURN_REFUSED,
)
from hmt.server.fields import Fields, unsupported, wrong
from hmt.server.images import RemoteImage, content_of, file_of_base64, file_of_url
from hmt.server.openai.sampling import MAX_STOPS, CacheSalt, Stop, TopP, nucleus
from hmt.server.openai.tools import MAX_TOOLS


class Block(Fields):
    """What a message is made of."""

    IGNORED = BLOCK_IGNORED


class TextBlock(Block):
    """A piece of text."""

    type: Literal["text"]
    text: str


Text = str | Annotated[list[TextBlock], Field(min_length=1)]


class ImageSource(Fields):
    """Where an image comes from: the request itself, or a host that the server may fetch from."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for name in ("url",) if self.type == "url" else ("media_type", "data"):
            if getattr(self, name) is None:
                raise PydanticCustomError("missing", "it is missing", {"param": name})
        return self


class ImageBlock(Block):
    """An image."""

    type: Literal["image"]
    source: ImageSource
    _file: bytes | RemoteImage = PrivateAttr(b"")

    @model_validator(mode="after")
    def _decoded(self) -> Self:
        source = self.source
        if source.type == "url":
            self._file = file_of_url(source.url or "", "source")
        else:
            self._file = file_of_base64(source.data or "", source.media_type or "", "source")
        source.data = None  # megabytes that are not read again
        return self

    @property
    def file(self) -> bytes | RemoteImage:
        """The image's file."""
        return self._file


class ThinkingBlock(Block):
    """What the assistant thought before; where it led to a call, templates may give it again."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Block):
    """What Anthropic's models thought and only Anthropic can read: it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]


class ToolResultBlock(Block):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: Text | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
_SPEAKER = {
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
    "image": "user",
}


class Turn(Fields):
    """One message."""

    IGNORED = TURN_IGNORED
    REFUSED = TURN_REFUSED

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Field(min_length=1)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for block in self.content if isinstance(self.content, list) else ():
            if _SPEAKER.get(block.type, self.role) != self.role:
                raise wrong("content", f"{block.type} is not what the {self.role} says")
        return self

    @property
    def images(self) -> list[bytes | RemoteImage]:
        """Files of its images, in order."""
        blocks = self.content if isinstance(self.content, list) else ()
        return [block.file for block in blocks if isinstance(block, ImageBlock)]

    def plain(self) -> list[dict[str, Any]]:
        """As chat templates take it: results of tools are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [
            {"role": "tool", "tool_call_id": one.tool_use_id, "content": plain(one.content or "")}
            for one in self.content
            if isinstance(one, ToolResultBlock)
        ]
        text = content_of(
            [
                one.text if isinstance(one, TextBlock) else None
                for one in self.content
                if isinstance(one, TextBlock | ImageBlock)
            ]
        )
        calls = [
            {"id": one.id, "type": "function",
             "function": {"name": one.name, "arguments": one.input}}
            for one in self.content
            if isinstance(one, ToolUseBlock)
        ]  # fmt: skip
        message: dict[str, Any] = {"role": self.role, "content": text}
        thought = "".join(one.thinking for one in self.content if isinstance(one, ThinkingBlock))
        if calls:
            message["tool_calls"] = calls
        if calls and thought:
            message["reasoning_content"] = message["thinking"] = thought
        return [*results, message] if text or calls or not results else results


class OfferedTool(Fields):
    """A tool that may be called.  `allowed_callers`: by the model itself ("direct"), if given."""

    IGNORED = TOOL_IGNORED

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: list[str] | None = None

    @model_validator(mode="after")
    def _direct(self) -> Self:
        if self.allowed_callers and "direct" not in self.allowed_callers:
            raise unsupported(
                "allowed_callers", 'the server runs no code that calls tools: add "direct"'
            )
        return self

    def plain(self) -> dict[str, Any]:
        """In OpenAI's form, as chat templates take it."""
        function = {"name": self.name, "description": self.description}
        known = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": known | {"parameters": self.input_schema}}


class ToolChoice(Fields):
    """Whether, and which, tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """Whether the model may think before it answers, and for how many tokens."""

    IGNORED = {  # noqa: RUF012
        "display": "what was thought is told as it is",
        "block_binding": "blocks of earlier thoughts are bound to nothing",
    }

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None

    @property
    def on(self) -> bool:
        """Whether it may."""
        return self.type != "disabled"


class OutputFormat(Fields):
    """The schema that the answer is held to."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    @property
    def grammar(self) -> Grammar:
        """The same for the engine."""
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(self.schema_))


class OutputConfig(Fields):
    """How hard the model tries, and the form of its answer."""

    IGNORED = {"task_budget": "the client ends a task of many requests itself"}  # noqa: RUF012

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Thread(Fields):
    """A conversation that the server holds.  Here it may be begun, and must be sent whole."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None

    @model_validator(mode="after")
    def _new(self) -> Self:
        if self.type == "continue":
            why = "the server holds no conversations: send all messages"
            raise PydanticCustomError("thread_not_found", "{why}", {"param": "type", "why": why})
        return self


class Counted(Fields):
    """POST /v1/messages/count_tokens."""

    IGNORED = IGNORED
    REFUSED = REFUSED

    model: str
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Text | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: Thread | None = None

    @model_validator(mode="after")
    def _callable(self) -> Self:
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise wrong("tools", "two of them have one name")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool"):
            if not names:
                raise wrong("tool_choice", "there are no tools to choose from")
            if (choice.type == "tool") != (choice.name is not None):
                raise wrong("tool_choice", "a name belongs to the type tool")
            if choice.name is not None and choice.name not in names:
                raise wrong("tool_choice", "it names a tool that is not among them")
        if self.forced and self.grammar is not None:
            raise wrong("tool_choice", "the answer cannot be a call and have another form")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The form that the answer must have."""
        stated = self.output_config and self.output_config.format
        form = stated or self.output_format
        return None if form is None else form.grammar

    @property
    def effort(self) -> str | None:
        """How hard the model tries."""
        return None if self.output_config is None else self.output_config.effort

    @property
    def goes_on(self) -> bool:
        """Whether the answer continues the last message, as Anthropic's does ("prefill")."""
        last = self.messages[-1]
        plain = last.plain()[-1]
        return last.role == "assistant" and bool(plain["content"]) and "tool_calls" not in plain

    @property
    def chat(self) -> list[dict[str, Any]]:
        """As chat templates take it."""
        system = [] if self.system is None else [{"role": "system", "content": plain(self.system)}]
        return system + [message for turn in self.messages for message in turn.plain()]

    @property
    def images(self) -> tuple[bytes | RemoteImage, ...]:
        """Files of all images, in order."""
        return tuple(image for turn in self.messages for image in turn.images)

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that may be called, in OpenAI's form."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return [tool.plain() for tool in self.tools or ()]

    @property
    def forced(self) -> list[dict[str, Any]]:
        """Those of which one must be called."""
        choice = self.tool_choice
        if choice is None or choice.type not in ("any", "tool"):
            return []
        return [one for one in self.callable if choice.name in (None, one["function"]["name"])]

    @property
    def several(self) -> bool:
        """Whether one answer may have several calls."""
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)


class MessagesBody(Counted):
    """POST /v1/messages.  cache_salt is vLLM's."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    cache_salt: CacheSalt | None = None

    @property
    def sampling(self) -> Sampling:
        """The same for the engine."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=nucleus(self.top_p),
            top_k=self.top_k or 0,
        )


def plain(text: str | list[TextBlock]) -> str:
    """All of it."""
    return text if isinstance(text, str) else "".join(block.text for block in text)

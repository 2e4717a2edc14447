"""The items of a conversation, as clients of the Responses API send them, and as chats."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator
from pydantic_core import PydanticCustomError

from hmt.server.fields import Fields, Refusal, unsupported, wrong
from hmt.server.images import RemoteImage, content_of, file_of_url
from hmt.server.openai.messages import CalledFunction
from hmt.server.responses.unused import ITEM_IGNORED, PART_IGNORED

# What stands before reasoning in `encrypted_content`, which clients give back as it is.
SEALED: Final = "hmt:"
INPUT: Final = "input"  # the argument of a tool that takes text as it is

_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_OTHERS: Final = ("input_file", "input_audio")


class InputPart(Fields):
    """A part of an item's content: text, an image, or an earlier answer's refusal to answer."""

    IGNORED = PART_IGNORED
    REFUSED = {"file_id": Refusal("the server keeps no files: write image_url")}  # noqa: RUF012

    type: Literal[
        "input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal",
        "input_image", "input_file", "input_audio",
    ]  # fmt: skip
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    _file: bytes | RemoteImage | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.type in _OTHERS:
            raise unsupported("type", "only text and images are served: send a file's text")
        name = {"refusal": "refusal", "input_image": "image_url"}.get(self.type, "text")
        if getattr(self, name) is None:
            raise PydanticCustomError("missing", "it is missing", {"param": name})
        if self.type == "input_image" and self.image_url is not None:
            self._file = file_of_url(self.image_url, "image_url")
            self.image_url = None  # megabytes that are not read again
        return self

    @property
    def image(self) -> bytes | RemoteImage | None:
        """The file of an image; None of other parts."""
        return self._file

    @property
    def said(self) -> str | None:
        """The text of all others."""
        return None if self._file is not None else self.text or self.refusal or ""


Content = str | list[InputPart]


def text_of(content: Content | None) -> str:
    """All that was said."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.said or "" for part in content)


def images_of(content: Content | None) -> list[bytes | RemoteImage]:
    """Files of images, in order."""
    parts = content if isinstance(content, list) else ()
    return [part.image for part in parts if part.image is not None]


class Item(Fields):
    """What a conversation is made of."""

    IGNORED = ITEM_IGNORED


class MessageItem(Item):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.role != "user" and images_of(self.content):
            raise wrong("content", f"images come from the user, and this is the {self.role}")
        return self


class CallItem(Item):
    """A call that the assistant made.  With a type of "custom_tool_call" its input is text."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        name = "arguments" if self.type == "function_call" else INPUT
        if getattr(self, name) is None:
            raise PydanticCustomError("missing", "it is missing", {"param": name})
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        given: str | dict[str, Any] = self.arguments or ""
        if self.type == "custom_tool_call":
            given = {INPUT: self.input}
        called = CalledFunction(name=offered_name(self.namespace, self.name), arguments=given)
        return {"id": self.call_id, "type": "function", "function": called.plain()}


class OutputItem(Item):
    """What came of a call."""

    IGNORED = {**ITEM_IGNORED, "name": "the call has it", "namespace": "the call has it"}  # noqa: RUF012

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Content


class ReasoningItem(Item):
    """What the assistant thought; templates may give it again where it led to a call."""

    type: Literal["reasoning"]
    summary: list[InputPart] | None = None
    content: list[InputPart] | None = None
    encrypted_content: str | None = None

    @property
    def thought(self) -> str:
        """As text: "" of what other servers have encrypted."""
        sealed = self.encrypted_content or ""
        if sealed.startswith(SEALED):
            return sealed.removeprefix(SEALED)
        return text_of(self.content) or text_of(self.summary)


class ItemReference(Item):
    """An item of an earlier response, by its id."""

    IGNORED = {}  # noqa: RUF012

    type: Literal["item_reference"] | None = None
    id: Annotated[str, Field(min_length=1)]


HostedType = Literal[
    "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call",
    "tool_search_call", "tool_search_output", "mcp_list_tools", "ghost_snapshot",
]  # fmt: skip


class HostedItem(BaseModel):
    """What a tool of another server did, which leaves nothing that a chat has a place for."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: HostedType


class OtherItem(Item):
    """Any other."""

    type: str

    @model_validator(mode="after")
    def _known(self) -> Self:
        raise unsupported("type", f"items of type {self.type[:64]!r} are not served")


_KINDS: Final = {
    "message": "message", "function_call": "call", "custom_tool_call": "call",
    "function_call_output": "output", "custom_tool_call_output": "output",
    "reasoning": "reasoning", "item_reference": "reference",
    **dict.fromkeys(get_args(HostedType), "hosted"),
}  # fmt: skip


def _kind(item: Any) -> str:
    if not isinstance(item, dict):
        return "item message"
    found = item.get("type")
    if found is None:
        found = "item_reference" if "id" in item and "role" not in item else "message"
    if not isinstance(found, str):
        return "item message"
    return f"item {_KINDS.get(found, 'other')}"


AnyItem = Annotated[
    Annotated[MessageItem, Tag("item message")]
    | Annotated[CallItem, Tag("item call")]
    | Annotated[OutputItem, Tag("item output")]
    | Annotated[ReasoningItem, Tag("item reasoning")]
    | Annotated[ItemReference, Tag("item reference")]
    | Annotated[HostedItem, Tag("item hosted")]
    | Annotated[OtherItem, Tag("item other")],
    Discriminator(_kind),
]


def offered_name(namespace: str | None, name: str) -> str:
    """The name by which a model knows a tool: those of a namespace begin with it."""
    return name if namespace is None else f"{namespace}__{name}"


def chat_of(instructions: str | None, items: Iterable[AnyItem]) -> list[dict[str, Any]]:
    """The messages of a chat, as templates take them.

    Reasoning, text and calls that follow each other are one message of the assistant, since they
    were one answer.  What the system says at the beginning is one message, as many templates want
    it.  Images of a call's output come after it as the user's, since no template has a place for
    them elsewhere.
    """
    chat = list(_messages(instructions, items))
    begins = [one["content"] for one in _leading(chat)]
    if len(begins) < 2:
        return chat
    return [{"role": "system", "content": "\n\n".join(begins)}, *chat[len(begins) :]]


def images_in(items: Iterable[AnyItem]) -> list[bytes | RemoteImage]:
    """Files of all images, in the order in which `chat_of` has them."""
    return [
        image
        for item in items
        if isinstance(item, MessageItem | OutputItem)
        for image in images_of(item.content if isinstance(item, MessageItem) else item.output)
    ]


def _leading(chat: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in chat:
        if message["role"] != "system":
            return
        yield message


def _messages(instructions: str | None, items: Iterable[AnyItem]) -> Iterator[dict[str, Any]]:
    if instructions:
        yield {"role": "system", "content": instructions}
    said: dict[str, Any] | None = None  # by the assistant, and not yet at its end
    shown: list[str | None] = []  # images of outputs
    for item in items:
        if isinstance(item, HostedItem):
            continue
        if shown and not isinstance(item, OutputItem):
            yield {"role": "user", "content": content_of(shown)}
            shown = []
        if _is_new(said, item):
            if said is not None:
                yield said
            said = None
        if isinstance(item, MessageItem) and item.role != "assistant":
            yield _message(item)
        elif isinstance(item, OutputItem):
            text = text_of(item.output)
            yield {"role": "tool", "tool_call_id": item.call_id, "content": text}
            shown += [None] * len(images_of(item.output))
        else:
            said = _add(said or {"role": "assistant", "content": ""}, item)
    if said is not None:
        yield said
    if shown:
        yield {"role": "user", "content": content_of(shown)}


def _is_new(said: dict[str, Any] | None, item: AnyItem) -> bool:
    """Whether `item` is no more of what the assistant has `said`."""
    if said is None or isinstance(item, CallItem):
        return False
    whole = bool(said["content"] or "tool_calls" in said)
    is_assistants = isinstance(item, MessageItem) and item.role == "assistant"
    return whole if is_assistants or isinstance(item, ReasoningItem) else True


def _add(said: dict[str, Any], item: AnyItem) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        return said | {"content": text_of(item.content)}
    if isinstance(item, CallItem):
        return said | {"tool_calls": [*said.get("tool_calls", ()), item.plain()]}
    assert isinstance(item, ReasoningItem)
    thought = said.get("reasoning_content", "") + item.thought
    # By the names in templates of Qwen, of gpt-oss and of vLLM's models.
    return said | dict.fromkeys(("reasoning_content", "thinking", "reasoning"), thought)


def _message(item: MessageItem) -> dict[str, Any]:
    role = "system" if item.role == "developer" else item.role
    if isinstance(item.content, str):
        return {"role": role, "content": item.content}
    return {"role": role, "content": content_of([part.said for part in item.content])}

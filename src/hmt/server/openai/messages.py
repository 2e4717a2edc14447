"""The messages of a chat, as OpenAI's clients send them and as chat templates take them."""

import json
from contextlib import suppress
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from hmt.server.fields import Fields, wrong
from hmt.server.images import RemoteImage, content_of, file_of_url, video_of_url
from hmt.server.openai.unused import MESSAGE_IGNORED, MESSAGE_REFUSED

# Of chat_template_kwargs: what the request says elsewhere.
RESERVED = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
     "tokenize")
)  # fmt: skip


class ImageUrl(Fields):
    """An image: a data URL, or where the server may fetch it."""

    IGNORED = {"detail": "images are encoded as large as the model takes them"}  # noqa: RUF012

    url: str


class VideoUrl(Fields):
    """A video, as a data URL: vLLM's field."""

    IGNORED = {"fps": "a file says how fast its frames follow each other"}  # noqa: RUF012

    url: str


class Part(Fields):
    """A part of a message's content: text, image, video, or an earlier answer's refusal."""

    IGNORED = {  # noqa: RUF012
        "cache_control": "prompts are cached as --prefix-cache says",
        "prompt_cache_breakpoint": "prompts are cached as --prefix-cache says",
        "annotations": "tells of an answer what its text already has",
    }

    type: Literal["text", "refusal", "image_url", "video_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    video_url: VideoUrl | str | None = None
    _file: bytes | RemoteImage | None = PrivateAttr(None)
    _video: bytes | tuple[bytes, ...] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if getattr(self, self.type) is None:
            raise PydanticCustomError("missing", "it is missing", {"param": self.type})
        if self.type == "image_url" and self.image_url is not None:
            url = self.image_url if isinstance(self.image_url, str) else self.image_url.url
            self._file = file_of_url(url, "image_url")
            self.image_url = None  # megabytes that are not read again
        if self.type == "video_url" and self.video_url is not None:
            url = self.video_url if isinstance(self.video_url, str) else self.video_url.url
            self._video = video_of_url(url, "video_url")
            self.video_url = None
        return self

    @property
    def image(self) -> bytes | RemoteImage | None:
        """The file of an image; None of other parts."""
        return self._file

    @property
    def video(self) -> bytes | tuple[bytes, ...] | None:
        """The file of a video, or those of its frames; None of other parts."""
        return self._video

    @property
    def shows(self) -> str:
        """What chat templates call it: "image" or "video"; "" of text."""
        return "image" if self._file is not None else "video" if self._video is not None else ""

    @property
    def said(self) -> str:
        """The text of either."""
        return self.text or self.refusal or ""


class CalledFunction(Fields):
    """What an assistant has called.  `arguments`: JSON, or as Ollama's clients have it, an object.

    In a stream without arguments they are null or empty.
    """

    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: arguments as an object."""
        arguments: Any = self.arguments or {}
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):  # what is no JSON stays text
                arguments = json.loads(arguments)
        return {"name": self.name, "arguments": arguments}


class Called(Fields):
    """One call of a tool, in an earlier answer."""

    IGNORED = {"index": "tells where in a stream the call was"}  # noqa: RUF012

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def plain(self, number: int) -> dict[str, Any]:
        """As chat templates take it; a call without an id is known by its `number`."""
        called = self.id or f"call_{number}"
        return {"id": called, "type": "function", "function": self.function.plain()}


class Message(Fields):
    """One message of a chat.

    `reasoning` is what vLLM calls `reasoning_content`.  `function_call` and the role "function" are
    what `tool_calls` and "tool" replaced.
    """

    IGNORED = MESSAGE_IGNORED
    REFUSED = MESSAGE_REFUSED

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: CalledFunction | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        spoken = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")
        for kind, shown in (("images", self.images), ("videos", self.videos)):
            if shown and self.role != "user":
                raise wrong("content", f"{kind} come from the user, and this is the {self.role}")
        if self.role == "assistant":
            return self  # an answer may have been empty
        for name in spoken:
            if getattr(self, name):
                raise wrong(name, f"only an assistant has {name}")
        if self.content is None or self.content == []:
            raise wrong("content", f"a message of the {self.role} needs content")
        return self

    @property
    def text(self) -> str:
        """All that was said, a refusal included."""
        content = self.content or self.refusal or ""
        return content if isinstance(content, str) else "".join(part.said for part in content)

    @property
    def images(self) -> list[bytes | RemoteImage]:
        """Files of its images, in order."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.image for part in parts if part.image is not None]

    @property
    def videos(self) -> list[bytes | tuple[bytes, ...]]:
        """Files of its videos, in order."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.video for part in parts if part.video is not None]

    def plain(self) -> dict[str, Any]:
        """As chat templates take it; images and videos are parts of these types."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        content: str | list[dict[str, Any]] = self.text
        if isinstance(self.content, list) and (self.images or self.videos):
            kinds = [part.shows for part in self.content]
            said = [None if p.shows else p.said for p in self.content]
            content = content_of(said, [kind for kind in kinds if kind])
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if thought := self.reasoning_content or self.reasoning:
            # By the names in templates of Qwen, of gpt-oss and of vLLM's models.
            message["reasoning_content"] = message["thinking"] = message["reasoning"] = thought
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        calls = list(self.tool_calls or ())
        if self.function_call is not None:
            calls.append(Called(function=self.function_call))
        if calls:
            message["tool_calls"] = [call.plain(number) for number, call in enumerate(calls)]
        return message


class Templated(Fields):
    """What chat templates are told beside messages and tools; the names are vLLM's."""

    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _continuable(self) -> Self:
        for name in RESERVED.intersection(self.chat_template_kwargs or ()):
            raise wrong("chat_template_kwargs", f"{name} has its own field")
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong(
                "add_generation_prompt", "continue_final_message begins no new message: set false"
            )
        if self.continue_final_message and self.messages:
            last = self.messages[-1]
            if last.role != "assistant" or not last.text or last.tool_calls:
                raise wrong(
                    "continue_final_message",
                    "the last message must be the assistant's, with text and without tool_calls",
                )
        return self

    @property
    def variables(self) -> dict[str, Any]:
        """By name, what the template may read."""
        prompted = self.add_generation_prompt
        if prompted is None:
            prompted = not self.continue_final_message
        return {**(self.chat_template_kwargs or {}), "add_generation_prompt": prompted}

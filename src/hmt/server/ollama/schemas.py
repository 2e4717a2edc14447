"""What clients may ask for in the words of Ollama's API."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from hmt.contracts.request import Grammar, GrammarKind, Sampling
from hmt.server.fields import Fields, Refusal, unsupported, wrong
from hmt.server.images import content_of, file_of_base64
from hmt.server.ollama.unused import (
    CHAT_REFUSED,
    GENERATE_REFUSED,
    IGNORED,
    OPTIONS_IGNORED,
    OPTIONS_REFUSED,
)
from hmt.server.openai.messages import CalledFunction
from hmt.server.openai.sampling import MAX_STOPS, Stop, TopP, nucleus
from hmt.server.openai.schemas import MAX_INPUTS
from hmt.server.openai.tools import MAX_TOOLS, Tool

_RANDOM: Final = -1  # a seed that is none


class Options(Fields):
    """How tokens are chosen and answers end; where nothing is said, as Ollama does it.

    num_predict   0 and less: what the context holds
    num_ctx       the context that the client reckons with
    """

    IGNORED = OPTIONS_IGNORED
    REFUSED = OPTIONS_REFUSED

    num_ctx: Annotated[int, Field(ge=0)] | None = None
    num_predict: Annotated[int, Field(ge=-2)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.repeat_penalty not in (None, 1) and self.repeat_last_n not in (None, -1):
            raise unsupported(
                "repeat_last_n", "the penalty is for all of prompt and answer: leave it out, or -1"
            )
        return self

    @property
    def longest(self) -> int | None:
        """Tokens that an answer may have; -1: what the context holds."""
        if self.num_predict is None:
            return None
        return self.num_predict if self.num_predict > 0 else -1

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, logprobs: int | None) -> Sampling:
        """The same for the engine.

        Ollama's temperature, top_k and top_p where nothing is said, and no penalty: its own is
        for the last 64 tokens, and there is none such here.
        """
        return Sampling(
            temperature=0.8 if self.temperature is None else self.temperature,
            top_k=40 if self.top_k is None else max(0, self.top_k),
            top_p=nucleus(self.top_p, 0.9),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repeat_penalty or 1.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            seed=None if self.seed == _RANDOM else self.seed,
            logprobs=logprobs,
        )


class Asked(Fields):
    """What chats and completions have in common.  `stream` is true where nothing is said."""

    IGNORED = IGNORED

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def streamed(self) -> bool:
        """Whether the answer comes in parts."""
        return self.stream is not False

    @property
    def settings(self) -> Options:
        """The options, or none."""
        return self.options or Options()

    @property
    def grammar(self) -> Grammar | None:
        """The form that the answer must have."""
        if not self.format:
            return None
        schema = {"type": "object"} if isinstance(self.format, str) else self.format
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))

    @property
    def scored(self) -> int | None:
        """How many log-probabilities stand beside each token's; None: it has none."""
        if self.logprobs or self.top_logprobs:
            return self.top_logprobs or 0
        return None

    @property
    def effort(self) -> str | None:
        """How long to reason, where a word says so."""
        return self.think if isinstance(self.think, str) else None

    @property
    def thinks(self) -> bool | None:
        """Whether to reason; None: not said, or by a word."""
        return self.think if isinstance(self.think, bool) else None


class Function(CalledFunction):
    """What an assistant has called."""

    IGNORED = {"index": "calls are in order"}  # noqa: RUF012


class Called(Fields):
    """One call of a tool, in an earlier answer."""

    IGNORED = {"type": "there are functions only"}  # noqa: RUF012

    id: str | None = None
    function: Function


class Message(Fields):
    """One message of a chat.  `images`: files in base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Called] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    _files: list[bytes] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.images and self.role != "user":
            raise wrong("images", f"images come from the user, and this is the {self.role}")
        self._files, self.images = _files_of(self.images), None  # megabytes not read again
        for name in ("tool_calls", "thinking"):
            if getattr(self, name) and self.role != "assistant":
                raise wrong(name, f"only an assistant has {name}")
        if self.content is None and not self.files and self.role != "assistant":
            raise wrong("content", f"a message of the {self.role} needs content")
        return self

    @property
    def files(self) -> list[bytes]:
        """Of its images, in order."""
        return self._files

    def plain(self) -> dict[str, Any]:
        """As chat templates take it, but for calls and what they gave."""
        message: dict[str, Any] = {"role": self.role, "content": pictured(self.content, self.files)}
        if self.thinking:
            # By the names in templates of Qwen, of gpt-oss and of vLLM's models.
            names = ("reasoning_content", "thinking", "reasoning")
            message |= dict.fromkeys(names, self.thinking)
        return message


class OfferedTool(Tool):
    """A tool that may be called."""

    type: Literal["function"] = "function"


class ChatBody(Asked):
    """POST /api/chat.  Without messages it tells that the model is loaded, as with Ollama."""

    REFUSED = CHAT_REFUSED

    messages: list[Message] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _callable(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise wrong("tools", "two of them have one name")
        return self

    @property
    def files(self) -> list[bytes]:
        """Of all images, in order."""
        return [file for message in self.messages or () for file in message.files]

    @property
    def goes_on(self) -> bool:
        """Whether the answer continues the last message, as with Ollama: the assistant's is."""
        last = self.messages[-1] if self.messages else None
        return last is not None and last.role == "assistant" and bool(last.content) and not (
            last.tool_calls
        )  # fmt: skip


class GenerateBody(Asked):
    """POST /api/generate.  Without a prompt it tells that the model is loaded, as with Ollama.

    raw      the prompt is taken as it is, without a chat template
    suffix   the answer is what stands between prompt and suffix
    """

    REFUSED = GENERATE_REFUSED

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    _files: list[bytes] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self._files, self.images = _files_of(self.images), None
        if self.raw or self.suffix:
            bare = "raw" if self.raw else "suffix"
            for name, given in (("system", self.system), ("images", self._files)):
                if given:
                    raise wrong(name, f"it belongs to a chat, and {bare} means none: leave it out")
        return self

    @property
    def files(self) -> list[bytes]:
        """Of its images, in order."""
        return self._files

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages of which the prompt is the last."""
        content = pictured(self.prompt, self.files)
        begins = [{"role": "system", "content": self.system}] if self.system else []
        return [*begins, {"role": "user", "content": content}]


class Embedded(Fields):
    """What both endpoints of embeddings take.  `truncate`: cut long inputs; true where not said."""

    IGNORED = {**IGNORED, "options": "a text is read, and nothing is chosen"}  # noqa: RUF012

    model: str


class EmbedBody(Embedded):
    """POST /api/embed.  Without input it tells that the model is loaded, as with Ollama."""

    REFUSED = {"prompt": Refusal("write input")}  # noqa: RUF012

    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0)] | None = None

    @property
    def texts(self) -> list[str]:
        """All of them."""
        given = self.input or []
        return [given] if isinstance(given, str) else given


class EmbeddingsBody(Embedded):
    """POST /api/embeddings, which is older: one prompt."""

    REFUSED = {"input": Refusal("write prompt, or ask /api/embed")}  # noqa: RUF012

    prompt: str | None = None


class ShowBody(Fields):
    """POST /api/show.  `name` is an older word for `model`."""

    IGNORED = {"verbose": "there is one account of a model"}  # noqa: RUF012

    model: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not self.known_as:
            raise wrong("model", "it is missing")
        return self

    @property
    def known_as(self) -> str:
        """The model's name."""
        return self.model or self.name or ""


def plain_chat(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """As chat templates take it.

    Calls have no ids in Ollama's API, and some templates want them: they are numbered, and what a
    tool gave belongs to the first call of its name that has no result, or to the first such call.
    """
    chat: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # calls without a result
    called = 0
    for message in messages:
        plain = message.plain()
        if message.tool_calls:
            waiting = []
            for call in message.tool_calls:
                known = call.id or f"call_{called}"
                function = call.function.plain()
                waiting.append({"id": known, "type": "function", "function": function})
                called += 1
            plain["tool_calls"] = list(waiting)
        if message.role == "tool":
            plain |= _answered(message, waiting)
        chat.append(plain)
    return chat


def pictured(text: str | None, files: list[bytes]) -> str | list[dict[str, Any]]:
    """Images, and then text, as a message's content in chat templates."""
    return content_of([*(None for _ in files), *([text] if text else [])]) if files else text or ""


def _answered(message: Message, waiting: list[dict[str, Any]]) -> dict[str, str]:
    """Which call a message answers, which then no longer waits."""
    name, known = message.tool_name or message.name, message.tool_call_id
    fits = (
        call
        for call in waiting
        if (call["id"] == known if known else name in (None, call["function"]["name"]))
    )
    call = next(fits, None)
    if call is not None:
        waiting.remove(call)
        name, known = call["function"]["name"], call["id"]
    told = {"name": name, "tool_name": name, "tool_call_id": known}
    return {key: value for key, value in told.items() if value is not None}


def _files_of(images: list[str] | None) -> list[bytes]:
    return [file_of_base64(image, "", "images") for image in images or ()]

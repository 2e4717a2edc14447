"""What clients may ask for, in OpenAI's words and some of vLLM's.

Checked strictly: no text where a number is meant, and no parameters that are not known, so that a
typing error is not silently without effect.  Parameters of OpenAI's that change nothing here are
taken and left alone (`Ignored`); those that would change the answer and cannot be served are
refused.
"""

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from hmt.base.errors import ConfigError
from hmt.base.units import parse_bytes
from hmt.contracts.request import Grammar, GrammarKind, Sampling
from hmt.server.json_shape import fail_fast

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_BIASES = 1024
MAX_PROMPTS = 64
MAX_INPUTS = 2048  # as OpenAI
MAX_GRAMMAR = 65536  # characters
MAX_CHOICES = 1024
MAX_TOOLS = 128
MIN_TIMEOUT_S = 0.01  # less is over before a request is read

_TOKEN = re.compile("[0-9]{1,18}")  # int() refuses more than 4300 digits

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]
Prompt = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class Strict(BaseModel):
    """Nothing is converted, and nothing is left unread."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """See fail_fast."""
        schema = handler(source)
        fail_fast(schema)
        return schema


class Ignored(Strict):
    """What OpenAI's clients may send and what makes no difference here."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class StreamOptions(Strict):
    """include_usage: a last event with what the answers took."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Schema(Strict):
    """The schema of a json_schema format.  It is always held to, whatever `strict` says."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class Format(Strict):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("json_schema", "it belongs to the type json_schema")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The same for the engine."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


class Structured(Strict):
    """vLLM's structured_outputs, one of: a schema, a regular expression, texts, a grammar."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)] | None = None
    choice: Annotated[list[Prompt], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = (self.json_, self.regex, self.choice, self.grammar)
        if sum(one is not None for one in given) != 1:
            raise wrong("", "give one of json, regex, choice and grammar")
        return self

    @property
    def form(self) -> Grammar:
        """The same for the engine."""
        if self.json_ is not None:
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(self.json_))
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.choice is not None:
            return Grammar(GrammarKind.CHOICE, json.dumps(self.choice))
        return Grammar(GrammarKind.GRAMMAR, self.grammar or "")


class Choosing(Ignored):
    """How tokens are chosen and answers end; the same for chats and completions.

    top_k, min_p, repetition_penalty, ignore_eos and structured_outputs are vLLM's; timeout is
    HMT's, in seconds.  service_tier "flex" lets all others go first.
    """

    model: str
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = (
        None  # tokens come as text, as everywhere in JSON
    )
    ignore_eos: bool | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    timeout: Annotated[float, Field(ge=MIN_TIMEOUT_S)] | None = None
    response_format: Format | None = None
    structured_outputs: Structured | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.structured_outputs and self.response_format and self.response_format.grammar:
            raise wrong("structured_outputs", "response_format says what the answer must be")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "only a stream has them: set stream to true")
        biases = self.logit_bias or {}
        if len(biases) > MAX_BIASES:
            raise wrong("logit_bias", f"it has {len(biases)} tokens; at most {MAX_BIASES} can be")
        if not all(_TOKEN.fullmatch(token) for token in biases):
            raise wrong("logit_bias", 'its names must be token ids, such as {"50256": -100}')
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def grammar(self) -> Grammar | None:
        """The form that answers must have."""
        if self.structured_outputs is not None:
            return self.structured_outputs.form
        return None if self.response_format is None else self.response_format.grammar

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, logprobs: int | None) -> Sampling:
        """The same for the engine.  As with OpenAI, temperature is 1 where nothing is said."""
        return Sampling(
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(0, _or(self.top_k, 0)),
            min_p=_or(self.min_p, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            seed=self.seed,
            logprobs=logprobs,
            logit_bias=tuple((int(t), bias) for t, bias in (self.logit_bias or {}).items()),
        )


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """What an assistant has called."""

    name: Prompt
    arguments: str

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: arguments as an object."""
        try:
            arguments = json.loads(self.arguments)
        except ValueError:
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}


class Called(Strict):
    """One call of a tool, in an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Called], Field(min_length=1)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.tool_calls is not None and self.role != "assistant":
            raise wrong("tool_calls", "only an assistant has tool_calls")
        if self.reasoning_content is not None and self.role != "assistant":
            raise wrong("reasoning_content", "only an assistant has reasoning_content")
        if self.content is None and self.tool_calls is None:
            raise wrong("content", "a message needs content, or tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:  # by the names in templates of Qwen and of gpt-oss
            message["reasoning_content"] = message["thinking"] = self.reasoning_content
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls is not None:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.plain()}
                for call in self.tool_calls
            ]
        return message


class Function(Strict):
    """What may be called.  Forced calls are held to `parameters`, whatever `strict` says."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """Which one."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(Choosing):
    """POST /v1/chat/completions.  thinking_token_budget is vLLM's."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "set logprobs to true to have them")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise wrong("max_tokens", "max_completion_tokens says otherwise; give one of them")
        return self

    @model_validator(mode="after")
    def _callable(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise wrong("tools", "two of them have one name")
        if not names and self.tool_choice not in (None, "none"):
            raise wrong("tool_choice", "there are no tools to choose from")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise wrong("tool_choice", "it names a tool that is not among them")
        if self.must_call and self.grammar is not None:
            raise wrong("tool_choice", "the answer cannot be a call and have another form")
        return self

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that may be called, as templates take them."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def forced(self) -> list[dict[str, Any]]:
        """Those of which one must be called."""
        if not self.must_call:
            return []
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.callable if tool["function"]["name"] == name]
        return self.callable

    @property
    def longest(self) -> int | None:
        """Tokens that an answer may have."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(Choosing):
    """POST /v1/completions.  `prompt` is text or token ids, or a list of these."""

    prompt: (
        Prompt
        | TokenIds
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.best_of is not None and self.best_of < self.choices:
            raise wrong("best_of", "it must be at least n")
        if self.best_of is not None and self.best_of > self.choices and self.stream:
            raise wrong("best_of", "it cannot be streamed: which are best is known at the end")
        if self.max_tokens == 0 and not self.echo:
            raise wrong(
                "max_tokens", "0 leaves nothing to be told but the prompt: set echo to true"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """All of them."""
        prompt: Any = self.prompt
        alone = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if alone else list(prompt)


class EmbeddingsBody(Ignored):
    """POST /v1/embeddings.  pooling and timeout are HMT's."""

    model: str
    input: (
        Prompt
        | TokenIds
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "last"] | None = None
    timeout: Annotated[float, Field(ge=MIN_TIMEOUT_S)] | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        """All of them."""
        given: Any = self.input
        alone = isinstance(given, str) or isinstance(given[0], int)
        return [given] if alone else list(given)


class TokenizeBody(Strict):
    """POST /tokenize, as vLLM: a text, or a chat up to where the answer begins."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "give either a prompt or messages")
        return self


class LoadBody(Strict):
    """POST /v1/models/load.  `host_memory`, such as "4GiB", is the most that it may take."""

    model: str
    host_memory: str | None = None

    @field_validator("host_memory")
    @classmethod
    def _size(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_bytes(value)
            except ConfigError as error:
                raise wrong("", str(error)) from error
        return value

    @property
    def memory_bytes(self) -> int | None:
        """The same as a number."""
        return None if self.host_memory is None else parse_bytes(self.host_memory)


class UnloadBody(Strict):
    """POST /v1/models/unload.  `timeout`: seconds that its answers have to end."""

    model: str
    timeout: Annotated[float, Field(ge=0)] | None = None


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def wrong(param: str, why: str) -> PydanticCustomError:
    """What a check of several parameters raises; `param` is the one that should change.

    Below what holds them: empty for all of it.
    """
    return PydanticCustomError("disagreement", "{why}", {"param": param, "why": why})


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value

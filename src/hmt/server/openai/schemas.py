"""What clients may ask for, in OpenAI's words and some of vLLM's and llama.cpp's.

Values are checked strictly: no text where a number is meant.  What becomes of fields that no schema
has: `hmt.server.fields`.
"""

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from hmt.base.errors import ConfigError
from hmt.base.units import parse_bytes
from hmt.contracts.request import Grammar, GrammarKind, Sampling
from hmt.server.fields import Fields, Refusal, unsupported, wrong
from hmt.server.openai.messages import Message, Templated
from hmt.server.openai.tools import MAX_TOOLS, AllowedTools, NamedTool, Tool, plain_tools
from hmt.server.openai.unused import (
    CHAT_IGNORED,
    CHAT_REFUSED,
    EMBED_IGNORED,
    EMBED_REFUSED,
    IGNORED,
    TEXT_REFUSED,
)

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_BIASES = 1024
MAX_PROMPTS = 64
MAX_INPUTS = 2048  # as OpenAI
MAX_GRAMMAR = 65536  # characters
MAX_CHOICES = 1024
MAX_STOP_IDS = 1024
MAX_SALT = 256  # characters
MIN_TIMEOUT_S = 0.01  # less is over before a request is read

_TOKEN = re.compile("[0-9]{1,18}")  # int() refuses more than 4300 digits

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]
Prompt = Annotated[str, Field(min_length=1)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


def _some(tokens: int) -> int:
    if tokens == 0:
        raise wrong("", "an answer has at least 1 token; -1 is as many as the context holds")
    return tokens


Longest = Annotated[int, Field(ge=-1), AfterValidator(_some)]


class StreamOptions(Fields):
    """include_usage: a last event with what the answers took.

    continuous_usage_stats is vLLM's: then every event has what they have taken until now.
    """

    IGNORED = {"include_obfuscation": "chunks have no padding"}  # noqa: RUF012
    REFUSED = {"usage": Refusal("write include_usage")}  # noqa: RUF012

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Schema(Fields):
    """The schema of a json_schema format.  It is always held to, whatever `strict` says."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class Format(Fields):
    """OpenAI's response_format."""

    REFUSED = {"schema": Refusal("write it in json_schema, with the type json_schema")}  # noqa: RUF012

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


class StructuredOutputs(Fields):
    """vLLM's structured_outputs, one of: a schema, a regular expression, texts, a grammar."""

    IGNORED = {  # noqa: RUF012
        "disable_fallback": "there is one implementation",
        "disable_any_whitespace": "white space is bounded",
    }
    REFUSED = {  # noqa: RUF012
        "json_object": Refusal('write response_format: {"type": "json_object"}'),
        "structural_tag": Refusal("write tools, or a grammar"),
        "whitespace_pattern": Refusal("write a grammar"),
        "disable_additional_properties": Refusal("write it in the schema"),
    }

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


class SamplingFields(Fields):
    """How tokens are chosen and answers end; the same for chats and completions.

    top_k, min_p, repetition_penalty, ignore_eos, min_tokens, stop_token_ids, structured_outputs and
    cache_salt are vLLM's, repeat_penalty and repeat_last_n llama.cpp's; timeout is HMT's, in
    seconds.  service_tier "flex" lets all others go first.
    """

    IGNORED = IGNORED

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
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = (
        None  # tokens come as text, as everywhere in JSON
    )
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    cache_salt: CacheSalt | None = None
    timeout: Annotated[float, Field(ge=MIN_TIMEOUT_S)] | None = None
    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.structured_outputs and self.response_format and self.response_format.grammar:
            raise wrong("structured_outputs", "response_format says what the answer must be")
        if (self.wants_usage or self.counts_always) and not self.stream:
            raise wrong("stream_options", "only a stream has them: set stream to true")
        penalties = (self.repetition_penalty, self.repeat_penalty)
        if None not in penalties and penalties[0] != penalties[1]:
            raise wrong("repeat_penalty", "repetition_penalty says otherwise; give one of them")
        if self.penalty != 1 and self.repeat_last_n not in (None, -1):
            raise unsupported(
                "repeat_last_n", "the penalty is for all of prompt and answer: leave it out, or -1"
            )
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

    @property
    def counts_always(self) -> bool:
        """Whether every event of a stream has what it has taken until now."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def penalty(self) -> float:
        """That of tokens which have occurred; 1: none."""
        return _or(self.repetition_penalty, _or(self.repeat_penalty, 1.0))

    def sampling(self, logprobs: int | None) -> Sampling:
        """The same for the engine.  As with OpenAI, temperature is 1 where nothing is said."""
        return Sampling(
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(0, _or(self.top_k, 0)),
            min_p=_or(self.min_p, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            repetition_penalty=self.penalty,
            seed=self.seed,
            logprobs=logprobs,
            logit_bias=tuple((int(t), bias) for t, bias in (self.logit_bias or {}).items()),
        )


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(SamplingFields, Templated):
    """POST /v1/chat/completions.  thinking_token_budget is vLLM's."""

    IGNORED = CHAT_IGNORED
    REFUSED = CHAT_REFUSED

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Longest | None = None
    max_completion_tokens: Longest | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.top_logprobs and not self.logprobs:
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
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise wrong("tool_choice", "there are no tools to choose from")
        if not self._chosen_names <= set(names):
            raise wrong("tool_choice", "it names a tool that is not among them")
        if self.must_call and self.grammar is not None:
            raise wrong("tool_choice", "the answer cannot be a call and have another form")
        return self

    @property
    def _chosen_names(self) -> set[str]:
        """Of the tools that tool_choice names; empty where it names none."""
        if isinstance(self.tool_choice, NamedTool):
            return {self.tool_choice.function.name}
        if isinstance(self.tool_choice, AllowedTools):
            return {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return set()

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that are offered, as templates take them; of allowed_tools only those."""
        if self.tool_choice == "none":
            return []
        tools = plain_tools(self.tools or ())
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in tools if tool["function"]["name"] in self._chosen_names]
        return tools

    @property
    def forced(self) -> list[dict[str, Any]]:
        """Those of which one must be called."""
        if not self.must_call:
            return []
        names = self._chosen_names
        return [tool for tool in self.callable if not names or tool["function"]["name"] in names]

    @property
    def longest(self) -> int | None:
        """Tokens that an answer may have."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(SamplingFields):
    """POST /v1/completions.  `prompt` is text or token ids, or a list of these.

    With a `suffix` the answer is what stands between prompt and suffix.
    """

    REFUSED = TEXT_REFUSED

    prompt: (
        Prompt
        | TokenIds
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None

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
        if self.suffix:
            if self.echo:
                raise wrong("echo", "what stands between prompt and suffix comes alone")
            if not all(isinstance(prompt, str) for prompt in self.prompts):
                raise wrong("suffix", "the prompt must be text, and not token ids")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """All of them."""
        prompt: Any = self.prompt
        alone = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if alone else list(prompt)


class EmbeddingsBody(Fields):
    """POST /v1/embeddings.  pooling and timeout are HMT's."""

    IGNORED = EMBED_IGNORED
    REFUSED = EMBED_REFUSED

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


class TokenizeBody(Templated):
    """POST /tokenize, as vLLM: a text, or a chat up to where the answer begins.

    add_special_tokens   of a text: with the start tokens that the checkpoint puts before it
    """

    REFUSED = {"chat_template": CHAT_REFUSED["chat_template"]}  # noqa: RUF012
    IGNORED = {"mm_processor_kwargs": IGNORED["mm_processor_kwargs"]}  # noqa: RUF012

    model: str | None = None
    prompt: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "give either a prompt or messages")
        return self


class Order(BaseModel):
    """What only HMT has: clients of other APIs do not send it, so unknown fields are mistakes."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class LoadBody(Order):
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


class UnloadBody(Order):
    """POST /v1/models/unload.  `timeout`: seconds that its answers have to end."""

    model: str
    timeout: Annotated[float, Field(ge=0)] | None = None


class DetokenizeBody(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value

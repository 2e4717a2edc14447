"""What clients may ask for, in OpenAI's words and some of vLLM's and llama.cpp's.

Values are checked strictly: no text where a number is meant.  What becomes of fields that no schema
has: `hmt.server.fields`.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from typing_extensions import override

from hmt.base.errors import ConfigError
from hmt.base.units import parse_bytes
from hmt.contracts.request import Grammar, GrammarKind
from hmt.server.fields import Fields, Refusal, wrong
from hmt.server.openai.messages import Message, Templated
from hmt.server.openai.sampling import MIN_TIMEOUT_S, Effort, Longest, Prompt, Sampler, TokenId
from hmt.server.openai.tools import MAX_TOOLS, AllowedTools, NamedTool, Tool, plain_tools
from hmt.server.openai.unused import (
    CHAT_IGNORED,
    CHAT_REFUSED,
    EMBED_IGNORED,
    EMBED_REFUSED,
    IGNORED,
    TEXT_REFUSED,
)

MAX_PROMPTS = 64
MAX_INPUTS = 2048  # as OpenAI

TokenIds = Annotated[list[TokenId], Field(min_length=1)]


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


class SamplingFields(Sampler):
    """What chats and completions have besides: several answers, and the form in OpenAI's words."""

    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    response_format: Format | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.structured_outputs and self.response_format and self.response_format.grammar:
            raise wrong("structured_outputs", "response_format says what the answer must be")
        if (self.wants_usage or self.counts_always) and not self.stream:
            raise wrong("stream_options", "only a stream has them: set stream to true")
        return self

    @property
    @override
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    @override
    def grammar(self) -> Grammar | None:
        stated = None if self.response_format is None else self.response_format.grammar
        return super().grammar if self.structured_outputs is not None else stated

    @property
    @override
    def formed(self) -> str:
        return "response_format" if self.structured_outputs is None else super().formed

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what it took."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_always(self) -> bool:
        """Whether every event of a stream has what it has taken until now."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


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


class RankingBody(Fields):
    """What compares texts by their embeddings.  pooling and timeout are HMT's."""

    IGNORED = EMBED_IGNORED
    REFUSED = {  # noqa: RUF012
        name: EMBED_REFUSED[name]
        for name in ("truncate", "truncate_prompt_tokens", "truncation", "extra_body")
    }

    model: str
    pooling: Literal["mean", "last"] | None = None
    timeout: Annotated[float, Field(ge=MIN_TIMEOUT_S)] | None = None


class RankedDocument(Fields):
    """A document, in Jina's and Cohere's other form."""

    text: Prompt


class RerankBody(RankingBody):
    """POST /v1/rerank: the `top_n` of `documents` that are nearest to `query`, or all."""

    REFUSED = {  # noqa: RUF012
        **RankingBody.REFUSED,
        **dict.fromkeys(
            ("rank_fields", "max_chunks_per_doc", "max_tokens_per_doc"),
            Refusal("documents are compared whole: send texts, or objects with text"),
        ),
    }

    query: Prompt
    documents: Annotated[list[Prompt | RankedDocument], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        """Of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreBody(RankingBody):
    """POST /v1/score: `text_1` beside each of `text_2`, or each beside the other of its place."""

    text_1: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_INPUTS)]
    text_2: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_INPUTS)]

    @model_validator(mode="after")
    def _paired(self) -> Self:
        first, second = self.pairs
        if len(first) not in (1, len(second)):
            raise wrong(
                "text_1",
                f"{len(first)} texts cannot be paired with {len(second)}: give one, or as many",
            )
        return self

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """Both sides."""
        first, second = (
            [one] if isinstance(one, str) else one for one in (self.text_1, self.text_2)
        )
        return first, second


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


class LoadAdapterBody(Order):
    """POST /v1/load_lora_adapter, as vLLM's.  `lora_path` is within the server's folder.

    model   whose adapter it is; the first one of the server when left out
    """

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterBody(Order):
    """POST /v1/unload_lora_adapter, as vLLM's."""

    lora_name: str
    model: str | None = None


class DetokenizeBody(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]

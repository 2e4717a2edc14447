"""How tokens are chosen and answers end: what chats, completions and responses have in common."""

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from hmt.contracts.request import Grammar, GrammarKind, Sampling
from hmt.server.fields import Fields, Refusal, unsupported, wrong
from hmt.server.openai.unused import IGNORED

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_BIASES = 1024
MAX_GRAMMAR = 65536  # characters
MAX_CHOICES = 1024
MAX_STOP_IDS = 1024
MAX_SALT = 256  # characters
MIN_TIMEOUT_S = 0.01  # less is over before a request is read
_LEAST_TOP_P = 1e-6  # for 0, which clients send for the likeliest token alone

_TOKEN = re.compile("[0-9]{1,18}")  # int() refuses more than 4300 digits

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0)]
Prompt = Annotated[str, Field(min_length=1)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _some(tokens: int) -> int:
    if tokens == 0:
        raise wrong("", "an answer has at least 1 token; -1 is as many as the context holds")
    return tokens


Longest = Annotated[int, Field(ge=-1), AfterValidator(_some)]
TopP = Annotated[float, Field(ge=0, le=1)]


def nucleus(top_p: float | None, otherwise: float = 1.0) -> float:
    """The same for the engine, to which 0 is no share; `otherwise` where nothing is said."""
    return otherwise if top_p is None else max(top_p, _LEAST_TOP_P)


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


class Sampler(Fields):
    """How tokens are chosen and answers end.

    top_k, min_p, repetition_penalty, ignore_eos, min_tokens, stop_token_ids, structured_outputs and
    cache_salt are vLLM's, repeat_penalty and repeat_last_n llama.cpp's; timeout is HMT's, in
    seconds.  service_tier "flex" lets all others go first.
    """

    IGNORED = IGNORED

    model: str
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
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
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
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
        return 1

    @property
    def grammar(self) -> Grammar | None:
        """The form that answers must have."""
        return None if self.structured_outputs is None else self.structured_outputs.form

    @property
    def formed(self) -> str:
        """The parameter that says so."""
        return "structured_outputs"

    @property
    def penalty(self) -> float:
        """That of tokens which have occurred; 1: none."""
        return _or(self.repetition_penalty, _or(self.repeat_penalty, 1.0))

    def sampling(self, logprobs: int | None) -> Sampling:
        """The same for the engine.  As with OpenAI, temperature is 1 where nothing is said."""
        return Sampling(
            temperature=_or(self.temperature, 1.0),
            top_p=nucleus(self.top_p),
            top_k=max(0, _or(self.top_k, 0)),
            min_p=_or(self.min_p, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            repetition_penalty=self.penalty,
            seed=self.seed,
            logprobs=logprobs,
            logit_bias=tuple((int(t), bias) for t, bias in (self.logit_bias or {}).items()),
        )


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value

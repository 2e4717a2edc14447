"""Requests, what they produce, and how tokens are chosen."""

import enum
from dataclasses import dataclass, field
from typing import Any

import torch

from hmt.contracts.image import ImageInput, VideoInput


class FinishReason(enum.StrEnum):
    """Why a completion ended (OpenAI's words, and two of our own)."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_new_tokens, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.  temperature 0 is greedy; 0 or 1 switches the others off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None  # report the chosen token and this many of the likeliest
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)


class GrammarKind(enum.StrEnum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of texts, one of which the answer is
    GRAMMAR = "grammar"  # Lark's, or llama.cpp's GBNF


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must have."""

    kind: GrammarKind
    source: str


class Pooling(enum.StrEnum):
    """Of which hidden states an embedding is made."""

    MEAN = "mean"  # of all tokens
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Request:
    """One thing to complete.

    input            text; or chat messages [{"role": ..., "content": ...}], which go through the
                     checkpoint's template; or token ids, used as they are
    max_new_tokens   the longest answer; None: 256, or what the context still holds
    context_size     the most positions that prompt and answer may take together; the model's own
                     limit when None
    stop             string, or strings, that end the answer and are not part of it
    stop_token_ids   tokens that do the same, beside the model's own end tokens
    ignore_eos       whether the model's own end tokens do not end the answer
    min_tokens       tokens before which neither end tokens are chosen nor stop strings looked for;
                     a grammar that allows nothing more still ends the answer
    owner            whose it is: requests of different owners get equal shares of the engine and
                     of the prefix cache, in which they do not share prompts unless the engine's
                     prefix_shared says so.  A server makes it of the API key
    cache_salt       requests share prompts in the prefix cache only with those of the same salt;
                     for a program whose own users must not see each other's
    priority         higher ones are admitted first
    grammar          the form that the answer must have; it ends where nothing may follow
    timeout_s        the time from now until it fails if it has not ended; None: no limit
    prompt_logprobs  report the log-probability of every prompt token but the first, and this many
                     of the likeliest in its place; max_new_tokens may then be 0.  None: do not
    reasoning_tokens the longest that a model may think before it answers; with a grammar it does
                     not.  None: as long as it likes
    embedding        report the prompt's embedding; max_new_tokens must then be 0
    adapter          name of the low-rank adapter (LoRA) that all is computed with; "": the model's
                     default, if it has one
    images           of a model that sees: what the prompt's image parts show, in their order; in
                     text and token ids the model's own image token, once for each
    videos           likewise, for a model that takes them
    """

    input: "str | list[dict[str, Any]] | list[int]"
    max_new_tokens: int | None = None
    context_size: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    owner: str = ""
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    reasoning_tokens: int | None = None
    embedding: Pooling | None = None
    images: tuple[ImageInput, ...] = ()
    videos: tuple[VideoInput, ...] = ()
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log-probability of one chosen token, and of the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token.  `text` is what became printable with it; it may be empty.

    stop   the stop string that ended the answer, if one did
    ends   whether the token itself ended the answer, and is no part of it
    """

    token_id: int
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    stop: str | None = None
    ends: bool = False


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """What was asked of a prompt, once it is computed and before the first token.

    logprobs        of its tokens from the second on
    finish_reason   LENGTH where no tokens are to follow
    embedding       f32 [hidden_size], of length 1
    """

    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None = None
    embedding: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    prompt_logprobs   of the prompt's tokens from the second on, where they were asked for
    score             of a beam search: the sum of the answer's log-probabilities over its length to
                      the power of the length penalty
    embedding         f32 [hidden_size], of length 1, where it was asked for
    raised_at         position from which on tokens were computed in higher precision; None: none
                      were
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    score: float | None = None
    embedding: torch.Tensor | None = None
    raised_at: int | None = None

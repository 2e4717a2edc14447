"""Answers in OpenAI's words: what chats and completions have in common."""

import asyncio
import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from hmt.contracts.request import TokenEvent, TokenLogprob
from hmt.server.generation import Generation
from hmt.text import Tokenizer


@dataclass(slots=True)
class Heading:
    """What all parts of one response begin with."""

    kind: str
    model: str
    prefix: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def of(self, choices: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        """A response, or a chunk of one."""
        heading = {
            "id": self.id, "object": self.kind, "created": self.created, "model": self.model,
        }  # fmt: skip
        return heading | {"choices": choices} | others


@dataclass(slots=True)
class GatheredAnswers:
    """One answer, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    def add(self, event: TokenEvent) -> None:
        """The next token."""
        self.texts.append(event.text)
        self.events.append(event)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str | None:
        """In OpenAI's words; None while it goes on."""
        reason = self.events[-1].finish_reason if self.events else None
        return None if reason is None else reason.value

    @property
    def mean_logprob(self) -> float:
        """By which the best answers are found."""
        known = [event.logprob.logprob for event in self.events if event.logprob is not None]
        return sum(known) / max(1, len(known))


async def gather(generation: Generation) -> list[GatheredAnswers]:
    """All answers, once they have ended."""
    answers = [GatheredAnswers() for _ in generation.choices]
    async for number, event in generation.events():
        answers[number].add(event)
    return answers


async def rendered(
    heading: Heading, choices: Iterable[dict[str, Any]], counted: dict[str, Any]
) -> Response:
    """A whole response, written by a thread, a choice at a time.

    On the event loop it would keep all clients waiting: log-probabilities of 20 tokens in the
    place of each make it 2 kB per token.
    """

    def write() -> bytes:
        texts = [json.dumps(choice, ensure_ascii=False).encode() for choice in choices]
        before, _, after = json.dumps(heading.of([], usage=counted)).partition('"choices": []')
        return before.encode() + b'"choices": [' + b",".join(texts) + b"]" + after.encode()

    return Response(await asyncio.to_thread(write), media_type="application/json")


def usage(generation: Generation) -> dict[str, Any]:
    """What the answers took."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    details = {"cached_tokens": generation.held_tokens}
    if generation.diverged_at is not None:
        details["diverged_at"] = generation.diverged_at
    counted: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    return counted | ({"precision": "raised"} if generation.is_raised else {})


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; parts of characters as OpenAI writes them, as bytes and their numbers."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def answer_text(events: list[TokenEvent]) -> list[TokenLogprob]:
    """The log-probabilities of tokens that are part of the answer: not of one that ended it."""
    return [event.logprob for event in events if event.logprob is not None and not event.ends]


def logprobs_of(events: list[TokenEvent], tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Log-probabilities of a chat's answer; None where they were not asked for."""
    if not events or events[0].logprob is None:
        return None
    told = [told_logprob(one, tokenizer) for one in answer_text(events)]
    return {"content": told, "refusal": None}


def told_logprob(found: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of one token, and of the likeliest in its place."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": list(raw)}

    top = [named(token_id, logprob) for token_id, logprob in found.top]
    return named(found.token_id, found.logprob) | {"top_logprobs": top}

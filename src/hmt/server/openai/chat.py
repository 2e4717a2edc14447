"""POST /v1/chat/completions."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from hmt.contracts.request import TokenEvent, TokenLogprob
from hmt.server.generation import Generation
from hmt.server.openai.answers import Gathered, Heading, gather, said, spoken, usage
from hmt.server.openai.asking import asked
from hmt.server.openai.schemas import ChatBody
from hmt.server.service import service_of
from hmt.server.stream import EventStream, unless_gone
from hmt.text import Tokenizer

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a chat."""
    service = service_of(request)
    service.check_name(body.model)
    tokenizer = service.model.tokenizer
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wanted = asked(request, body, longest=body.longest, logprobs=logprobs, answers=body.choices)
    messages = [message.plain() for message in body.messages]
    generation = await service.begin(
        wanted, lambda: [tokenizer.chat_prompt(messages)], 1, "messages"
    )
    if body.stream:
        heading = Heading("chat.completion.chunk", service.name, "chatcmpl")
        chunks = _chunks(generation, heading, tokenizer, body.wants_usage)
        return EventStream(generation, chunks)
    async with generation:
        answers = await unless_gone(request.receive, gather(generation))
        heading = Heading("chat.completion", service.name, "chatcmpl")
        choices = [_choice(n, answer, tokenizer) for n, answer in enumerate(answers)]
        return JSONResponse(heading.of(choices, usage=usage(generation)))


async def _chunks(
    generation: Generation, heading: Heading, tokenizer: Tokenizer, with_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """A stream: who speaks, then what is said, then how it ended."""
    none = {"usage": None} if with_usage else {}
    for number in range(len(generation.courses)):
        delta = {"role": "assistant", "content": ""}
        yield heading.of([_part(number, delta)], **none)
    async for number, event in generation.events():
        logprobs = _logprobs([event], tokenizer)
        if event.text or (logprobs and logprobs["content"]):
            yield heading.of([_part(number, {"content": event.text}, logprobs)], **none)
        if event.finish_reason is not None:
            yield heading.of([_part(number, {}, None, event.finish_reason.value)], **none)
    if with_usage:
        yield heading.of([], usage=usage(generation))


def _part(
    number: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {
        "index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason,
    }  # fmt: skip


def _choice(number: int, answer: Gathered, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "index": number,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": _logprobs(answer.events, tokenizer),
        "finish_reason": answer.finish_reason,
    }


def _logprobs(events: list[TokenEvent], tokenizer: Tokenizer) -> dict[str, Any] | None:
    if not events or events[0].logprob is None:
        return None
    return {"content": [_token(one, tokenizer) for one in said(events, tokenizer)], "refusal": None}


def _token(found: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    def named(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": spoken(tokenizer, token_id), "logprob": logprob, "bytes": list(raw)}

    top = [named(token_id, logprob) for token_id, logprob in found.top]
    return named(found.token_id, found.logprob) | {"top_logprobs": top}

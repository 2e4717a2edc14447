"""POST /v1/completions: text goes on as it is, without a chat template."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from hmt.contracts.request import TokenEvent
from hmt.server.generation import Generation
from hmt.server.openai.answers import Gathered, Heading, gather, said, spoken, usage
from hmt.server.openai.asking import asked
from hmt.server.openai.schemas import CompletionBody
from hmt.server.service import service_of
from hmt.server.stream import EventStream, unless_gone
from hmt.text import Tokenizer

router = APIRouter()

_DEFAULT_NEW_TOKENS = 16  # as OpenAI


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue texts."""
    service = service_of(request)
    service.check_name(body.model)
    tokenizer, given = service.model.tokenizer, body.prompts
    tried = body.best_of or body.choices
    # Which are best is told by their log-probabilities, wanted or not.
    logprobs = 0 if body.logprobs is None and tried > body.choices else body.logprobs
    longest = body.max_tokens or _DEFAULT_NEW_TOKENS
    wanted = asked(request, body, longest=longest, logprobs=logprobs, answers=tried)

    def prompts() -> list[list[int]]:
        return [tokenizer.encode(one) if isinstance(one, str) else one for one in given]

    generation = await service.begin(wanted, prompts, len(given), "prompt")
    heading = Heading("text_completion", service.name, "cmpl")
    echoed = [_echo(one, tokenizer) if body.echo else "" for one in given]
    if body.stream:
        chunks = _chunks(generation, heading, tokenizer, echoed, body.wants_usage)
        return EventStream(generation, chunks)
    async with generation:
        answers = await unless_gone(request.receive, gather(generation))
        choices: list[dict[str, Any]] = []
        for number, echo in enumerate(echoed):
            mine = answers[number * tried : (number + 1) * tried]
            if tried > body.choices:
                mine = sorted(mine, key=lambda one: one.mean_logprob, reverse=True)[: body.choices]
            for answer in mine:
                shown = _logprobs(answer.events, tokenizer) if body.logprobs is not None else None
                choices.append(_choice(len(choices), echo, answer, shown))
        return JSONResponse(heading.of(choices, usage=usage(generation)))


async def _chunks(
    generation: Generation,
    heading: Heading,
    tokenizer: Tokenizer,
    echoed: list[str],
    with_usage: bool,
) -> AsyncIterator[dict[str, Any]]:
    none = {"usage": None} if with_usage else {}
    each = len(generation.courses) // len(echoed)
    offsets = [0] * len(generation.courses)
    for number in range(len(generation.courses)):
        if echo := echoed[number // each]:
            yield heading.of([_part(number, echo)], **none)
    async for number, event in generation.events():
        logprobs = _logprobs([event], tokenizer, offsets[number])
        offsets[number] += len(event.text)
        if event.text or event.finish_reason is not None or logprobs:
            reason = event.finish_reason
            part = _part(number, event.text, logprobs, None if reason is None else reason.value)
            yield heading.of([part], **none)
    if with_usage:
        yield heading.of([], usage=usage(generation))


def _part(
    number: int,
    text: str,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _choice(
    number: int, echo: str, answer: Gathered, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return _part(number, echo + answer.text, logprobs, answer.finish_reason)


def _echo(prompt: str | list[int], tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt)


def _logprobs(
    events: list[TokenEvent], tokenizer: Tokenizer, offset: int = 0
) -> dict[str, Any] | None:
    """Lists by token; text_offset counts characters of the answer."""
    if not events or events[0].logprob is None:
        return None
    tokens = said(events, tokenizer)
    offsets = []
    for event in events[: len(tokens)]:
        offsets.append(offset)
        offset += len(event.text)
    return {
        "tokens": [spoken(tokenizer, one.token_id) for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [
            {spoken(tokenizer, token): value for token, value in reversed(one.top)}
            for one in tokens
        ],
        "text_offset": offsets,
    }

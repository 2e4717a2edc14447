"""POST /api/chat and /api/generate."""

import asyncio
import json
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from hmt.base.errors import HMTError
from hmt.base.log import warn_once
from hmt.server.errors import as_api_error
from hmt.server.generation import Generation
from hmt.server.ollama.answer import AnswerWriter
from hmt.server.ollama.models import served
from hmt.server.ollama.schemas import Asked, ChatBody, GenerateBody, plain_chat
from hmt.server.openai.chat_turn import ChatTurn, begin_chat
from hmt.server.openai.tools import plain_tools
from hmt.server.service import ApiRequest, Service
from hmt.server.stream import EventStream, StreamDialect, unless_gone
from hmt.server.thinking import Thinking, thinking

router = APIRouter()


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")) + "\n"


OLLAMA: Final = StreamDialect(
    event=_line,
    error=lambda error: _line(error.ollama_body),
    keep_alive=" ",  # before the next object; clients do not read empty lines
    media_type="application/x-ndjson",
)


@router.post("/api/chat")
async def chat(body: ChatBody, request: Request) -> Response:
    """Answer a chat."""
    service = served(request, body.model)
    writer = AnswerWriter(body.model, True, service.model.tokenizer)
    if not body.messages:
        return _json(writer.loaded())
    turn = ChatTurn(
        messages=plain_chat(body.messages),
        tools=plain_tools(body.tools or ()),
        images=body.files,
        thought=_thinking(service, body, tools=bool(body.tools)),
        goes_on=body.goes_on,
    )
    wanted = _wanted(request, service, body)
    generation, reading = await begin_chat(service, wanted, turn, request.receive)
    writer.reader = reading.reader()
    return await _answer(request, body, generation, writer)


@router.post("/api/generate")
async def generate(body: GenerateBody, request: Request) -> Response:
    """Answer a prompt: as a chat of one message, or where that is said as the text it is."""
    service = served(request, body.model)
    tokenizer = service.model.tokenizer
    writer = AnswerWriter(body.model, False, tokenizer)
    if not body.prompt:
        return _json(writer.loaded())
    wanted = _wanted(request, service, body)
    if body.raw or body.suffix:
        generation = await _begin_text(service, wanted, body.prompt, body.suffix)
        return await _answer(request, body, generation, writer)
    turn = ChatTurn(
        messages=body.chat, param="prompt", images=body.files, thought=_thinking(service, body)
    )
    generation, reading = await begin_chat(service, wanted, turn, request.receive)
    writer.reader = reading.reader()
    return await _answer(request, body, generation, writer)


async def _begin_text(
    service: Service, wanted: ApiRequest, prompt: str, suffix: str | None
) -> Generation:
    """Go on with a text, or write what stands between two.  Raises ApiError."""
    tokenizer, most = service.model.tokenizer, service.max_positions
    if not suffix:
        return await service.begin(
            wanted, lambda: [tokenizer.encode(prompt, most=most)], 1, "prompt"
        )
    try:
        ends = tuple(tokenizer.infill.ends)
    except HMTError as error:
        raise as_api_error(error, "suffix") from error
    wanted = replace(wanted, stop_token_ids=ends)
    return await service.begin(
        wanted, lambda: [tokenizer.infill_prompt(prompt, suffix, most=most)], 1, "prompt"
    )


def _wanted(request: Request, service: Service, body: Asked) -> ApiRequest:
    """What `body` wants of the engine."""
    options, most = body.settings, service.max_positions
    if (options.num_ctx or 0) > most:
        warn_once(
            "num_ctx",
            f"a client asks for a context of {options.num_ctx} tokens; {service.name!r} has {most} "
            "(--context), and longer prompts are refused",
        )
    return ApiRequest(
        owner=request.state.owner,
        sampling=options.sampling(body.scored),
        max_new_tokens=options.longest,
        unbounded=True,  # as with Ollama
        stop=options.stops,
        grammar=body.grammar,
        formed="format",
    )


def _thinking(service: Service, body: Asked, *, tools: bool = False) -> Thinking:
    return thinking(service.model.tokenizer, effort=body.effort, on=body.thinks, tools=tools)


async def _answer(
    request: Request, body: Asked, generation: Generation, writer: AnswerWriter
) -> Response:
    if body.streamed:
        return EventStream(generation, writer.parts(generation), OLLAMA)
    async with generation:
        told = await unless_gone(request.receive, writer.whole(generation))
        return await asyncio.to_thread(_json, told)


def _json(told: dict[str, Any]) -> Response:
    return Response(_line(told), media_type="application/json")

"""POST /v1/messages, and what a message would have in tokens."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from hmt.base.errors import HMTError
from hmt.contracts.request import FinishReason, TokenEvent
from hmt.server.anthropic.schemas import Counted, MessagesBody
from hmt.server.errors import told
from hmt.server.generation import Generation
from hmt.server.service import Asked, service_of
from hmt.server.stream import EventStream, Voice, unless_gone

router = APIRouter()


def _line(event: dict[str, Any]) -> str:
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n"


VOICE = Voice(
    said=_line,
    failed=lambda error: _line(error.anthropic_body),
    quiet=_line({"type": "ping"}),
)


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a chat."""
    service = service_of(request, body.model)
    tokenizer, chat = service.model.tokenizer, body.chat
    asked = Asked(
        owner=request.state.owner,
        sampling=body.sampling,
        longest=body.max_tokens,
        answers=1,
        stops=tuple(body.stop_sequences or ()),
    )
    generation = await service.begin(asked, lambda: [tokenizer.chat_prompt(chat)], 1, "messages")
    heading = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": service.name,
    }
    if body.stream:
        return EventStream(generation, _events(generation, heading), VOICE)
    async with generation:
        events = await unless_gone(request.receive, _gather(generation))
        text = "".join(event.text for event in events)
        return JSONResponse(
            heading
            | {"content": [{"type": "text", "text": text}], **_end(events[-1])}
            | {"usage": _usage(generation)}
        )


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: Counted, request: Request) -> dict[str, int]:
    """How long a prompt is."""
    service = service_of(request, body.model)
    try:
        tokens = await asyncio.to_thread(service.model.tokenizer.chat_prompt, body.chat)
    except HMTError as error:
        raise told(error, "messages") from error
    return {"input_tokens": len(tokens)}


async def _gather(generation: Generation) -> list[TokenEvent]:
    return [event async for _, event in generation.events()]


async def _events(generation: Generation, heading: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    message = heading | empty | {"usage": _usage(generation)}
    yield {"type": "message_start", "message": message}
    block = {"type": "text", "text": ""}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    async for _, event in generation.events():
        if event.text:
            delta = {"type": "text_delta", "text": event.text}
            yield {"type": "content_block_delta", "index": 0, "delta": delta}
        if event.finish_reason is not None:
            yield {"type": "content_block_stop", "index": 0}
            yield {"type": "message_delta", "delta": _end(event), "usage": _usage(generation)}
    yield {"type": "message_stop"}


def _end(last: TokenEvent) -> dict[str, str | None]:
    """Why the answer ended."""
    if last.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    reason = "end_turn" if last.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": last.stop}


def _usage(generation: Generation) -> dict[str, int]:
    held = generation.held_tokens
    return {
        "input_tokens": generation.prompt_tokens - held,
        "cache_read_input_tokens": held,
        "cache_creation_input_tokens": 0,
        "output_tokens": generation.completion_tokens,
    }

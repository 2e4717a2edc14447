"""POST /v1/messages, and what a message would have in tokens."""

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from hmt.base.errors import HMTError
from hmt.contracts.request import FinishReason, TokenEvent
from hmt.server.anthropic.schemas import Counted, MessagesBody
from hmt.server.client import off_loop
from hmt.server.errors import as_api_error
from hmt.server.generation import Generation
from hmt.server.openai.chat_turn import ChatTurn, begin_chat
from hmt.server.openai.output_parser import AnswerParser, ParsedAnswer, object_of
from hmt.server.service import ApiRequest, service_of
from hmt.server.stream import EventStream, StreamDialect, unless_gone
from hmt.server.thinking import Thinking, thinking
from hmt.text import Tokenizer

router = APIRouter()


def _line(event: dict[str, Any]) -> str:
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n"


ANTHROPIC = StreamDialect(
    event=_line,
    error=lambda error: _line(error.anthropic_body),
    keep_alive=_line({"type": "ping"}),
)


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a chat."""
    service = service_of(request, body.model)
    asked = ApiRequest(
        owner=request.state.owner,
        sampling=body.sampling,
        max_new_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        grammar=body.grammar,
        formed="output_config",
        cache_salt=body.cache_salt or "",
    )
    turn = ChatTurn(
        messages=body.chat,
        tools=body.callable,
        forced=body.forced,
        images=body.images,
        thought=_thinking(service.model.tokenizer, body),
        goes_on=body.goes_on,
        several=body.several,
    )
    generation, reading = await begin_chat(service, asked, turn, request.receive)
    heading = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": service.name,
    }
    if body.stream:
        return EventStream(
            generation, _events(generation, heading, reading.reader(early=True)), ANTHROPIC
        )
    async with generation:
        events = await unless_gone(request.receive, _gather(generation))
        said = reading.reader().read("".join(event.text for event in events), last=True)
        blocks = [block for _, block in _blocks(said)] or [{"type": "text", "text": ""}]
        return JSONResponse(
            heading
            | {"content": blocks, **_end(events[-1], called=bool(said.calls))}
            | {"usage": _usage(generation)}
        )


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: Counted, request: Request) -> dict[str, int]:
    """How long a prompt is."""
    tokenizer = service_of(request, body.model).model.tokenizer
    try:
        tokens = await off_loop(lambda: _prompt(tokenizer, body))
    except HMTError as error:
        raise as_api_error(error, "messages") from error
    return {"input_tokens": len(tokens)}


def _thinking(tokenizer: Tokenizer, body: Counted) -> Thinking:
    stated = body.thinking
    return thinking(
        tokenizer,
        effort=body.effort,
        on=None if stated is None else stated.on,
        limit=None if stated is None else stated.budget_tokens,
        tools=bool(body.callable),
    )


def _prompt(tokenizer: Tokenizer, body: Counted) -> list[int]:
    thought = _thinking(tokenizer, body)
    return tokenizer.chat_prompt(
        body.chat, body.callable or None, variables=thought.variables, goes_on=body.goes_on
    )


async def _gather(generation: Generation) -> list[TokenEvent]:
    return [event async for _, event in generation.events()]


async def _events(
    generation: Generation, heading: dict[str, Any], reader: AnswerParser
) -> AsyncIterator[dict[str, Any]]:
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    message = heading | empty | {"usage": _usage(generation)}
    yield {"type": "message_start", "message": message}
    index, kind, called = 0, "", False  # of the block that is open
    async for _, event in generation.events():
        last = event.finish_reason is not None
        said = reader.read(event.text, last=last)
        called = called or bool(said.calls)
        blocks = list(_blocks(said))
        if last and not (kind or blocks):
            blocks = [({"type": "text_delta", "text": ""}, {"type": "text", "text": ""})]
        for delta, block in blocks:
            if block and (kind != block["type"] or kind == "tool_use"):
                if kind:
                    yield {"type": "content_block_stop", "index": index}
                    index += 1
                kind = block["type"]
                yield {
                    "type": "content_block_start", "index": index,
                    "content_block": block | _EMPTY[kind],
                }  # fmt: skip
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        if last:
            yield {"type": "content_block_stop", "index": index}
            ending = _end(event, called=called)
            yield {"type": "message_delta", "delta": ending, "usage": _usage(generation)}
    yield {"type": "message_stop"}


_EMPTY: Final[dict[str, dict[str, Any]]] = {
    "text": {"text": ""},
    "thinking": {"thinking": ""},
    "tool_use": {"input": {}},
}


def _blocks(said: ParsedAnswer) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What was said, each as the delta of a stream and as a whole block.

    The block is empty for more arguments of a call that has one.
    """
    if said.reasoning:
        thought = {"thinking": said.reasoning}
        yield (
            {"type": "thinking_delta", **thought},
            {"type": "thinking", "signature": "", **thought},
        )
    if said.text:
        yield {"type": "text_delta", "text": said.text}, {"type": "text", "text": said.text}
    for call in said.calls:
        block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name}
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield delta, block | {"input": object_of(call.arguments)} if call.name else {}


def _end(last: TokenEvent, *, called: bool) -> dict[str, str | None]:
    """Why the answer ended."""
    if last.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if last.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, Any]:
    """What an answer took until now.

    `diverged_at` and `precision` are ours, the first once its prompt has begun.
    """
    held, diverged_at = generation.held_tokens, generation.diverged_at
    told: dict[str, Any] = {} if diverged_at is None else {"diverged_at": diverged_at}
    if generation.is_raised:
        told["precision"] = "raised"
    return {
        "input_tokens": generation.prompt_tokens - held,
        "cache_read_input_tokens": held,
        "cache_creation_input_tokens": 0,
        "output_tokens": generation.completion_tokens,
        **told,
    }

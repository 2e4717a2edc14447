"""/v1/responses."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from hmt.server.errors import ApiError
from hmt.server.generation import Generation
from hmt.server.openai.chat_turn import ChatTurn, begin_chat
from hmt.server.openai.request import api_request
from hmt.server.responses.conversation import Conversation, page_of
from hmt.server.responses.items import chat_of, images_in
from hmt.server.responses.output import Event
from hmt.server.responses.schemas import ResponsesBody
from hmt.server.responses.store import ResponseStore
from hmt.server.responses.writer import ResponseWriter, heading_of, usage
from hmt.server.service import service_of
from hmt.server.stream import EventStream, StreamDialect, unless_gone
from hmt.server.thinking import thinking

router = APIRouter()


@router.post("/v1/responses")
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request, body.model)
    given = await asyncio.to_thread(json.loads, await request.body())
    conversation = Conversation(_store_of(request), request.state.owner, body, given)
    items = await conversation.items()
    wanted = replace(
        api_request(request, body, longest=body.max_output_tokens, logprobs=body.logprobs,
                    answers=1),
        unbounded=True,  # agents say no limit, and a call that is cut off is lost
    )  # fmt: skip
    tools = body.callable
    turn = ChatTurn(
        messages=chat_of(body.instructions, items),
        param="input",
        tools=tools,
        forced=body.forced,
        images=images_in(items),
        thought=thinking(
            service.model.tokenizer,
            effort=None if body.reasoning is None else body.reasoning.effort,
            tools=bool(tools),
        ),
        several=body.parallel_tool_calls is not False,
    )
    generation, reading = await begin_chat(service, wanted, turn, request.receive)
    writer = ResponseWriter(
        heading_of(body, given, service.name),
        body,
        reading,
        reading.reader(early=bool(body.stream)),
        {tool.known_as: tool for tool in body.offered},
    )
    if body.stream:
        dialect = StreamDialect(
            event=_line,
            error=lambda error: _line(writer.fail(error)),
            keep_alive=": still at it\n\n",
        )
        return EventStream(generation, _events(generation, writer, conversation), dialect)
    async with generation:
        await unless_gone(request.receive, _gather(generation, writer))
        response = writer.response(usage(generation, writer.reasoned))
        await conversation.keep(response)
        return _json(response)


@router.get("/v1/responses/{response_id}")
async def stored_response(response_id: str, request: Request, stream: bool = False) -> Response:
    """A response that is stored."""
    if stream:
        why = "a response that is stored comes whole: leave stream out"
        raise ApiError(400, why, param="stream", code="unsupported")
    found = _store_of(request).get(request.state.owner, response_id)
    return Response(found.response, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    response_id: str,
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """What a stored response answered: its input, behind all that it went on from."""
    found = _store_of(request).held(request.state.owner, response_id)
    return _json(await asyncio.to_thread(page_of, found, after, limit, order))


@router.delete("/v1/responses/{response_id}")
async def forget_response(response_id: str, request: Request) -> Response:
    """Forget a response that is stored; what goes on from it no longer can."""
    _store_of(request).delete(request.state.owner, response_id)
    return _json({"id": response_id, "object": "response", "deleted": True})


def _store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


async def _gather(generation: Generation, writer: ResponseWriter) -> None:
    async for _, event in generation.events():
        for _ in writer.read(event):
            pass  # the items are all that is told


async def _events(
    generation: Generation, writer: ResponseWriter, conversation: Conversation
) -> AsyncIterator[Event]:
    for told in writer.begin():
        yield told
    async for _, event in generation.events():
        for told in writer.read(event):
            yield told
    counted = usage(generation, writer.reasoned)
    await conversation.keep(writer.response(counted))
    yield writer.last(counted)


def _line(event: Event) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"


def _json(content: Any) -> Response:
    # Only ASCII: a request's own words come back, which may be text that has no UTF-8.
    return Response(json.dumps(content).encode("ascii"), media_type="application/json")

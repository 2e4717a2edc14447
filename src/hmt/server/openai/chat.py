"""POST /v1/chat/completions."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hmt.contracts.request import FinishReason, TokenEvent
from hmt.server.generation import Generation
from hmt.server.openai.chat_turn import ChatTurn, begin_chat
from hmt.server.openai.output_parser import AnswerParser, OutputParser
from hmt.server.openai.request import Counting, api_request
from hmt.server.openai.response import (
    GatheredAnswers,
    Heading,
    gather,
    logprobs_of,
    rendered,
    usage,
)
from hmt.server.openai.schemas import ChatBody
from hmt.server.service import service_of
from hmt.server.stream import EventStream, unless_gone
from hmt.server.thinking import thinking
from hmt.text import ToolCall

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a chat."""
    service = service_of(request, body.model)
    tokenizer = service.model.tokenizer
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wanted = api_request(
        request, body, longest=body.longest, logprobs=logprobs, answers=body.choices
    )
    tools = body.callable
    turn = ChatTurn(
        messages=[message.plain() for message in body.messages],
        tools=tools,
        forced=body.forced,
        images=[image for message in body.messages for image in message.images],
        videos=[video for message in body.messages for video in message.videos],
        thought=thinking(
            tokenizer,
            effort=body.reasoning_effort,
            limit=body.thinking_token_budget,
            tools=bool(tools),
        ),
        variables=body.variables,
        goes_on=bool(body.continue_final_message),
        several=body.parallel_tool_calls is not False,
    )
    generation, reading = await begin_chat(service, wanted, turn, request.receive)
    if body.stream:
        heading = Heading("chat.completion.chunk", service.name, "chatcmpl")
        counting = Counting.of(body)
        return EventStream(generation, _chunks(generation, heading, reading, counting))
    async with generation:
        answers = await unless_gone(request.receive, gather(generation))
        heading = Heading("chat.completion", service.name, "chatcmpl")
        choices = (_choice(n, answer, reading) for n, answer in enumerate(answers))
        return await rendered(heading, choices, usage(generation))


def _choice(number: int, answer: GatheredAnswers, reading: OutputParser) -> dict[str, Any]:
    """A whole answer."""
    said, reason = reading.reader().read(answer.text, last=True), answer.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["content"] = said.text or None
        message["tool_calls"] = [_called(call, reading) for call in said.calls]
        reason = "tool_calls" if reason == "stop" else reason
    return {
        "index": number,
        "message": message,
        "logprobs": logprobs_of(answer.events, reading.tokenizer),
        "finish_reason": reason,
    }


@dataclass(slots=True)
class _Stream:
    """One answer of a stream: what becomes of each token."""

    number: int
    reading: OutputParser
    reader: AnswerParser
    calls: int = 0

    def parts(self, event: TokenEvent) -> Iterator[dict[str, Any]]:
        """What is said with it."""
        reason = event.finish_reason
        said = self.reader.read(event.text, last=reason is not None)
        logprobs = logprobs_of([event], self.reading.tokenizer)
        if said.reasoning:
            yield _part(self.number, {"reasoning_content": said.reasoning})
        if said.text or (logprobs and logprobs["content"]):
            yield _part(self.number, {"content": said.text}, logprobs)
        for call in said.calls:
            self.calls += bool(call.name)
            part = (
                _called(call, self.reading)
                if call.name
                else {"function": {"arguments": call.arguments}}
            )
            yield _part(self.number, {"tool_calls": [{"index": self.calls - 1, **part}]})
        if reason is not None:
            stopped = self.calls and reason is FinishReason.STOP
            yield _part(self.number, {}, None, "tool_calls" if stopped else reason.value)


async def _chunks(
    generation: Generation, heading: Heading, reading: OutputParser, counting: Counting
) -> AsyncIterator[dict[str, Any]]:
    """A stream: who speaks, then what is said, then how it ended."""
    numbers = range(len(generation.choices))
    streams = [_Stream(n, reading, reading.reader(early=True)) for n in numbers]
    for number in numbers:
        begin = _part(number, {"role": "assistant", "content": ""})
        yield heading.of([begin], **counting.beside(generation))
    async for number, event in generation.events():
        for part in streams[number].parts(event):
            yield heading.of([part], **counting.beside(generation))
    if counting.last:
        yield heading.of([], usage=usage(generation))


def _called(call: ToolCall, reading: OutputParser) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": reading.id_of(call), "type": "function", "function": function}


def _part(
    number: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {
        "index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason,
    }  # fmt: skip

"""POST /v1/chat/completions."""

import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from hmt.contracts.request import FinishReason, TokenEvent, TokenLogprob
from hmt.server.errors import ApiError
from hmt.server.generation import Generation
from hmt.server.openai.answers import Gathered, Heading, gather, said, spoken, usage
from hmt.server.openai.asking import asked
from hmt.server.openai.schemas import ChatBody
from hmt.server.service import service_of
from hmt.server.stream import EventStream, unless_gone
from hmt.text import CallReader, Tokenizer, ToolCall, ToolStyle

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a chat."""
    service = service_of(request)
    service.check_name(body.model)
    tokenizer = service.model.tokenizer
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wanted = asked(request, body, longest=body.longest, logprobs=logprobs, answers=body.choices)
    messages, tools = [message.plain() for message in body.messages], body.callable
    style = _style(tokenizer) if tools else None
    if style is not None and body.must_call:
        form, formed = style.grammar(body.forced), "tools"
        wanted = replace(wanted, grammar=form, formed=formed)
    generation = await service.begin(
        wanted, lambda: [tokenizer.chat_prompt(messages, tools or None)], 1, "messages"
    )
    writer = _Writer(tokenizer, style, [tool["function"]["name"] for tool in tools])
    if body.stream:
        heading = Heading("chat.completion.chunk", service.name, "chatcmpl")
        return EventStream(generation, _chunks(generation, heading, writer, body.wants_usage))
    async with generation:
        answers = await unless_gone(request.receive, gather(generation))
        heading = Heading("chat.completion", service.name, "chatcmpl")
        choices = [writer.choice(n, answer) for n, answer in enumerate(answers)]
        return JSONResponse(heading.of(choices, usage=usage(generation)))


def _style(tokenizer: Tokenizer) -> ToolStyle:
    style = tokenizer.tool_style
    if style is None:
        raise ApiError(
            400,
            "this model's chat template has no place for tools: leave them out, or serve a model "
            "that was trained to call them",
            param="tools",
            code="unsupported",
        )
    return style


@dataclass(slots=True)
class _Writer:
    """Answers in OpenAI's words.  `names` are those of the tools that may be called."""

    tokenizer: Tokenizer
    style: ToolStyle | None
    names: list[str]

    def reader(self) -> CallReader | None:
        """What takes calls out of one answer."""
        return None if self.style is None or not self.names else self.style.reader(self.names)

    def choice(self, number: int, answer: Gathered) -> dict[str, Any]:
        """A whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        finish_reason, reader = answer.finish_reason, self.reader()
        if reader is not None:
            (shown, calls), (rest, others) = reader.push(answer.text), reader.flush()
            calls += others
            message["content"] = shown + rest
            if calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = [_called(call) for call in calls]
                finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        return {
            "index": number,
            "message": message,
            "logprobs": _logprobs(answer.events, self.tokenizer),
            "finish_reason": finish_reason,
        }


@dataclass(slots=True)
class _Stream:
    """One answer of a stream: what becomes of each token."""

    number: int
    writer: _Writer
    reader: CallReader | None
    calls: int = 0

    def parts(self, event: TokenEvent) -> Iterator[dict[str, Any]]:
        """What is said with it."""
        text, calls, reason = event.text, list[ToolCall](), event.finish_reason
        if self.reader is not None:
            text, calls = self.reader.push(text)
            if reason is not None:
                rest, others = self.reader.flush()
                text, calls = text + rest, calls + others
        logprobs = _logprobs([event], self.writer.tokenizer)
        if text or (logprobs and logprobs["content"]):
            yield _part(self.number, {"content": text}, logprobs)
        for call in calls:
            yield _part(self.number, {"tool_calls": [{"index": self.calls, **_called(call)}]})
            self.calls += 1
        if reason is not None:
            said = "tool_calls" if self.calls and reason is FinishReason.STOP else reason.value
            yield _part(self.number, {}, None, said)


async def _chunks(
    generation: Generation, heading: Heading, writer: _Writer, with_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """A stream: who speaks, then what is said, then how it ended."""
    none = {"usage": None} if with_usage else {}
    streams = [_Stream(n, writer, writer.reader()) for n in range(len(generation.courses))]
    for number in range(len(streams)):
        yield heading.of([_part(number, {"role": "assistant", "content": ""})], **none)
    async for number, event in generation.events():
        for part in streams[number].parts(event):
            yield heading.of([part], **none)
    if with_usage:
        yield heading.of([], usage=usage(generation))


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _part(
    number: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {
        "index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason,
    }  # fmt: skip


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

"""One response as it is written: its items, its events, and how it ends."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from hmt.contracts.request import FinishReason, TokenEvent
from hmt.server.errors import ApiError
from hmt.server.generation import Generation
from hmt.server.openai.output_parser import AnswerParser, OutputParser, ParsedAnswer
from hmt.server.openai.response import answer_text, told_logprob
from hmt.server.responses.output import Call, Event, Message, OutputItem, Reasoning, new_id
from hmt.server.responses.schemas import ResponsesBody
from hmt.server.responses.tools import OfferedTool
from hmt.text import ToolCall

# Codes that clients of this API know; the others have no place in a response.
_CODES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


@dataclass(slots=True)
class ResponseWriter:
    """Makes the items of one response from its tokens, and the events that tell of them.

    heading   the fields of the response that do not change
    tools     by the names by which the model knows them
    output    items that are whole
    reasoned  tokens of reasoning
    """

    heading: dict[str, Any]
    body: ResponsesBody
    reading: OutputParser
    reader: AnswerParser
    tools: dict[str, OfferedTool]
    output: list[dict[str, Any]] = field(default_factory=list)
    status: str = "in_progress"
    error: ApiError | None = None
    reasoned: int = 0
    _open: OutputItem | None = None
    _said: int = 0  # events
    _logprobs: list[Any] = field(default_factory=list)  # of tokens whose text has not come yet

    def response(self, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response as it is now."""
        ended = self.status == "completed"
        cut = self.status == "incomplete"
        failed = None
        if self.error is not None:
            code = _CODES.get(self.error.status, "server_error")
            failed = {"code": code, "message": self.error.message}
        return self.heading | {
            "status": self.status,
            "completed_at": int(time.time()) if ended else None,
            "error": failed,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(self.output),
            "usage": usage,
        }

    def begin(self) -> Iterator[Event]:
        """The first events."""
        for kind in ("created", "in_progress"):
            yield self._numbered({"type": f"response.{kind}", "response": self.response()})

    def read(self, event: TokenEvent) -> Iterator[Event]:
        """The events of one token."""
        last = event.finish_reason is not None
        said = self.reader.read(event.text, last=last)
        if self.body.logprobs is not None:
            tokenizer = self.reading.tokenizer
            self._logprobs += [told_logprob(one, tokenizer) for one in answer_text([event])]
        yield from self._tell(self._write(said))
        thinks = isinstance(self._open, Reasoning)
        self.reasoned += bool(said.reasoning) or (thinks and not event.ends)
        if last:
            whole = event.finish_reason is not FinishReason.LENGTH
            self.status = "completed" if whole else "incomplete"
            if not self.output and self._open is None:
                yield from self._tell(self._turn(Message, "msg"))
            yield from self._tell(self._close(self.status))

    def last(self, usage: dict[str, Any] | None) -> Event:
        """The last event, which has the response."""
        return self._numbered({"type": f"response.{self.status}", "response": self.response(usage)})

    def fail(self, error: ApiError) -> Event:
        """The last event of a response that failed."""
        self.status, self.error = "failed", error
        return self.last(None)

    def _tell(self, events: Iterable[Event]) -> Iterator[Event]:
        return map(self._numbered, events)

    def _numbered(self, event: Event) -> Event:
        self._said += 1
        return event | {"sequence_number": self._said - 1}

    def _write(self, said: ParsedAnswer) -> Iterator[Event]:
        if said.reasoning:
            if not isinstance(self._open, Reasoning):
                how = {"summarised": self.body.summarised, "sealed": self.body.sealed}
                yield from self._turn(Reasoning, "rs", **how)
            yield from self._add(said.reasoning)
        if said.text:
            if not isinstance(self._open, Message):
                yield from self._turn(Message, "msg")
            yield from self._add(said.text)
        for call in said.calls:
            if call.name:
                yield from self._call(call)
            yield from self._add(call.arguments)

    def _call(self, call: ToolCall) -> Iterator[Event]:
        tool = self.tools[call.name]
        prefix = "ctc" if tool.custom else "fc"
        yield from self._turn(Call, prefix, tool=tool, call_id=self.reading.id_of(call))

    def _add(self, text: str) -> Iterator[Event]:
        assert self._open is not None
        logprobs, self._logprobs = self._logprobs, []
        yield from self._open.add(text, logprobs)

    def _turn(self, kind: type[OutputItem], prefix: str, **how: Any) -> Iterator[Event]:
        """Close the open item and begin another."""
        yield from self._close("completed")
        item = kind(len(self.output), new_id(prefix), **how)
        self._open = item
        added = {"output_index": item.place, "item": item.told("in_progress")}
        yield {"type": "response.output_item.added", **added}
        yield from item.begin()

    def _close(self, status: str) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is None:
            return
        yield from item.end()
        self.output.append(item.told(status))
        done = {"output_index": item.place, "item": self.output[-1]}
        yield {"type": "response.output_item.done", **done}


def heading_of(body: ResponsesBody, given: dict[str, Any], model: str) -> dict[str, Any]:
    """What a response says of its request, and does not change.  given: the request as it came."""
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": given.get("metadata") or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None} | (given.get("reasoning") or {}),
        "service_tier": body.service_tier or "default",
        "store": body.stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": given.get("text") or {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }


def usage(generation: Generation, reasoned: int) -> dict[str, Any]:
    """What an answer took; `diverged_at`, which is ours, once its prompt has begun."""
    prompt, answer = generation.prompt_tokens, generation.completion_tokens
    details = {"cached_tokens": generation.held_tokens, "cache_write_tokens": 0}
    if generation.diverged_at is not None:
        details["diverged_at"] = generation.diverged_at
    return {
        "input_tokens": prompt,
        "input_tokens_details": details,
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": prompt + answer,
    }

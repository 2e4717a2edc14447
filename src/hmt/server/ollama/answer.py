"""Answers in Ollama's words: objects, of which the last one has what the answer took."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from hmt.contracts.request import FinishReason, TokenEvent
from hmt.server.generation import Generation
from hmt.server.openai.output_parser import AnswerParser, ParsedAnswer, object_of
from hmt.server.openai.response import answer_text, told_logprob
from hmt.text import Tokenizer


@dataclass(slots=True)
class AnswerWriter:
    """Tells of one answer, as a chat's or as a text's.

    name      the model's, as the client has it
    chat      whether there is a message, and no `response`
    begun_s   time.perf_counter() at the request
    """

    name: str
    chat: bool
    tokenizer: Tokenizer
    reader: AnswerParser = field(default_factory=AnswerParser)
    begun_s: float = field(default_factory=time.perf_counter)

    def part(self, said: ParsedAnswer, *, done: bool = False) -> dict[str, Any]:
        """An object that tells what was said."""
        told: dict[str, Any] = {"content" if self.chat else "response": said.text}
        if said.reasoning:
            told["thinking"] = said.reasoning
        if said.calls:
            told["tool_calls"] = [
                {"function": {"index": index, "name": call.name,
                              "arguments": object_of(call.arguments)}}
                for index, call in enumerate(said.calls)
            ]  # fmt: skip
        if self.chat:
            told = {"message": {"role": "assistant", **told}}
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self.name, "created_at": now, **told, "done": done}

    def loaded(self) -> dict[str, Any]:
        """What is told where nothing was asked."""
        return self.part(ParsedAnswer(), done=True) | {"done_reason": "load"}

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer as one object."""
        events = [event async for _, event in generation.events()]
        said = self.reader.read("".join(event.text for event in events), last=True)
        return self.part(said, done=True) | self._scores(events) | self._took(generation)

    async def parts(self, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        """The answer as it comes."""
        held: list[TokenEvent] = []  # tokens whose text has not come yet
        called = 0
        async for _, event in generation.events():
            said = self.reader.read(event.text, last=event.finish_reason is not None)
            held.append(event)
            if said.text or said.reasoning or said.calls:
                part = self.part(said)
                for call in part["message"].get("tool_calls", ()) if self.chat else ():
                    call["function"]["index"] = called
                    called += 1
                yield part | self._scores(held)
                held.clear()
        last = self.part(ParsedAnswer(), done=True)
        yield last | self._scores(held) | self._took(generation)

    def _scores(self, events: list[TokenEvent]) -> dict[str, Any]:
        told = [told_logprob(one, self.tokenizer) for one in answer_text(events)]
        return {"logprobs": told} if told else {}

    def _took(self, generation: Generation) -> dict[str, Any]:
        """Tokens, and nanoseconds: until it was begun, of its prompt, of the rest, of all."""
        course = generation.choices[0]
        end_s = time.perf_counter()
        admitted_s = course.ticket.admitted_s or course.ticket.submitted_s
        first_s, last_s = course.first_s or end_s, course.last_s or end_s
        cut = course.finish_reason is FinishReason.LENGTH
        return {
            "done_reason": "length" if cut else "stop",
            "total_duration": _nanoseconds(end_s - self.begun_s),
            "load_duration": _nanoseconds(admitted_s - self.begun_s),
            "prompt_eval_count": generation.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - admitted_s),
            "eval_count": generation.completion_tokens,
            "eval_duration": _nanoseconds(last_s - first_s),
        }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))

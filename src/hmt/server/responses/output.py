"""The items of an answer as they are written, and the events that tell of them."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from hmt.server.client import CLIENT
from hmt.server.responses.items import INPUT, SEALED
from hmt.server.responses.tools import OfferedTool

Event = dict[str, Any]
_DELTA, _DONE = "delta", "done"


def new_id(prefix: str) -> str:
    """An id that nothing else has.

    Its first two digits are the number of this server, where it is one of several: by them a router
    finds what is stored here.
    """
    digits, number = uuid.uuid4().hex, CLIENT.get().state.get("replica")
    return f"{prefix}_{digits}" if number is None else f"{prefix}_{number:02x}{digits[2:]}"


@dataclass(slots=True)
class OutputItem(ABC):
    """An item that is being written.

    place  its index in the output of the response
    id     of its own
    pieces what has been written
    """

    place: int
    id: str
    pieces: list[str] = field(default_factory=list)

    @abstractmethod
    def told(self, status: str) -> dict[str, Any]:
        """The item as it is now; `status` is "in_progress", "completed" or "incomplete"."""

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """What is told once it has been added."""

    @abstractmethod
    def add(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        """More of it."""

    @abstractmethod
    def end(self) -> Iterator[Event]:
        """What is told before it is done."""

    @property
    def text(self) -> str:
        """All that has been written."""
        return "".join(self.pieces)

    def event(self, kind: str, **fields: Any) -> Event:
        """An event about it."""
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.place} | fields


@dataclass(slots=True)
class Message(OutputItem):
    """What the assistant says."""

    logprobs: list[Any] = field(default_factory=list)

    @property
    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs,
        }  # fmt: skip

    @override
    def told(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part]
        about = {"id": self.id, "type": "message", "status": status, "role": "assistant"}
        return about | {"content": content}

    @override
    def begin(self) -> Iterator[Event]:
        yield self.event("content_part.added", content_index=0, part=self._part)

    @override
    def add(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        self.pieces.append(text)
        self.logprobs = self.logprobs + logprobs
        yield self.event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    @override
    def end(self) -> Iterator[Event]:
        whole = {"text": self.text, "logprobs": self.logprobs}
        yield self.event("output_text.done", content_index=0, **whole)
        yield self.event("content_part.done", content_index=0, part=self._part)


@dataclass(slots=True)
class Reasoning(OutputItem):
    """What the assistant thinks: as content, or as its summary.

    sealed   also in `encrypted_content`, which clients give back unread; it is not encrypted, since
             the same is told beside it
    """

    summarised: bool = False
    sealed: bool = False

    @override
    def told(self, status: str) -> dict[str, Any]:
        kind = "summary_text" if self.summarised else "reasoning_text"
        parts = [] if status == "in_progress" else [{"type": kind, "text": self.text}]
        told: dict[str, Any] = {"id": self.id, "type": "reasoning", "status": status}
        told["summary"] = parts if self.summarised else []
        if not self.summarised:
            told["content"] = parts
        if self.sealed and parts:
            told["encrypted_content"] = SEALED + self.text
        return told

    def _part(self, when: str) -> Event:
        if self.summarised:
            part = {"type": "summary_text", "text": self.text}
            return self.event(f"reasoning_summary_part.{when}", summary_index=0, part=part)
        part = {"type": "reasoning_text", "text": self.text}
        return self.event(f"content_part.{when}", content_index=0, part=part)

    def _text(self, when: str, **fields: Any) -> Event:
        if self.summarised:
            return self.event(f"reasoning_summary_text.{when}", summary_index=0, **fields)
        return self.event(f"reasoning_text.{when}", content_index=0, **fields)

    @override
    def begin(self) -> Iterator[Event]:
        yield self._part("added")

    @override
    def add(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        self.pieces.append(text)
        yield self._text(_DELTA, delta=text)

    @override
    def end(self) -> Iterator[Event]:
        yield self._text(_DONE, text=self.text)
        yield self._part(_DONE)


@dataclass(slots=True)
class Call(OutputItem):
    """A call of a tool.  The input of a custom one is known once its arguments are whole."""

    tool: OfferedTool | None = None
    call_id: str = ""

    @property
    def _input(self) -> str:
        """The text that a custom tool is given: as it came where that is no JSON."""
        try:
            found = json.loads(self.text)[INPUT]
        except (ValueError, TypeError, KeyError, RecursionError):
            return self.text
        return found if isinstance(found, str) else self.text

    @override
    def told(self, status: str) -> dict[str, Any]:
        assert self.tool is not None
        begun = status == "in_progress"
        custom = self.tool.custom
        told = {
            "id": self.id,
            "type": "custom_tool_call" if custom else "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.tool.name,
        }
        if self.tool.namespace is not None:
            told["namespace"] = self.tool.namespace
        name, whole = (INPUT, self._input) if custom else ("arguments", self.text)
        return told | {name: "" if begun else whole}

    @override
    def begin(self) -> Iterator[Event]:
        return iter(())

    @override
    def add(self, text: str, logprobs: list[Any]) -> Iterator[Event]:
        self.pieces.append(text)
        assert self.tool is not None
        if text and not self.tool.custom:
            yield self.event("function_call_arguments.delta", delta=text)

    @override
    def end(self) -> Iterator[Event]:
        assert self.tool is not None
        if self.tool.custom:
            yield self.event("custom_tool_call_input.delta", delta=self._input)
            yield self.event("custom_tool_call_input.done", input=self._input)
        else:
            whole = {"name": self.tool.name, "arguments": self.text}
            yield self.event("function_call_arguments.done", **whole)

"""Calls of tools in an answer, as they become known."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name, its arguments as JSON, and what the model calls the call, if anything.

    Of an answer that is still being written: what is known until now.  Without a name it is more
    of the arguments of the call before.
    """

    name: str
    arguments: str
    id: str | None = None


class CallReader(Protocol):
    """Takes calls out of one answer's text as it comes.  What is no call stays text."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certain to be none of a call, and what became known of calls."""
        ...

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The same at the end."""
        ...


def whole_calls(parts: Iterable[ToolCall]) -> list[ToolCall]:
    """Calls, each with all of its arguments."""
    calls: list[ToolCall] = []
    for part in parts:
        if part.name or not calls:
            calls.append(part)
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
    return calls

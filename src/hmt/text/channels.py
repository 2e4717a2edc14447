"""What gpt-oss answers, by the channels that its messages go to: see hmt.text.harmony."""

import json
import re
from collections.abc import Iterable
from enum import Enum, auto
from typing import Final

from hmt.text.harmony import BETWEEN, CHANNEL, CONSTRAIN, END, ENDINGS, MESSAGE, START
from hmt.text.stream import StopStrings
from hmt.text.tool_calls.parser import ToolCall

_BEGINNINGS: Final = (CHANNEL, CONSTRAIN, MESSAGE, "to=")  # of what stands before a message
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")


class _Kind(Enum):
    THOUGHT = auto()
    ANSWER = auto()
    CALL = auto()


class HarmonyReader:
    """Parts one answer's text as it comes into (reasoning, answer, calls of tools).

    Messages on the channel `analysis` are reasoning, those to functions.NAME calls, if NAME may be
    called and what they say is an object, and all others the answer: `final`, and what
    `commentary` tells the user.  Text without marks is an answer, too.
    """

    def __init__(self, begun: str, names: Iterable[str]) -> None:
        """begun: what the prompt ends with, behind its last <|start|>; names: of functions."""
        self._names = frozenset(names)
        self._header = StopStrings([MESSAGE])
        self._before = ""  # what has come of a header
        self._first = True  # of the answer's headers: its role is part of the prompt
        self._body: StopStrings | None = None  # None outside of messages
        self._kind = _Kind.ANSWER
        self._name = ""
        self._arguments = ""
        self._shown: set[_Kind] = set()
        self._due: set[_Kind] = set()  # kinds that go on in another message
        self.push(begun.removeprefix("assistant"))

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._body is not None and self._kind is _Kind.THOUGHT

    def push(self, text: str) -> tuple[str, str, list[ToolCall]]:
        """What is certain now that `text` follows."""
        said = _Said()
        while text:
            if self._body is None:
                text = self._in_header(text)
                continue
            body = self._body
            self._say(body.push(text), said)
            if body.matched is None:
                break
            text = body.rest
            self._close(said)
            if body.matched == CHANNEL:  # the end of the message was left out
                text = CHANNEL + text
        return said.parts

    def flush(self) -> tuple[str, str, list[ToolCall]]:
        """What was still held; nothing follows."""
        said = _Said()
        if self._body is not None:
            self._say(self._body.flush(), said)
            self._close(said)
        elif self._first:
            before = self._before + self._header.flush()
            if not before.lstrip().startswith((*_BEGINNINGS, "<|")):
                self._open(_Kind.ANSWER)
                self._say(before, said)
        return said.parts

    def _in_header(self, text: str) -> str:
        """What of it belongs to a message, once the header is complete or known to be none."""
        header = self._header
        self._before += header.push(text)
        begin = self._before.lstrip()
        if self._first and begin and not _may_begin(begin):
            mark = "" if header.matched is None else MESSAGE + header.rest
            self._open(_Kind.ANSWER)
            return self._before + header.flush() + mark
        if header.matched is None:
            return ""
        self._open(self._kind_of(self._before))
        return header.rest

    def _kind_of(self, header: str) -> _Kind:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._name = recipient[1].removeprefix("functions.")
            if self._name in self._names:
                return _Kind.CALL
        thought = channel is not None and channel[1] == "analysis"
        return _Kind.THOUGHT if thought else _Kind.ANSWER

    def _open(self, kind: _Kind) -> None:
        self._kind, self._arguments, self._first = kind, "", False
        self._body = StopStrings([END, START, CHANNEL, *ENDINGS])
        self._due = self._shown.copy()

    def _say(self, text: str, said: "_Said") -> None:
        """Add what a message says."""
        if self._kind is _Kind.CALL:
            self._arguments += text
        elif text:
            text = BETWEEN + text if self._kind in self._due else text
            self._due.discard(self._kind)
            self._shown.add(self._kind)
            if self._kind is _Kind.THOUGHT:
                said.reasoning += text
            else:
                said.answer += text

    def _close(self, said: "_Said") -> None:
        """End a message."""
        if self._kind is _Kind.CALL:
            call = _call(self._name, self._arguments)
            if call is not None:
                said.calls.append(call)
            else:
                self._kind = _Kind.ANSWER
                self._say(self._arguments, said)
        self._body, self._before, self._header = None, "", StopStrings([MESSAGE])


class _Said:
    """What becomes known."""

    def __init__(self) -> None:
        self.reasoning, self.answer, self.calls = "", "", list[ToolCall]()

    @property
    def parts(self) -> tuple[str, str, list[ToolCall]]:
        return self.reasoning, self.answer, self.calls


def _may_begin(text: str) -> bool:
    """Whether `text` is a header, or may become one."""
    return any(one.startswith(text) or text.startswith(one) for one in _BEGINNINGS)


def _call(name: str, arguments: str) -> ToolCall | None:
    try:
        value = json.loads(arguments.strip() or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return ToolCall(name, json.dumps(value, ensure_ascii=False))

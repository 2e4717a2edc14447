"""Readers of calls, one for each way in which models write them.

Each is a generator over the text that has come, which waits where it needs more: what it decides
does not depend on how the text was cut.  Arguments are passed on as they come.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Final

from typing_extensions import override

from hmt.text.tool_calls.balance import Balance
from hmt.text.tool_calls.parameters import Parameters, as_json, read_json
from hmt.text.tool_calls.parser import CallReader, ToolCall
from hmt.text.tool_calls.python_literal import read_literal

# Waits for more text; the result tells whether what was sought is there.
Seeking = Generator[None, None, bool]

_SHORT: Final = 64  # characters of arguments
HEAD_LENGTH: Final = 4096  # characters in which the name of a call must be
_SEPARATORS: Final = "; ,\n\t\r"
_TEXT: Final = r'"(?:[^"\\]|\\.)*"'
_OTHER: Final = rf'(?:"(?:type|id)"\s*:\s*{_TEXT}\s*,\s*)*'
_HEAD: Final = re.compile(
    rf'\{{\s*{_OTHER}"name"\s*:\s*({_TEXT})\s*,\s*{_OTHER}"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_PYTHON: Final = re.compile(r"\[\s*([A-Za-z_][\w.-]*)\s*\(")
_PYTHON_BEGUN: Final = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]*)?\s*")
_FUNCTION: Final = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(")
_KEYWORD: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)\s*")
_WORD: Final = re.compile(r"[\w.-]{0,64}")
_FENCE: Final = "```"
_JUNK: Final = " \n\t\r}]`"  # which small models write behind calls
_LANGUAGES: Final = ("json", "python", "tool_call")
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"  # special tokens of Mistral
_IPYTHON: Final = "<|python_tag|>"


class TextReader(ABC, CallReader):
    """What all readers do: hold text that may belong to a call, and show the rest.

    White space is shown with what follows it: before and after calls it is left out.
    """

    def __init__(
        self,
        names: Iterable[str],
        parameters: Mapping[str, Parameters] | None = None,
        tags: tuple[str, str] = ("<tool_call>", "</tool_call>"),
        *,
        early: bool = False,
        hidden: Iterable[str] = (),
    ) -> None:
        """For one answer.

        names        of tools that may be called
        parameters   of them, as far as known
        tags         around calls, where they have some
        early        results have calls as far as they have come; otherwise all, at the end
        hidden       marks that are not shown where there is no call: special tokens
        """
        self.tags = tags
        self._early = early
        self._hidden = tuple(hidden)
        self.known = frozenset(names)
        self.parameters = parameters or {}
        self.text = ""  # what has come and is not used
        self._taken: list[str] | None = None  # what was used since a call may have begun
        self._ended = False
        self._shown: list[str] = []
        self._blank = ""  # white space that nothing has followed
        self._called = False
        self._calls: list[ToolCall] = []
        self._open = False  # whether the latest call goes on
        self._passing = False  # whether its beginning has been passed on
        self._running = self.parse()

    @abstractmethod
    def parse(self) -> Generator[None, None, None]:
        """Read all of the answer; yields where more of it has to come."""

    @override
    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        if text:
            self.text += text
            next(self._running, None)
        return self._results()

    @override
    def flush(self) -> tuple[str, list[ToolCall]]:
        self._ended = True
        for _ in self._running:
            pass
        self._early, self._open = True, False
        if not self._called:
            self._shown.append(self._blank)
        return self._results()

    def _results(self) -> tuple[str, list[ToolCall]]:
        shown, self._shown = "".join(self._shown), []
        calls, held = self._calls, list[ToolCall]()
        if not self._early:
            calls, held = [], calls
        elif calls and self._open and not self._passing:
            # Short calls come whole: a chunk of a stream is 300 bytes, whatever is in it.
            held = calls[-1:] if len(calls[-1].arguments) < _SHORT else []
            calls = calls[: len(calls) - len(held)]
            self._passing = not held
        self._calls = held
        return shown, calls

    def show(self, text: str) -> None:
        """Text that is no call."""
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        self._shown.append(said)

    def call(self, name: str, arguments: str, known_as: str | None = None) -> None:
        """What is known of a call; without a name, more of the arguments of the one before."""
        self._blank, self._called = "", True
        if name:
            self._open, self._passing = True, False
        elif self._calls:
            last = self._calls.pop()
            name, arguments, known_as = last.name, last.arguments + arguments, last.id
        if name or arguments:
            self._calls.append(ToolCall(name, arguments, known_as))

    def begin(self) -> None:
        """A call may begin here."""
        self._taken = []

    def use(self, length: int) -> str:
        """Take so many characters."""
        used, self.text = self.text[:length], self.text[length:]
        if self._taken is not None:
            self._taken.append(used)
        return used

    def settle(self, called: bool) -> None:
        """What was used since `begin` was a call, or is text."""
        taken, self._taken, self._open = self._taken or [], None, False
        if not called:
            self.show(self.plain("".join(taken)))

    def plain(self, text: str) -> str:
        """How text that is no call is shown."""
        for mark in self._hidden:
            text = text.replace(mark, "")
        return text

    def more(self) -> Seeking:
        """Wait for more text; False at the end."""
        length = len(self.text)
        while len(self.text) == length and not self._ended:
            yield
        return len(self.text) > length

    def place(self, at: int, blank: str = " \n\t\r") -> Generator[None, None, int]:
        """Of the first character from `at` that is none of `blank`; -1 where there is none."""
        while True:
            rest = self.text[at:].lstrip(blank)
            if rest:
                return len(self.text) - len(rest)
            if not (yield from self.more()):
                return -1

    def skip(self, blank: str = " \n\t\r") -> Seeking:
        """Leave out `blank`; whether anything follows."""
        place = yield from self.place(0, blank)
        self.use(place if place >= 0 else len(self.text))
        return place >= 0

    def ahead(self, *options: str, at: int = 0) -> Generator[None, None, str]:
        """With which of `options` the text goes on; "" for none."""
        while True:
            for option in options:
                if self.text.startswith(option, at):
                    return option
            rest = self.text[at : at + max(map(len, options))]
            if not any(option.startswith(rest) for option in options):
                return ""
            if not (yield from self.more()):
                return ""

    def pass_over(self, mark: str) -> Generator[None, None, None]:
        """Leave out `mark`, or what came of it, where it follows."""
        mark = (yield from self.ahead(mark)) or (self.text if self.is_begun(mark) else "")
        self.use(len(mark))

    def is_begun(self, *marks: str, at: int = 0) -> bool:
        """Whether the text from `at` on is a mark, or the beginning of one."""
        return any(mark.startswith(self.text[at:]) for mark in marks)

    def find(self, mark: str) -> Generator[None, None, int]:
        """Where `mark` is, within HEAD_LENGTH; -1 where it is not."""
        while (place := self.text.find(mark, 0, HEAD_LENGTH)) < 0:
            if len(self.text) >= HEAD_LENGTH or not (yield from self.more()):
                return -1
        return place

    def show_until(self, *marks: str) -> Generator[None, None, str]:
        """Show text up to the first of `marks`; which it is, and "" at the end."""
        while True:
            places = [(self.text.find(mark), mark) for mark in marks if mark in self.text]
            if places:
                place, mark = min(places)
                self.show(self.use(place))
                return mark
            self.show(self.use(len(self.text) - _begun(self.text, marks)))
            if not (yield from self.more()):
                self.show(self.use(len(self.text)))
                return ""

    def drop_until(self, mark: str) -> Seeking:
        """Leave out text up to `mark`; whether it is there."""
        while mark not in self.text:
            self.use(len(self.text) - _begun(self.text, (mark,)))
            if not (yield from self.more()):
                self.use(len(self.text))
                return False
        self.use(self.text.index(mark))
        return True

    def values(self, end: str = "", *, early: bool = True) -> Seeking:
        """Calls one after the other, up to `end` or what is none of them; whether any.

        early   arguments are passed on as they come, where a name comes before them
        """
        called = False
        while (yield from self.skip(_SEPARATORS)):
            taken = len(self._taken or ())
            if (yield from self.ahead(_FENCE)):
                self.use(len(_FENCE))
                self.use(len((yield from self.ahead(*_LANGUAGES))))
                continue
            if self.text[0] not in "{[" or (not end and (yield from self.ahead(TOOL_CALLS))):
                return called
            if (yield from self._is_python()):
                yield from self._python()
                called = True
            elif (yield from self._value(early)):
                called = True
            else:
                if called and not end and self._taken is not None:
                    self.show("".join(self._taken[taken:]))
                return called
        return called

    def _value(self, early: bool) -> Seeking:
        """One object or list of calls, in JSON or as Python's; whether it was one."""
        scan, at = Balance(), 0
        while True:
            head = _HEAD.match(self.text, 0, HEAD_LENGTH) if early else None
            if head is not None and read_json(head[1]) in self.known:
                self.call(read_json(head[1]), "")
                self.use(head.end())
                yield from self.arguments()
                rest = Balance(depth=1)
                while not rest.done:
                    self.use(rest.end(self.text, 0))
                    if not rest.done and not (yield from self.more()):
                        break
                return True
            at = scan.end(self.text, at)
            if scan.done:
                break
            if not (yield from self.more()):
                self.use(len(self.text))
                return False
        calls = calls_in(self.use(at), self.known)
        for call in calls:
            self.call(call.name, call.arguments, call.id)
        return bool(calls)

    def arguments(self) -> Seeking:
        """An object of arguments, passed on as it comes; whether it ended."""
        scan = Balance()
        while True:
            said: list[str] = []
            self.use(scan.end(self.text, 0, said=said))
            self.call("", "".join(said))
            if scan.done or not (yield from self.more()):
                return scan.done

    def _is_python(self) -> Seeking:
        """Whether a list of Python's calls begins here, the first of a known function."""
        while True:
            match = _PYTHON.match(self.text, 0, HEAD_LENGTH)
            if match is not None:
                return match[1] in self.known
            begun = _PYTHON_BEGUN.match(self.text, 0, HEAD_LENGTH)
            if begun is None or begun.end() < len(self.text):
                return False
            if not (yield from self.more()):
                return False

    def _python(self) -> Generator[None, None, None]:
        """[f(x="y"), g()]: each argument is passed on when it is complete."""
        self.use(1)
        while (yield from self.skip(" \n\t\r,")) and self.text[0] != "]":
            place = yield from self.find("(")
            name = _FUNCTION.fullmatch(self.text, 0, place + 1)
            if name is None:
                break
            self.use(place + 1)
            yield from self._python_arguments(name[1])
        if self.text.startswith("]"):
            self.use(1)

    def _python_arguments(self, name: str) -> Generator[None, None, None]:
        known, number, scan = name in self.known, 0, Balance(depth=1)
        if known:
            self.call(name, "{")
        while not scan.done:
            scan, at = Balance(depth=1), 0
            while not scan.done and not scan.stopped:
                at = scan.end(self.text, at, stop=",")
                if not scan.done and not scan.stopped and not (yield from self.more()):
                    self.use(at)
                    return
            source = self.use(at)[:-1]
            if known and source.strip():
                before = ", " if number else ""
                self.call("", before + self._python_argument(name, number, source))
                number += 1
        if known:
            self.call("", "}")

    def _python_argument(self, name: str, number: int, source: str) -> str:
        keyword, parameters = _KEYWORD.match(source), self.parameters.get(name, Parameters())
        key = parameters.name_of(number) if keyword is None else keyword[1]
        source = source if keyword is None else source[keyword.end() :]
        try:
            value = read_literal(source)
        except ValueError:
            value = source.strip()
        return f"{as_json(key)}: {as_json(value)}"


class TaggedReader(TextReader):
    """Objects, lists or Python's calls between two tags (Hermes, Qwen, LFM2)."""

    @override
    def parse(self) -> Generator[None, None, None]:
        while (yield from self.show_until(self.tags[0])):
            self.begin()
            self.use(len(self.tags[0]))
            called = yield from self.values(self.tags[1])
            yield from self.close(called)

    def close(self, called: bool) -> Generator[None, None, None]:
        """What follows a call up to the end tag, which may be missing; all of it if it was none."""
        if called:
            yield from self.skip(_JUNK)
            yield from self.pass_over(self.tags[1])
        elif (yield from self.drop_until(self.tags[1])):
            self.use(len(self.tags[1]))
        self.settle(called)


class UntaggedReader(TextReader):
    """Calls that are the whole answer (Llama), or follow a mark of Mistral's."""

    @override
    def parse(self) -> Generator[None, None, None]:
        self.begin()
        if (yield from self.skip()):
            self.use(len((yield from self.ahead(_IPYTHON))))
            named = not (yield from self.ahead(TOOL_CALLS)) and (yield from self._named(bare=True))
            self.settle(named or (yield from self.values()))
        else:
            self.settle(False)
        while (yield from self.show_until(TOOL_CALLS)):
            self.begin()
            self.use(len(TOOL_CALLS))
            called = yield from self.skip()
            if called and self.text[0] in "[{":
                # The id that Mistral's templates demand stands behind the arguments.
                called = yield from self.values(early=False)
            elif called:
                called = yield from self._named(bare=False)
            self.settle(called)

    def _named(self, *, bare: bool) -> Seeking:
        """NAME[ARGS]{...}, with [CALL_ID]ID between or not; whether it is a call.

        bare   nothing stood before it
        """
        while (word := _WORD.match(self.text)) is not None and word.end() == len(self.text):
            if not (yield from self.more()):
                return False
        if word is None or word[0] not in self.known:
            return False
        marks = (ARGS, CALL_ID) if bare else (ARGS, CALL_ID, "{")
        mark = yield from self.ahead(*marks, at=word.end())
        call_id = ""
        if mark == CALL_ID:
            place = yield from self.find(ARGS)
            if place < 0:
                return False
            call_id = self.text[word.end() + len(CALL_ID) : place].strip()
            self.use(place + len(ARGS))
        elif mark:
            self.use(word.end() + (len(ARGS) if mark == ARGS else 0))
        else:
            return False
        self.call(word[0], "", call_id or None)
        if (yield from self.skip()) and self.text[0] == "{":
            yield from self.arguments()
        else:
            self.call("", "{}")
        return True


def calls_in(text: str, known: frozenset[str]) -> list[ToolCall]:
    """The calls that `text`, one value, consists of; none where one of them is not known."""
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        try:
            value = read_literal(text)
        except ValueError:
            return []
    calls = [_call(one, known) for one in (value if isinstance(value, list) else [value])]
    return [] if None in calls else [call for call in calls if call is not None]


def _call(value: Any, known: frozenset[str]) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if value["name"] not in known:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, str):
        arguments = as_json({} if arguments is None else arguments)
    call_id = value.get("id")
    call_id = call_id if isinstance(call_id, str) and call_id else None
    return ToolCall(value["name"], arguments, call_id)


def _begun(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of `text` with which one of `marks` begins."""
    longest = min(len(text), max(map(len, marks)) - 1)
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0

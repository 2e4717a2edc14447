"""Qwen3-Coder's calls, whose arguments are plain text between tags.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value may hold such tags itself, as files that are written do: a tag ends it where something
follows that can follow there.
"""

from collections.abc import Generator
from typing import Final

from typing_extensions import override

from hmt.text.tool_calls.dialect_parsers import Seeking, TaggedReader
from hmt.text.tool_calls.parameters import Parameters, as_json

FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"


class XmlReader(TaggedReader):
    """Reads them, with <tool_call> around or without, and what Hermes writes there."""

    @property
    def _ends(self) -> tuple[str, ...]:
        """What may end a value."""
        return PARAMETER_END, FUNCTION_END, PARAMETER, self.tags[1]

    @override
    def parse(self) -> Generator[None, None, None]:
        while mark := (yield from self.show_until(self.tags[0], FUNCTION)):
            self.begin()
            self.use(len(mark) if mark == self.tags[0] else 0)
            called = False
            while (yield from self.skip()) and (yield from self.ahead(FUNCTION)):
                called |= yield from self._function()
            if mark == FUNCTION:
                self.settle(called)
            else:
                called |= yield from self.values(self.tags[1])
                yield from self.close(called)

    def _tag(self, begin: str) -> Generator[None, None, str]:
        """What stands between `begin` and >."""
        place = yield from self.find(">")
        return self.use(place + 1)[len(begin) : -1].strip().strip("\"'") if place >= 0 else ""

    def _function(self) -> Seeking:
        """One call; whether its function is known."""
        name = yield from self._tag(FUNCTION)
        if name not in self.known:
            if (yield from self.drop_until(FUNCTION_END)):
                self.use(len(FUNCTION_END))
            return False
        self.call(name, "{")
        parameters, between = self.parameters.get(name, Parameters()), ""
        while (yield from self.skip()) and (yield from self.ahead(PARAMETER)):
            key = yield from self._tag(PARAMETER)
            if not key:
                self.use(len(self.text))
                return True
            self.call("", f"{between}{as_json(key)}: ")
            between = ", "
            if not (yield from self._value_of(key, parameters)):
                return True  # cut off: JSON that does not end says so
        self.use(len(self.text) if self.is_begun(PARAMETER) else 0)
        yield from self.pass_over(FUNCTION_END)
        self.call("", "}")
        return True

    def _value_of(self, key: str, parameters: Parameters) -> Seeking:
        """One value with its end; text is passed on as it comes.  Whether it ended."""
        is_text, said = parameters.is_text(key), list[str]()
        self.use(len((yield from self.ahead("\n"))))
        if is_text:
            self.call("", '"')
        while True:
            length, end = yield from self._extent(parameters)
            said.append(self.use(length))
            if is_text:
                self.call("", as_json(said.pop())[1:-1])
            if end >= 0:
                self.use(end)
                break
            if not (yield from self.more()):
                self.use(len(self.text))
                return False
        self.call("", '"' if is_text else as_json(parameters.typed(key, "".join(said))))
        return True

    def _extent(self, parameters: Parameters) -> Generator[None, None, tuple[int, int]]:
        """How much of the text is certain to be part of the value, and the length of its end.

        The second is -1 where the value goes on.
        """
        at = 0
        while (at := self.text.find("<", at)) >= 0:
            end = yield from self._end_at(at, parameters)
            before = at - (self.text[:at].endswith("\n"))
            if end >= 0:
                return before, end - before
            in_name = self.text.startswith(PARAMETER, at) and self.text[at:].isprintable()
            if self.is_begun(*self._ends, at=at) or (in_name and ">" not in self.text[at:]):
                return before, -1  # the answer was cut off within a tag
            at += 1
        # A line break may be the one before the end.
        return len(self.text) - self.text.endswith("\n"), -1

    def _end_at(self, at: int, parameters: Parameters) -> Generator[None, None, int]:
        """Behind the tag at `at`, if that ends the value and belongs to it; -1 if not."""
        tag = yield from self.ahead(*self._ends, at=at)
        if tag == PARAMETER:  # where an end was forgotten
            close = self.text.find(">", at)
            while close < 0 and "\n" not in self.text[at:]:
                if not (yield from self.more()):
                    break
                close = self.text.find(">", at)
            forgotten = self.text[at - 1 : at] == "\n" and close >= 0
            name = self.text[at + len(PARAMETER) : close]
            return at if forgotten and name in parameters else -1
        following = {
            PARAMETER_END: (PARAMETER, FUNCTION_END, self.tags[1]),
            FUNCTION_END: (FUNCTION, self.tags[1]),
            self.tags[1]: (self.tags[0],),
        }.get(tag)
        if following is None:
            return -1
        place = yield from self.place(at + len(tag))
        if (
            place >= 0
            and not (yield from self.ahead(*following, at=place))
            and not self.is_begun(*following, at=place)
        ):
            return -1
        return at + (len(tag) if tag == PARAMETER_END else 0)

"""What an answer's text consists of: reasoning, the answer itself, calls of tools."""

from dataclasses import dataclass, field

from hmt.server.errors import ApiError
from hmt.text import (
    CallReader,
    HarmonyReader,
    ReasoningReader,
    Tokenizer,
    ToolCall,
    ToolStyle,
)


@dataclass(slots=True)
class Said:
    """What became known with some text."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


@dataclass(slots=True)
class AnswerReader:
    """Reads one answer as it comes: by its channels where it has some."""

    channels: HarmonyReader | None = None
    reasoning: ReasoningReader | None = None
    calls: CallReader | None = None
    several: bool = True
    _called: bool = False

    def read(self, text: str, *, last: bool) -> Said:
        """What `text` adds; all that was held back with the last."""
        said = Said(text=text)
        if self.channels is not None:
            said = Said(*self.channels.push(text))
            if last:
                reasoning, rest, calls = self.channels.flush()
                said = Said(said.reasoning + reasoning, said.text + rest, said.calls + calls)
        if self.reasoning is not None:
            said.reasoning, said.text = self.reasoning.push(text)
            if last:
                reasoning, rest = self.reasoning.flush()
                said.reasoning, said.text = said.reasoning + reasoning, said.text + rest
        if self.calls is not None:
            said.text, said.calls = self.calls.push(said.text)
            if last:
                rest, calls = self.calls.flush()
                said.text, said.calls = said.text + rest, said.calls + calls
        if self._called:
            return Said()
        if said.calls and not self.several:
            self._called, said.calls = True, said.calls[:1]
        return said


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one prompt are read.

    style    of calls of tools, and `names` those that may be called; None: none may
    formed   whether answers are held to a form: then they have no room for reasoning, but for
             that of models with channels, which are part of it
    several  whether one answer may have several calls; if not, it ends with the first
    """

    tokenizer: Tokenizer
    prompt: list[int]
    style: ToolStyle | None
    names: list[str]
    formed: bool
    several: bool = True

    def id_of(self, call: ToolCall) -> str:
        """What a call is known by: what the model called it, or a new one."""
        assert self.style is not None
        length = self.style.id_length
        if call.id is not None and length in (None, len(call.id)):
            return call.id
        return self.style.new_id()

    def reader(self) -> AnswerReader:
        """For one answer."""
        channels = self.tokenizer.channels(self.prompt, self.names)
        if channels is not None:
            return AnswerReader(channels, several=self.several)
        reasoning = None if self.formed else self.tokenizer.reasoning(self.prompt)
        calls = None if self.style is None else self.style.reader(self.names)
        return AnswerReader(None, reasoning, calls, self.several)


def style_of(tokenizer: Tokenizer) -> ToolStyle:
    """How calls are written.  Raises ApiError where the model has no place for tools."""
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

"""What clients may ask for in Anthropic's words; checked as strictly as OpenAI's."""

from typing import Annotated, Any, Literal

from pydantic import Field

from hmt.contracts.request import Sampling
from hmt.server.openai.schemas import MAX_STOPS, Stop, Strict


class TextBlock(Strict):
    """A piece of text.  `cache_control` is taken and left alone: --prefix-cache decides."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: None = None


Text = str | Annotated[list[TextBlock], Field(min_length=1)]


class Turn(Strict):
    """One message."""

    role: Literal["user", "assistant"]
    content: Text


class Metadata(Strict):
    """Makes no difference here."""

    user_id: str | None = None


class Counted(Strict):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Text | None = None

    @property
    def chat(self) -> list[dict[str, str]]:
        """As chat templates take it."""
        system = [] if self.system is None else [{"role": "system", "content": plain(self.system)}]
        turns = [{"role": turn.role, "content": plain(turn.content)} for turn in self.messages]
        return system + turns


class MessagesBody(Counted):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    metadata: Metadata | None = None
    cache_control: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def sampling(self) -> Sampling:
        """The same for the engine."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
        )


def plain(text: str | list[TextBlock]) -> str:
    """All of it."""
    return text if isinstance(text, str) else "".join(block.text for block in text)

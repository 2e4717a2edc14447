"""The next answer of a chat, begun in the same way whichever API's words asked for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.types import Receive

from hmt.server.generation import Generation
from hmt.server.images import RemoteImage
from hmt.server.openai.output_parser import OutputParser, form_of_calls, style_of
from hmt.server.service import ApiRequest, Service
from hmt.server.thinking import Thinking


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """What an answer is given to.

    messages   as chat templates take them; `param` is the parameter that had them
    tools      that may be called, in OpenAI's form; `forced` those of which one must be
    images     of the messages, in order; videos likewise
    variables  that the template may read
    goes_on    whether the answer continues the last message
    several    whether one answer may have several calls
    """

    messages: Sequence[dict[str, Any]]
    param: str = "messages"
    tools: list[dict[str, Any]] = field(default_factory=list)
    forced: list[dict[str, Any]] = field(default_factory=list)
    images: Sequence[bytes | RemoteImage] = ()
    videos: Sequence[bytes | tuple[bytes, ...]] = ()
    thought: Thinking = field(default_factory=Thinking)
    variables: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    several: bool = True


async def begin_chat(
    service: Service, asked: ApiRequest, turn: ChatTurn, receive: Receive
) -> tuple[Generation, OutputParser]:
    """Begin the answers that `asked` wants, and how they are read.

    Raises ApiError; ClientGone once the client goes, as `receive` tells.
    """
    tokenizer = service.model.tokenizer
    style = style_of(tokenizer) if turn.tools else None
    images = await service.files_of(turn.images, receive)
    asked = replace(
        asked, reasoning_tokens=turn.thought.limit, images=images, videos=tuple(turn.videos)
    )
    bare = asked.grammar is not None and not turn.forced
    if style is not None and turn.forced:
        form = form_of_calls(style, turn.forced, tokenizer)
        asked = replace(asked, grammar=form, formed="tools")
    prompts: list[list[int]] = []

    def encode() -> list[list[int]]:
        service.model.check_images(len(images))
        service.model.check_videos(len(turn.videos))
        prompts.append(
            tokenizer.chat_prompt(
                list(turn.messages),
                turn.tools or None,
                variables=turn.thought.variables | turn.variables,
                goes_on=turn.goes_on,
                formed=bare,
                most=service.max_positions,
            )
        )
        return prompts

    generation = await service.begin(asked, encode, 1, turn.param)
    formed = asked.grammar is not None
    reading = OutputParser(tokenizer, prompts[0], style, turn.tools, formed, several=turn.several)
    return generation, reading

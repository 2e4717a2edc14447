"""What has been said so far, and the request that carries it to the model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hmt.cli.options import SamplingOptions
from hmt.contracts.request import Request
from hmt.engine import LoadedModel
from hmt.models.vision import file_bytes, video_bytes
from hmt.text import HarmonyReader

_DEFAULT_ANSWER_TOKENS = 512


def file_of(image: Path) -> bytes:
    """An image's file.  Raises RequestError where it cannot be read, or is too large."""
    data = file_bytes(image)
    assert data is not None
    return data


def video_of(video: Path) -> bytes:
    """A video's file.  Raises as `file_of`."""
    return video_bytes(video)


class Conversation:
    """Turns lines into requests: through the chat template, or as text that goes on when `raw`.

    A checkpoint without a template is always raw.
    """

    def __init__(self, model: LoadedModel, options: SamplingOptions, *, raw: bool) -> None:
        self.model = model
        self._options = options
        self._raw = raw or not model.tokenizer.has_chat_template
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self._messages: list[dict[str, Any]] = []
        self._text = ""
        self._images: list[bytes] = []  # of all messages, as below
        self._videos: list[bytes] = []
        self._shown: list[tuple[str, bytes]] = []  # kinds and files of the next one

    def show(self, images: Iterable[bytes], videos: Iterable[bytes] = ()) -> None:
        """Let the next line be about these files, too.  Raises RequestError for a blind model."""
        for image in images:
            self.model.check_images(1)
            self._shown.append(("image", image))
        for video in videos:
            self.model.check_videos(1)
            self._shown.append(("video", video))

    def request(self, line: str) -> Request:
        """The request for an answer to `line`, after all that was said before.

        Where the user set no limit, the answer may take what the context leaves.
        """
        tokens = self._tokens(line)
        limit = self._options.max_new_tokens
        seen = self._images or self._videos or self._shown
        if limit is None and not seen:  # these have tokens besides
            spec, plan = self.model.prepared.model.spec, self.model.plan
            room = min(plan.kv_tokens, spec.max_context) - len(tokens)
            limit = max(1, min(_DEFAULT_ANSWER_TOKENS, room))
        return Request(
            input=tokens,
            max_new_tokens=limit,
            sampling=self._options.sampling(),
            stop=tuple(self._options.stop or ()),
            images=(*self._images, *self._next("image")),
            videos=(*self._videos, *self._next("video")),
        )

    def reader(self, line: str) -> HarmonyReader | None:
        """What parts an answer from its reasoning; None where it is shown as it comes."""
        return None if self._raw else self.model.tokenizer.channels(self._tokens(line), ())

    def remember(self, line: str, answer: str) -> None:
        """Add a turn."""
        self._text += line + answer
        self._messages += [
            self._said(line),
            {"role": "assistant", "content": answer},
        ]
        self._images += self._next("image")
        self._videos += self._next("video")
        self._shown = []

    def _next(self, kind: str) -> list[bytes]:
        return [data for shown, data in self._shown if shown == kind]

    def _said(self, line: str) -> dict[str, Any]:
        shown = [{"type": kind} for kind, _ in self._shown]
        content = [*shown, {"type": "text", "text": line}] if shown else line
        return {"role": "user", "content": content}

    def _tokens(self, line: str) -> list[int]:
        tokenizer = self.model.tokenizer
        if self._raw:
            return tokenizer.encode(self._text + line)
        return tokenizer.chat_prompt([*self._messages, self._said(line)])

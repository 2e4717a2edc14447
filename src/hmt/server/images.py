"""Images and videos that come in a request: data URLs and base64; other hosts' images stay URLs."""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hmt.server.fields import wrong

# RFC 2397, of which clients write this much.
_DATA_URL: Final = re.compile(r"data:(?P<type>[\w.+/-]*)(;[\w=.-]+)*;base64,", re.ASCII)
_TYPES: Final = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "")
_FRAMES: Final = "video/jpeg"  # files of frames, with commas between, as vLLM's clients write them


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image of another host, which `image_fetching` may fetch.  url: of http or https."""

    url: str


def file_of_url(url: str, param: str) -> bytes | RemoteImage:
    """The file in a data URL.  Raises an error of pydantic's that names `param`."""
    found = _DATA_URL.match(url)
    if found is None:
        if url.lower().startswith(("http://", "https://")):
            return RemoteImage(url)
        raise wrong(param, "it must be a data URL: data:image/png;base64,...")
    return file_of_base64(url[found.end() :], found["type"], param)


def video_of_url(url: str, param: str) -> bytes | tuple[bytes, ...]:
    """The file in a data URL, or those of its frames.  Raises an error of pydantic's."""
    found = _DATA_URL.match(url)
    if found is None:
        raise wrong(param, "it must be a data URL: data:video/mp4;base64,...")
    kind, data = found["type"].lower(), url[found.end() :]
    if not (kind.startswith(("video/", "image/")) or kind == ""):
        raise wrong(param, "videos are read in GIF, WebP, PNG, MP4, QuickTime, WebM and Matroska")
    if kind == _FRAMES:
        return tuple(_decoded(frame, param) for frame in data.split(","))
    return _decoded(data, param)


def file_of_base64(text: str, media_type: str, param: str) -> bytes:
    """The file in base64.  Raises an error of pydantic's that names `param`."""
    if media_type.lower() not in _TYPES:
        raise wrong(param, "images are read in PNG, JPEG, WebP and GIF")
    return _decoded(text, param)


def _decoded(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise wrong(param, "it is no base64") from None


def content_of(
    parts: Sequence[str | None], shown: Sequence[str] = ()
) -> "str | list[dict[str, Any]]":
    """A message's content as chat templates take it, of strings, and None for what is shown.

    shown   what those are, in order: "image" or "video"; (): all are images
    """
    if None not in parts:
        return "".join(part or "" for part in parts)
    kinds = iter(shown or ["image"] * len(parts))
    return [
        {"type": next(kinds)} if part is None else {"type": "text", "text": part} for part in parts
    ]

"""Images that come in a request: data URLs and base64; those of other hosts stay URLs."""

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any, Final

from hmt.server.fields import wrong

# RFC 2397, of which clients write this much.
_DATA_URL: Final = re.compile(r"data:(?P<type>[\w.+/-]*)(;[\w=.-]+)*;base64,", re.ASCII)
_TYPES: Final = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "")


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


def file_of_base64(text: str, media_type: str, param: str) -> bytes:
    """The file in base64.  Raises an error of pydantic's that names `param`."""
    if media_type.lower() not in _TYPES:
        raise wrong(param, "images are read in PNG, JPEG, WebP and GIF")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise wrong(param, "it is no base64") from None


def content_of(parts: list[str | None]) -> "str | list[dict[str, Any]]":
    """A message's content as chat templates take it, of strings, and None for each image."""
    if None not in parts:
        return "".join(part or "" for part in parts)
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]

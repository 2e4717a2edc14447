"""HTTP by hand, for clients that do what no library would."""

import asyncio
import json
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx2


def client(url: str) -> httpx2.AsyncClient:
    """A well-behaved one.

    It does not use a connection again that the server, after 5 s, may just be closing.
    """
    return httpx2.AsyncClient(
        base_url=url, timeout=120, trust_env=False, limits=httpx2.Limits(keepalive_expiry=2)
    )


def request(path: str, body: Any, *, length: int | None = None) -> bytes:
    """A POST request; `length` is said of the body instead of the truth."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content) if length is None else length}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def connect(
    url: str, limit: int = 65536
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the server at `url`, which takes in `limit` bytes before it is read."""
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port, limit=limit)


async def close(writer: asyncio.StreamWriter, *, abort: bool = False) -> None:
    """End a connection, or cut it off."""
    if abort:
        writer.transport.abort()
        return
    writer.close()
    with suppress(OSError):  # the other side may be faster
        await writer.wait_closed()


def body_of(received: bytes) -> tuple[int, bytes]:
    """Status and body of a response with Connection: close; 0 where there is none."""
    head, _, rest = received.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2:
        return 0, b""
    if b"transfer-encoding: chunked" in head.lower():
        parts = bytearray()
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            count = int(size or b"0", 16)
            parts += rest[:count]
            rest = rest[count + 2 :]
        rest = bytes(parts)
    return int(words[1]), rest


def text_of(events: bytes) -> tuple[str, bool]:
    """What a stream of a completion said, and whether it ended as it should."""
    response = httpx2.Response(
        200,
        headers={"Content-Type": "text/event-stream"},
        content=events,
        request=httpx2.Request("POST", "http://localhost"),
    )
    data = [event.data for event in httpx2.EventSource(response) if event.data]
    said = [json.loads(one) for one in data if one != "[DONE]"]
    choices = [choice for one in said for choice in one.get("choices", ())]
    return "".join(choice["text"] for choice in choices), data[-1:] == ["[DONE]"]

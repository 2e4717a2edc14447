"""The server that is attacked: how it is reached, and what an answer looks like."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Failure(Exception):
    """The server did not bear an attack.  Raised instead of `assert`, which -O leaves out."""


def require(fact: bool, message: str) -> None:
    """Raise Failure with `message` unless `fact`."""
    if not fact:
        raise Failure(message)


@dataclass
class Answer:
    """Of the server: status 0 where the connection broke."""

    status: int
    text: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.text)
        except ValueError:
            return {}


@dataclass
class Target:
    """Where the server is.

    pid     of its process, where that is known and on this machine
    keys    two of different clients; None for servers without
    """

    url: str
    pid: int | None = None
    keys: tuple[str, str] | None = None
    model: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self.host, self.port = parts.hostname or "", parts.port or 80
        if not self.model:
            self.model = self.get("/v1/models").json["data"][0]["id"]

    def ask(
        self, method: str, path: str, body: Any = None, *, key: int | None = 0,
        timeout_s: float = 60, **headers: str,
    ) -> Answer:  # fmt: skip
        """One request on a new connection.  `body`: bytes as they are, others as JSON."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.keys is not None and key is not None:
            named.setdefault("authorization", f"Bearer {self.keys[key]}")
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        if content is not None:
            named.setdefault("content-type", "application/json")
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, content, named)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            return Answer(response.status, text, {n.lower(): v for n, v in response.getheaders()})
        except TimeoutError:
            raise Failure(f"{method} {path} had no answer after {timeout_s} s") from None
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, repr(error))
        finally:
            connection.close()

    def get(self, path: str, **others: Any) -> Answer:
        return self.ask("GET", path, **others)

    def post(self, path: str, body: Any, **others: Any) -> Answer:
        return self.ask("POST", path, body, **others)

    def chat(self, text: str = "What is 12 + 30?", **others: Any) -> dict[str, Any]:
        """The body of a chat that is answered greedily and is short."""
        said = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16}
        return {"model": self.model, **said, **others}

    @contextmanager
    def raw(self, sent: bytes = b"", receive_buffer: int | None = None) -> Iterator[socket.socket]:
        """A connection that has sent so much."""
        made = socket.socket(socket.AF_INET)
        with made:
            if receive_buffer is not None:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            made.settimeout(20)
            made.connect((self.host, self.port))
            made.sendall(sent)
            yield made

    def head(self, path: str, *lines: str, method: str = "POST") -> bytes:
        """The header of a request, with a key, as bytes; without the empty line at its end."""
        key = [] if self.keys is None else [f"Authorization: Bearer {self.keys[0]}"]
        own = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        return "\r\n".join([*own, *key, *lines, ""]).encode()

    def request(self, path: str, body: Any) -> bytes:
        """A whole request as bytes."""
        content = json.dumps(body).encode()
        return self.head(path, f"Content-Length: {len(content)}") + b"\r\n" + content

    def status_of(self, sent: bytes) -> int:
        """The status of what is answered to these bytes; 0 where nothing is."""
        with self.raw(sent) as connection:
            try:
                line = connection.recv(1 << 16).split(b" ", 2)
            except (TimeoutError, OSError):
                return 0
            return int(line[1]) if len(line) > 2 else 0


def eventually(fact: Callable[[], bool], seconds: float, message: str) -> None:
    """Wait until `fact`.  Raises Failure after so long."""
    end = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > end:
            raise Failure(message)
        time.sleep(0.1)


def refused(answer: Answer, what: str, statuses: tuple[int, ...] = (400, 413, 422)) -> None:
    """Raise Failure unless the client was told that its request is wrong."""
    require(answer.status in statuses, f"{what}: {answer.status} {answer.text[:300]}")


def borne(answer: Answer, what: str) -> None:
    """Raise Failure where the server is to blame: 500, or a connection without an answer."""
    fine = answer.status in (200, 400, 404, 413, 422, 429, 503, 504)
    require(fine, f"{what}: {answer.status} {answer.text[:300]}")

"""A server behind the router: how it is reached, whether it runs, and what it is busy with."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx2

_CONNECT_S: Final = 5.0
# The router's client, not the router, says how long an answer may take.
_TIMES: Final = httpx2.Timeout(None, connect=_CONNECT_S)
_LIMITS: Final = httpx2.Limits(max_connections=None, max_keepalive_connections=32)


class Replica:
    """One of several servers of the same model, each with its own engine.

    number    from 0; the ids of responses that it stores begin with it
    failure   why it takes no more requests; "" while it does.  Another thread may set it
    running   requests that it answers now
    taken     requests that it was given by now
    """

    def __init__(self, number: int, transport: httpx2.AsyncBaseTransport) -> None:
        self.number = number
        self.failure = ""
        self.running = self.taken = 0
        self.client = httpx2.AsyncClient(
            transport=transport, base_url="http://replica", timeout=_TIMES, trust_env=False
        )

    @classmethod
    def at(cls, number: int, path: Path) -> "Replica":
        """One that listens at the socket in the file system that `path` names."""
        return cls(number, httpx2.AsyncHTTPTransport(uds=str(path), limits=_LIMITS))

    @contextmanager
    def busy(self) -> Iterator[None]:
        """In the body, a request is one of those that it answers."""
        self.running += 1
        self.taken += 1
        try:
            yield
        finally:
            self.running -= 1

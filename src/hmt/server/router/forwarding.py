"""A request as a replica answers it: sent on whole, its answer passed back as it comes.

Nothing of an answer is passed back before its first bytes have come.  Where a replica ends before
that, another one is asked: what it had computed is lost, and the client sees nothing of it.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from hmt.server.errors import ApiError
from hmt.server.router.placement import Reason
from hmt.server.router.replicas import Replica
from hmt.server.stream import ClientGone, unless_gone

Choose = Callable[[set[Replica]], tuple[Replica, Reason] | None]
_HOP: Final = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
))  # fmt: skip  # of one connection (RFC 9110, section 7.6.1)
_OWN: Final = _HOP | {b"content-length", b"x-request-id", b"expect"}  # set here
_EVENTS: Final = ("text/event-stream", "application/x-ndjson")


@dataclass(slots=True)
class Counts:
    """What a router has done.

    chosen    requests, by the number of the replica and the reason
    retried   requests that were sent to another replica
    cut       answers that a replica's end has cut off
    """

    chosen: dict[tuple[int, Reason], int] = field(default_factory=dict)
    retried: int = 0
    cut: int = 0


class Forwarded(Response):
    """The response of a replica, or of another where that one ends before it has said anything."""

    def __init__(self, scope: Scope, body: bytes, choose: Choose, counts: Counts) -> None:
        """`choose` gives a replica besides those that it is told of; None: there is none left."""
        super().__init__()
        self._body, self._choose, self._counts = body, choose, counts
        self._began = self._is_stream = False
        state = scope["state"]
        own = (b"x-request-id", str(state["request_id"]).encode())
        headers = [pair for pair in scope["headers"] if pair[0].lower() not in _OWN]
        self._sent_headers = [*headers, own]
        path, query = scope["raw_path"], scope["query_string"]
        self._target = (path + b"?" + query if query else path).decode("ascii")
        self._cut: Callable[[], None] = state.get("cut", lambda: None)

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone, OSError):
            await unless_gone(receive, self._forward(scope, send))

    async def _forward(self, scope: Scope, send: Send) -> None:
        failed: set[Replica] = set()
        while (found := self._choose(failed)) is not None:
            replica, reason = found
            self._counts.chosen[replica.number, reason] = (
                self._counts.chosen.get((replica.number, reason), 0) + 1
            )
            try:
                with replica.busy():
                    await self._through(scope["method"], replica, send)
                return
            except httpx2.TransportError:
                if self._began:
                    self._counts.cut += 1
                    await self._broken_off(scope["path"], replica, send)
                    return
                failed.add(replica)
                self._counts.retried += 1
        error = ApiError(
            503,
            f"none of the servers behind this one takes requests ({len(failed)} ended while they "
            "had this one): try again, or start the server again",
            kind="server_error",
            code="no_replica",
            headers={"Retry-After": "5"},
        )
        await error.response(scope["path"])(scope, _nothing, send)

    async def _through(self, method: str, replica: Replica, send: Send) -> None:
        """Raises TransportError where the replica, or the way to it, fails."""
        request = replica.client.build_request(
            method, self._target, headers=self._sent_headers, content=self._body
        )
        answer = await replica.client.send(request, stream=True)
        try:
            headers = [pair for pair in answer.headers.raw if pair[0].lower() not in _HOP]
            start = {
                "type": "http.response.start", "status": answer.status_code, "headers": headers,
            }  # fmt: skip
            kind = answer.headers.get("content-type", "").partition(";")[0]
            self._is_stream = kind in _EVENTS
            async for part in answer.aiter_raw():
                if not self._began:
                    await send(start)
                    self._began = True
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if not self._began:
                await send(start)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await answer.aclose()

    async def _broken_off(self, path: str, replica: Replica, send: Send) -> None:
        """Say so in a stream's own way; of an answer that came whole nothing can be said."""
        if not self._is_stream:
            self._cut()
            return
        error = ApiError(
            502,
            f"the server that wrote this answer (replica {replica.number}) has ended: ask again",
            kind="server_error",
            code="replica_ended",
        )
        told = _last_words(path, error)
        await send({"type": "http.response.body", "body": told, "more_body": False})


def _last_words(path: str, error: ApiError) -> bytes:
    """An error in the middle of a stream of events, as the clients of `path` read it."""
    if path.startswith("/api/"):
        return f"\n{json.dumps(error.ollama_body)}\n".encode()
    body: Mapping[str, Any] = error.body
    name = ""
    if path.startswith("/v1/messages"):
        name, body = "error", error.anthropic_body
    elif path.startswith("/v1/responses"):
        name = "error"
        body = {"type": "error", "code": error.code, "message": error.message, "param": None}
    event = f"event: {name}\n" if name else ""
    return f"\n\n{event}data: {json.dumps(body)}\n\n".encode()  # the last one may be half there


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}

"""What every request passes first: host, key, size and kind of its body."""

import asyncio
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hmt.base.units import KIB, MIB
from hmt.server.client import CLIENT, Client
from hmt.server.config import ServerConfig
from hmt.server.errors import ApiError
from hmt.server.json_shape import check_shape
from hmt.server.page.documents import DOCUMENTS

# For those who watch whether it lives, and the page that asks people for their key.
OPEN_PATHS: Final = frozenset(("/health", "/ready", *DOCUMENTS))

# What bodies may take together, those of answers under way among them; small ones always may come.
_BODIES_BYTES: Final = 24 * MIB
_SMALL_BODY: Final = 32 * KIB

_VERSIONS: Final = ("1.0", "1.1", "2", "3")  # the last two by a proxy or another ASGI server

_LOCAL_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Guard:
    """ASGI middleware in front of an application.

    Refuses what may not pass, and gives on the whole body at once.  Sets `scope["state"]`'s
    "owner" (whose key it was; "" without keys) and "request_id", which every response repeats in
    x-request-id.  Does not look at websockets; there are none.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, seen: Callable[[Scope, int, float], None]
    ) -> None:
        """`seen(scope, status, seconds)` is told of every response that has ended."""
        self._app = app
        self._config = config
        self._seen = seen
        self._bodies_bytes = 0  # held at the moment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        scope["state"]["replica"] = self._config.replica
        begin, status = time.perf_counter(), 499  # the client went before there was an answer

        async def identified(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                told = MutableHeaders(scope=message)
                told["x-request-id"] = request_id
                if precision := scope["state"].get("precision"):
                    told["x-hmt-precision"] = precision
            await send(message)

        held = _Held()
        try:
            _check_protocol(scope, headers)
            self._check_host(headers)
            scope["state"]["owner"] = self._owner(scope, headers)
            body = await self._body(scope, headers, receive, held)
        except ApiError as error:
            scope["state"]["code"] = error.code
            await error.response(scope["path"])(scope, receive, identified)
        else:
            state = scope["state"]
            CLIENT.set(
                Client(
                    held.bytes,
                    state.get("cut", lambda: None),
                    state,
                    lambda more: self._hold(held, more),
                )
            )
            await self._app(scope, body, identified)
        finally:
            self._bodies_bytes -= held.bytes
            self._seen(scope, status, time.perf_counter() - begin)

    def _check_host(self, headers: Headers) -> None:
        """Refuse pages that reach a local server under a name of their own (DNS rebinding)."""
        config, host = self._config, headers.get("host", "")
        if config.is_local and not config.keys and not _LOCAL_HOST.fullmatch(host):
            raise ApiError(
                403,
                "this server is for its own machine: reach it as localhost or 127.0.0.1, or give "
                "it an API key",
                code="host_not_allowed",
            )

    def _owner(self, scope: Scope, headers: Headers) -> str:
        keys = self._config.keys
        if not keys or scope["path"] in OPEN_PATHS or _is_preflight(scope, headers):
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        wants = {"WWW-Authenticate": "Bearer"}
        if not key:
            raise ApiError(
                401,
                "no API key was given: send it as 'Authorization: Bearer KEY'",
                code="missing_api_key",
                headers=wants,
            )
        owner = keys.owner(key)
        if owner is None:
            message = "the API key is not one of this server's"
            raise ApiError(401, message, code="invalid_api_key", headers=wants)
        return owner

    async def _body(
        self, scope: Scope, headers: Headers, receive: Receive, held: "_Held"
    ) -> Receive:
        """What gives the application the whole body, and then whatever comes."""
        most = self._config.max_body_bytes
        if scope["method"] in ("GET", "HEAD", "OPTIONS", "DELETE"):
            return receive
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                415,
                f"the body's content-type is {kind[:100]!r}; send application/json",
                code="unsupported_media_type",
            )
        stated = headers.get("content-length", "0")
        if not stated.isdecimal() or int(stated[:20]) > most:
            raise _too_large(most)
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    came = message.get("body", b"")
                    more = message.get("more_body", False)
                    self._hold(held, len(came))
                    body += came
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {self._config.body_timeout_s:g} s",
                code="body_timeout",
                headers={"Connection": "close"},
            ) from None
        check_shape(body)
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        body.clear()

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay

    def _hold(self, held: "_Held", more: int) -> None:
        """Count so many bytes more of one body.  Raises ApiError where it, or all have too many."""
        if held.bytes + more > self._config.max_body_bytes:
            raise _too_large(self._config.max_body_bytes)
        most = max(_BODIES_BYTES, 2 * self._config.max_body_bytes)
        if held.bytes + more > _SMALL_BODY and self._bodies_bytes + more > most:
            raise ApiError(
                503,
                f"the bodies of requests under way have {self._bodies_bytes} bytes, and together "
                f"they may have {most}: try again soon",
                kind="server_error",
                code="overloaded",
                headers={"Retry-After": "2"},
            )
        held.bytes += more
        self._bodies_bytes += more


@dataclass(slots=True)
class _Held:
    """Bytes of one request's body that are in memory."""

    bytes: int = 0


def _check_protocol(scope: Scope, headers: Headers) -> None:
    """Refuse versions that are not known.

    And a body with two lengths, of which a proxy in between may have believed the other.
    """
    if scope["http_version"] not in _VERSIONS:
        raise ApiError(
            505,
            f"the request is HTTP/{scope['http_version']}; this server speaks 1.0 and 1.1",
            code="http_version",
            headers={"Connection": "close"},
        )
    if "transfer-encoding" in headers and "content-length" in headers:
        raise ApiError(
            400,
            "the request has both Transfer-Encoding and Content-Length: send one of them",
            code="ambiguous_length",
            headers={"Connection": "close"},
        )


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    """Browsers send these without a key."""
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body, with images that are fetched for it, is larger than the {most} bytes that this "
        "server takes",
        code="body_too_large",
    )

"""Responses that end when the client goes: streams of events, and answers given at once."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from hmt.base.log import logger
from hmt.server.errors import ApiError

T = TypeVar("T")

_QUIET_S: Final = 15.0  # after which a comment tells client and proxies that all is well
_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """The client has closed the connection."""


class EmptyResponse(Response):
    """For clients that are gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI: nothing is sent."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`.  Raises ClientGone, and cancels it, as soon as the client goes."""
    working: asyncio.Task[T] = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _end(watching)
        await _end(working)


@dataclass(frozen=True, slots=True)
class StreamDialect:
    """How a stream is written, as whole events.

    event       of an event
    error       of an error that comes after the stream has begun
    keep_alive  of nothing, so that everybody knows that all is well
    done        what comes last
    media_type  of the response
    """

    event: Callable[[Any], str]
    error: Callable[[ApiError], str]
    keep_alive: str
    done: str = ""
    media_type: str = "text/event-stream"


def _line(event: Any) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"


OPENAI: Final = StreamDialect(
    event=_line,
    error=lambda error: _line(error.body),
    keep_alive=": still at it\n\n",
    done="data: [DONE]\n\n",
)


class EventStream(Response):
    """A response of events, each a JSON object, as server-sent events or by lines.

    Leaves `context` when all is sent and when the client goes, at once.  An ApiError that comes
    while events are made is told as an event of its own.
    """

    def __init__(
        self,
        context: AbstractAsyncContextManager[Any],
        events: AsyncIterator[Any],
        dialect: StreamDialect = OPENAI,
        quiet_s: float = _QUIET_S,
    ) -> None:
        super().__init__(media_type=dialect.media_type, headers=_HEADERS)
        del self.headers["content-length"]
        self._context = context
        self._events = events
        self._dialect = dialect
        self._quiet_s = quiet_s
        self._wrote = False

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._context:
            with suppress(ClientGone, OSError):
                await unless_gone(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        headers = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **headers})
        beating = asyncio.create_task(self._keep_alive(send))
        try:
            async with aclosing(self._lines()) as lines:
                async for line in lines:
                    self._wrote = True
                    await send(_body(line))
        finally:
            await _end(beating)
        await send(_body(self._dialect.done, more=False))

    async def _lines(self) -> AsyncGenerator[str, None]:
        try:
            async for event in self._events:
                yield self._dialect.event(event)
        except ApiError as error:
            yield self._dialect.error(error)
        except Exception as error:
            logger.error("a stream failed for a reason that is not known", exc_info=error)
            yield self._dialect.error(ApiError.internal())

    async def _keep_alive(self, send: Send) -> None:
        """Write a comment whenever nothing else was written for a while."""
        while True:
            await asyncio.sleep(self._quiet_s)
            if not self._wrote:
                await send(_body(self._dialect.keep_alive))
            self._wrote = False


def _body(text: str, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: "asyncio.Task[Any]") -> None:
    """Cancel `task`, if it runs, and wait for its end."""
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task

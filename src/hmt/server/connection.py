"""One connection: HTTP by uvicorn and h11, with a time for everything that a client may delay."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from hmt.server.errors import ApiError

_LINGER_S: Final = 2.0  # for what a client still sends of a request that has been answered
_WRITE_LOOKS: Final = 4  # in the time that a client has to read, at whether it has


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a connection waits for its client, in seconds.

    header_s   for a whole header, from when the connection, or its first byte, came
    write_s    for the client to read anything of what waits for it
    """

    header_s: float
    write_s: float


class _Timer:
    """Calls something once, later, unless it is stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        """Whether it will call."""
        return self._handle is not None

    def start(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` after so long, and nothing that was to be called before."""
        self.stop()

        def ring() -> None:
            self._handle = None
            call()

        self._handle = self._loop.call_later(seconds, ring)

    def stop(self) -> None:
        """Call nothing."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """uvicorn's, which ends when its client keeps it waiting.

    uvicorn has a time limit only between two requests, and a byte ends that: a client that sends
    no header, half of one, or nothing but a part of a body that no handler reads, would hold its
    connection for ever, and so would one that does not read.
    """

    def __init__(
        self,
        patience: Patience,
        gone: Callable[["Connection"], None],
        *arguments: Any,
        **named: Any,
    ) -> None:
        """`gone` is told when the connection has ended; the others are uvicorn's."""
        super().__init__(*arguments, **named)
        self.app_state = {"cut": self.cut}  # of every request's state, for `hmt.server.client`
        self._patience = patience
        self._tell_gone = gone
        self._header = _Timer(self.loop)  # runs until a header is whole
        self._linger = _Timer(self.loop)  # runs while an answered body still comes
        self._write = _Timer(self.loop)  # runs while what was written waits
        self._unread = 0  # bytes that waited for the client at the last look
        self.quiet_since = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether a whole request waits for its answer."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_header()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._header.stop()
        self._linger.stop()
        self._write.stop()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._tell_gone(self)

    @override
    def data_received(self, data: bytes) -> None:
        self.quiet_since = time.monotonic()
        super().data_received(data)
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        if state is not h11.SEND_BODY:
            self._linger.stop()
        if state is h11.IDLE:
            self._expect_header()
        else:
            self._header.stop()

    @override
    def on_response_complete(self) -> None:
        self.quiet_since = time.monotonic()
        comes = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        self._watch_reading()
        if comes and not self.transport.is_closing():
            # What is still sent is thrown away for a moment, so that the client can read the
            # answer: closing a connection with unread data resets it.
            self._unset_keepalive_if_required()
            self._linger.start(_LINGER_S, self.cut)

    def send_400_response(self, msg: str) -> None:
        """Tell in JSON, like all errors, that this is not HTTP.  Logs none of its bytes."""
        error = ApiError(400, "the request is not HTTP/1.1 that can be read", code="invalid_http")
        content = error.response("").body
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        try:
            for event in (response, h11.Data(data=bytes(content)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # in the middle of an answer
            self.cut()
        else:
            self.transport.close()
            self._watch_reading()

    def pause_writing(self) -> None:
        """See asyncio: more waits for the client than shall."""
        super().pause_writing()
        self._watch_reading()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._write.stop()
        if self.cycle is not None and self.cycle.response_complete:
            self._watch_reading()

    def shutdown(self) -> None:
        """See uvicorn.  Half of a request is not waited for."""
        if self.cycle is None or self.cycle.response_complete or self.busy:
            super().shutdown()
            self._watch_reading()
        else:
            self.cut()

    def cut(self) -> None:
        """End at once, whatever is under way."""
        self.transport.abort()

    def _expect_header(self) -> None:
        """A header must be whole in time; what comes of it meanwhile gives no more."""
        if not self._header.runs:
            self._header.start(self._patience.header_s, self.cut)

    def _watch_reading(self) -> None:
        """Cut the connection unless the client reads, until nothing waits for it."""
        if not self._write.runs:
            self._unread = self.transport.get_write_buffer_size()
            self._look_later(_WRITE_LOOKS)

    def _look_later(self, looks: int) -> None:
        """Look so many times more at whether the client has read anything."""
        if self._unread:
            wait = self._patience.write_s / _WRITE_LOOKS
            self._write.start(wait, partial(self._look, looks - 1))

    def _look(self, looks: int) -> None:
        before, self._unread = self._unread, self.transport.get_write_buffer_size()
        if looks or self._unread < before:
            self._look_later(_WRITE_LOOKS if self._unread < before else looks)
        else:
            self.cut()

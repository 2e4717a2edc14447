"""Who is let in: connections are accepted one by one, and bounded in number."""

import asyncio
import contextlib
import errno
import json
import os
import socket
from collections import Counter
from collections.abc import Callable
from typing import Final

from hmt.base.errors import os_reason
from hmt.base.log import logger
from hmt.server.connection import Connection
from hmt.server.errors import ApiError

_PAUSE_S: Final = 0.5  # after which accepting is tried again, where descriptors were missing
_AT_ONCE: Final = 64  # connections that are accepted before others have their turn
_DESCRIPTORS: Final = 64  # that the rest of the process may need: files of models, devices
_SCARCE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SERVER_FULL: Final = ApiError(
    503, "all connections of this server are in use: try again soon", kind="server_error",
    code="too_many_connections",
)  # fmt: skip
_REFUSAL_BODY: Final = json.dumps(_SERVER_FULL.body).encode()
_REFUSAL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
    % (len(_REFUSAL_BODY), _REFUSAL_BODY)
)


def most_connections(wanted: int) -> int:
    """So many connections as there are descriptors for, `wanted` at most.

    Raises the limit of descriptors as far as the system lets it.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd"))
    needed = wanted + used + _DESCRIPTORS
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < needed:
        with contextlib.suppress(ValueError, OSError):
            most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(wanted, soft - used - _DESCRIPTORS))


class Listener:
    """Accepts connections on one socket.

    asyncio's own server tries again at once, as often as its backlog is long, when there are no
    descriptors, and logs each time.  Here it waits, and says so once.

    Where all connections are in use, one that waits for its client makes room for a new one: the
    one that has been quiet longest, of the address that has most.  So a client that only holds
    connections keeps no other client out.  Where all are at work, new ones are refused.
    """

    def __init__(
        self,
        bound: socket.socket,
        most: int,
        made: Callable[[Callable[[Connection], None]], Connection],
        backlog: int,
    ) -> None:
        """Listens.  `made` makes the protocol of a connection, which tells when it has ended."""
        self._socket, self._most, self._made = bound, most, made
        self._loop = asyncio.get_running_loop()
        self._open: dict[Connection, str] = {}  # by address
        self._pause: asyncio.TimerHandle | None = None
        self._told = False  # of missing descriptors
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._tasks: set[asyncio.Task[None]] = set()
        bound.setblocking(False)
        bound.listen(backlog)
        self._loop.add_reader(bound.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more.  Does nothing twice."""
        if self._pause is not None:
            self._pause.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    async def wait_closed(self) -> None:
        """See asyncio.Server: nothing is left to wait for."""

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._open) >= self._most and self._tasks:
                return  # those that were just let in can only give way once they are connected
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(error)
                return
            self._told = False
            accepted.setblocking(False)
            if len(self._open) >= self._most and not self._make_room():
                _refuse(accepted)
                continue
            self._admit(accepted, str(address[0]) if address else "")

    def _admit(self, accepted: socket.socket, address: str) -> None:
        connection = self._made(self._gone)
        self._open[connection] = address

        async def connect() -> None:
            try:
                await self._loop.connect_accepted_socket(lambda: connection, accepted)
            except OSError:
                self._gone(connection)
                accepted.close()

        task = self._loop.create_task(connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _gone(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def _make_room(self) -> bool:
        """End a connection that waits for its client; whether there was one."""
        held = Counter(self._open.values())
        waiting = [
            connection
            for connection in self._open
            if connection.transport is not None and not connection.busy
        ]
        if not waiting:
            return False
        leaving = max(waiting, key=lambda one: (held[self._open[one]], -one.quiet_since))
        self._gone(leaving)
        leaving.cut()
        return True

    def _rest(self, error: OSError) -> None:
        """Let the loop do other things for a while: accepting would fail again at once."""
        if error.errno not in _SCARCE:
            return
        if not self._told:
            logger.warning(
                "no connection can be accepted (%s) with %d open: raise the limit of open files "
                "(ulimit -n)", os_reason(error), len(self._open),
            )  # fmt: skip
        self._told = True
        if self._spare is not None:  # the client that waits first is told, not left to hang
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):
                _refuse(self._socket.accept()[0])
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        self._make_room()
        self._loop.remove_reader(self._socket.fileno())
        self._pause = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        self._loop.add_reader(self._socket.fileno(), self._accept)


def _refuse(accepted: socket.socket) -> None:
    """Say that there is no room, if that can be said without waiting, and close."""
    with contextlib.suppress(OSError), accepted:
        accepted.setblocking(False)
        accepted.send(_REFUSAL)
        accepted.shutdown(socket.SHUT_WR)

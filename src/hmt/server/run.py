"""A server process: a socket, uvicorn, and an orderly end."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, cast

import uvicorn
from fastapi import FastAPI
from typing_extensions import override

from hmt.base.errors import ConfigError
from hmt.engine import LoadedModel
from hmt.server.app import create_app
from hmt.server.config import ServerConfig
from hmt.server.connection import Connection, Patience
from hmt.server.listener import Listener, most_connections
from hmt.server.model_manager import LoadableModels

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_BACKLOG: Final = 512
_LEAVING_S: Final = 15  # for what ends after the answers: a step, files of the prefix cache


def bind(config: ServerConfig) -> socket.socket:
    """A socket at the server's address, which does not listen yet.  Raises ConfigError.

    Before a model is loaded, so that an address that is taken is told at once.
    """
    config.check()
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{config.host} port {config.port} cannot be listened on ({error}): choose others "
            "with --host and --port"
        ) from error
    return bound


def serve(
    model: LoadedModel,
    config: ServerConfig,
    bound: socket.socket,
    started: Callable[[str], None] = lambda address: None,
    others: LoadableModels | None = None,
) -> None:
    """Answer until SIGINT or SIGTERM; then answers under way have `shutdown_s` to end.

    `started(address)` is called when clients can connect.  Takes over the socket of `bind`.
    `others`: see create_app.

    From the first of these signals on they are the system's, which ends a process at once: so the
    second one needs no help of what computes meanwhile.  They stay so for the caller, who ends; and
    should its end take longer than the answers had time, the system ends it by SIGALRM.
    """
    serve_app(create_app(model, config, others), config, bound, started)


def serve_app(
    app: FastAPI,
    config: ServerConfig,
    bound: socket.socket,
    started: Callable[[str], None] = lambda address: None,
) -> None:
    """`serve` of an application."""
    server = _Server(config, app)
    server.when_started = lambda: started(_address(bound))
    with contextlib.closing(bound):
        server.run(sockets=[bound])


class _Server(uvicorn.Server):
    """uvicorn's, with HMT's own connections, start and shutdown."""

    when_started: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, config: ServerConfig, app: object) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                lifespan="off",
                log_level="error",
                access_log=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=config.idle_timeout_s,  # type: ignore[arg-type]
            )
        )
        self._own = config
        self._patience = Patience(config.header_timeout_s, config.write_timeout_s)

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        most = most_connections(self._own.max_connections)
        self.servers = [
            Listener(bound, most, self._connection, _BACKLOG)  # type: ignore[misc]
            for bound in sockets or ()
        ]
        self.started = True
        self.when_started()

    def _connection(self, gone: Callable[[Connection], None]) -> Connection:
        return Connection(self._patience, gone, self.config, self.server_state, {})

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and wait for answers; those that take too long are cut off."""
        for listener in self.servers:
            listener.close()
        connections, tasks = self.server_state.connections, self.server_state.tasks
        for connection in list(connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._own.shutdown_s):
                while connections or tasks:
                    await asyncio.sleep(0.02)
        for connection in list(connections):
            cast(Connection, connection).cut()  # its handler hears that the client is gone
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while tasks:
                    await asyncio.sleep(0.02)

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._end)
        yield

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.should_exit = True
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(round(self._own.shutdown_s) + _LEAVING_S)


def _address(bound: socket.socket) -> str:
    if bound.family == socket.AF_UNIX:
        return str(bound.getsockname())
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

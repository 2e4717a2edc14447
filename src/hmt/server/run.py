"""A server process: a socket, uvicorn, and an orderly end."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from hmt.base.errors import ConfigError
from hmt.engine import LoadedModel
from hmt.server.app import create_app
from hmt.server.config import ServerConfig
from hmt.server.shelf import Others


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
    others: Others | None = None,
) -> None:
    """Answer until SIGINT or SIGTERM; then answers under way have `shutdown_s` to end.

    `started(address)` is called when clients can connect.  Takes over the socket of `bind`.
    `others`: see create_app.
    """
    app = create_app(model, config, others)
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=config.max_connections,
            timeout_graceful_shutdown=max(1, round(config.shutdown_s)),
        )
    )
    server.when_started = lambda: started(_address(bound))
    with contextlib.closing(bound), _orderly_end():
        server.run(sockets=[bound])


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more: let the caller close its model first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Server(uvicorn.Server):
    """uvicorn's, which says when it listens."""

    when_started: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        if self.started:
            self.when_started()


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

"""What every request passes before any endpoint."""

from collections.abc import Callable

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from hmt.server import access_log
from hmt.server.config import ServerConfig
from hmt.server.guard import Guard
from hmt.server.head import HeadAsGet


def middleware_of(
    config: ServerConfig, responded: Callable[[Scope, int, float], None]
) -> list[Middleware]:
    """For an application; `responded(scope, status, seconds)` is told of each response."""

    def seen(scope: Scope, status: int, seconds: float) -> None:
        responded(scope, status, seconds)
        if config.log_requests:
            access_log.log_response(scope, status, seconds)

    inside = [Middleware(Guard, config=config, seen=seen), Middleware(HeadAsGet)]
    if not config.origins:
        return inside
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        # Clients send more with each release: x-stainless-*, anthropic-version, ...  Which pages
        # may ask is the origin's matter, and with which key the key's.
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
        allow_private_network=True,  # a page from elsewhere, and the server on its own machine
    )
    return [cors, *inside]

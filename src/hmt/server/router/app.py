"""The router: an application that answers with what one of several servers answers.

What every request passes first is the same here as there: so a stranger, and what is too large,
come no further.  The replicas look at the same key again, since what they keep is kept by owner.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

import httpx2
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from hmt.server import errors
from hmt.server.client import off_loop
from hmt.server.config import ServerConfig
from hmt.server.endpoints import ROUTERS
from hmt.server.errors import ApiError
from hmt.server.middleware import middleware_of
from hmt.server.router.forwarding import Counts, Forwarded
from hmt.server.router.metrics import merged
from hmt.server.router.placement import Placement, Reason
from hmt.server.router.replicas import Replica

_METHODS: Final = ("GET", "POST", "DELETE", "OPTIONS")
# What would change one replica alone.
_OF_ONE: Final = (
    "/v1/models/load", "/v1/models/unload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip
_STORED: Final = "/v1/responses/"
_LOOK_S: Final = 5.0  # for what replicas say of themselves


def create_router(replicas: Sequence[Replica], config: ServerConfig, *, at_once: int) -> FastAPI:
    """An ASGI application in front of `replicas`, which are the caller's to end.

    at_once   requests that a replica computes at once

    Raises ConfigError.
    """
    config.check()
    app = FastAPI(
        title="HMT",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # the replicas'
        middleware=middleware_of(config, lambda scope, status, seconds: None),
    )
    placement, counts = Placement(replicas, at_once), Counts()
    errors.install(app)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the router answers, and which replicas run."""
        return {"status": "ok", "replicas": {str(one.number): not one.failure for one in replicas}}

    @app.get("/ready")
    async def ready() -> Response:
        """Whether a replica would take a request now."""
        looks = [_asked(one, "/ready") for one in replicas if not one.failure]
        found = await asyncio.gather(*looks)
        states = {str(n): json.loads(answer.content)["status"] for n, answer in found if answer}
        is_ready = "ready" in states.values()
        state = {"status": "ready" if is_ready else "failed", "replicas": states}
        return JSONResponse(state, 200 if is_ready else 503)

    @app.get("/metrics")
    async def measured(request: Request) -> Response:
        """What all have measured, for Prometheus."""
        key = {name: request.headers[name] for name in _KEYS if name in request.headers}
        looks = [_asked(one, "/metrics", key) for one in replicas if not one.failure]
        found = await asyncio.gather(*looks)
        pages = {n: answer.text for n, answer in found if answer and answer.status_code == 200}
        page = await asyncio.to_thread(merged, pages, replicas, counts)
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.state.served = [*app.routes, *(route for each in ROUTERS for route in each.routes)]

    @app.api_route("/{path:path}", methods=list(_METHODS))
    async def forward(request: Request) -> Response:
        """What a replica answers."""
        path = request.url.path
        if path in _OF_ONE:
            raise ApiError(
                400,
                f"{path} would change one of {len(replicas)} servers behind this one: start it "
                "with what it shall have, or without --dp",
                code="unsupported",
            )
        content = await request.body()
        body = await off_loop(lambda: _object(content)) if content else {}
        owner = request.state.owner

        def choose(failed: set[Replica]) -> tuple[Replica, Reason] | None:
            if path.startswith(_STORED) and not failed:
                holder = placement.holder(path.removeprefix(_STORED).partition("/")[0])
                if holder is not None:
                    return holder, Reason.STORED
            if request.method != "POST":  # what one says of itself shall not change with the load
                return placement.first(failed)
            return placement.choose(owner, body, failed)

        return Forwarded(request.scope, content, choose, counts)

    return app


_KEYS: Final = ("authorization", "x-api-key", "host")


async def _asked(
    replica: Replica, path: str, headers: dict[str, str] | None = None
) -> tuple[int, httpx2.Response | None]:
    """What a replica answers, by its number; None where it does not."""
    try:
        own = {"host": "localhost"} | (headers or {})
        answer = await replica.client.get(path, headers=own, timeout=_LOOK_S)
    except httpx2.TransportError:
        return replica.number, None
    return replica.number, answer


def _object(content: bytes) -> dict[str, Any]:
    """A body as far as the router reads it; the replica says what is wrong with one."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

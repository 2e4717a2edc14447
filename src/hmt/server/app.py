"""The application: what answers at which path, and what every request passes first."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from hmt.engine import LoadedModel
from hmt.server import errors
from hmt.server.concurrency_limit import ConcurrencyLimit
from hmt.server.config import ServerConfig
from hmt.server.endpoints import ROUTERS
from hmt.server.metrics import Metrics
from hmt.server.middleware import middleware_of
from hmt.server.model_manager import LoadableModels, ModelManager
from hmt.server.page.snapshot_cache import SnapshotCache
from hmt.server.responses.store import ResponseStore
from hmt.server.service import Service
from hmt.server.stream import ClientGone, EmptyResponse


def create_app(
    model: LoadedModel, config: ServerConfig | None = None, others: LoadableModels | None = None
) -> FastAPI:
    """An ASGI application that serves `model`, which stays the caller's to close.

    others   models that may be loaded besides, and take its place

    Raises ConfigError.
    """
    config = config or ServerConfig()
    config.check()
    metrics = Metrics()
    app = FastAPI(
        title="HMT",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        middleware=middleware_of(config, metrics.responded),
    )

    def serving(name: str, loaded: LoadedModel) -> Service:
        gate = ConcurrencyLimit(running=loaded.max_batch, waiting=config.max_waiting)
        return Service(
            model=loaded,
            name=name,
            config=config,
            limit=gate,
            observer=metrics.of(name),
            watch=SnapshotCache(loaded),
        )

    def changed(first: Service) -> None:
        app.state.service = first

    first = config.name or model.prepared.source.path.name
    app.state.model_manager = ModelManager(
        serve=serving,
        folders={} if others is None else dict(others.paths),
        engine=None if others is None else others.engine,
        changed=changed,
        templates={} if config.chat_template is None else {first: config.chat_template},
    )
    app.state.model_manager.put(first, model)
    app.state.responses = ResponseStore()
    errors.install(app)

    @app.exception_handler(ClientGone)
    async def _gone(request: Request, error: ClientGone) -> Response:
        return EmptyResponse()

    _add_watching(app, metrics)
    app.state.served = [*app.routes, *(route for each in ROUTERS for route in each.routes)]
    for router in ROUTERS:
        app.include_router(router)
    return app


def _add_watching(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the process answers, and others that compute the model with it run."""
        ranks = app.state.service.model.ranks
        up = {str(rank.number): rank.alive and not rank.failure for rank in ranks}
        return {"status": "ok"} | ({"ranks": {"0": True, **up}} if ranks else {})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether a request would be taken now."""
        service = app.state.service
        gate, closed = service.limit, service.model.closed
        full = gate.inside >= gate.running + gate.waiting
        failed = any(rank.failure for rank in service.model.ranks)
        state = "closed" if closed else "failed" if failed else "full" if full else "ready"
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    async def measured() -> Response:
        """What was measured, for Prometheus."""
        content, kind = await metrics.render(app.state.model_manager.services)
        return Response(content, headers={"Content-Type": kind})

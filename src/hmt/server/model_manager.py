"""The models of a server: those that are loaded, and those that it may load in one budget."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request

from hmt.base.errors import HMTError
from hmt.engine import Engine, LoadedModel
from hmt.memory import trim_heap
from hmt.server.errors import ApiError, as_api_error
from hmt.server.service import Service

_LOOK_S = 0.05  # between looks at whether an unloaded model's answers have ended


@dataclass(frozen=True, slots=True)
class LoadableModels:
    """What a server may load beside its first model: folders by name, with its engine."""

    engine: Engine
    paths: Mapping[str, Path]


@dataclass(slots=True)
class ModelManager:
    """Services by name.  For the event loop; models are loaded and closed on threads.

    serve     makes the service of a model that has been loaded
    folders   of all models that this server knows
    engine    that loads them; None: what is loaded stays so
    changed   is told what `first` is whenever that may have changed
    templates chat templates by name of models that shall not use those of their files
    """

    serve: Callable[[str, LoadedModel], Service]
    folders: dict[str, Path]
    engine: Engine | None
    changed: Callable[[Service], None]
    templates: Mapping[str, str] = field(default_factory=dict)
    services: dict[str, Service] = field(default_factory=dict)
    loading: dict[str, float] = field(default_factory=dict)  # the share that has been read, by name
    _leaving: set[str] = field(default_factory=set)
    _moving: asyncio.Lock = field(default_factory=asyncio.Lock)

    def put(self, name: str, model: LoadedModel) -> Service:
        """Serve a model that has been loaded."""
        if name in self.templates:
            model.tokenizer.use_chat_template(self.templates[name])
        service = self.services[name] = self.serve(name, model)
        self.folders.setdefault(name, model.prepared.source.path)
        self.changed(next(iter(self.services.values())))
        return service

    def find(self, name: str) -> Service:
        """The service of a model, or of MODEL:ADAPTER.  Raises ApiError 404 that says why."""
        if name in self.services and name not in self._leaving:
            return self.services[name]
        base, _, adapter = name.rpartition(":")
        if base in self.services and base not in self._leaving:
            service = self.services[base]
            if adapter in service.model.adapters.store.names:
                return service.with_adapter(adapter)
        code, names = "model_not_found", ", ".join(map(repr, self.folders))
        message = f"there is no model {name!r}; this server has {names}"
        if name in self.folders:
            code = "model_not_loaded"
            message = (
                f"the model {name!r} is not loaded: POST /v1/models/load with "
                f'{{"model": "{name}"}} loads it, where there is room'
            )
        raise ApiError(404, message, param="model", code=code)

    def about(self) -> list[tuple[str, Service | None]]:
        """All models, the loaded ones first, each with its service."""
        away = [name for name in self.folders if name not in self.services]
        return [*self.services.items(), *((name, None) for name in away)]

    @property
    def loadable(self) -> list[str]:
        """The names of the models that may be loaded and unloaded."""
        return [] if self.engine is None else list(self.folders)

    @property
    def inside(self) -> int:
        """Answers under way, of all models."""
        return sum(service.limit.inside for service in self.services.values())

    async def load(self, name: str, host_memory: int | None) -> Service:
        """Load a model, in `host_memory` bytes at most; nothing happens where it is loaded.

        Raises ApiError: 503 where the budget has no room for it.
        """
        engine = self._may_change(name)
        async with self._moving:
            if name in self.services:
                return self.services[name]
            self.loading[name] = 0.0

            def progress(done_bytes: int, total_bytes: int) -> None:  # on the engine's thread
                if name in self.loading:  # else no request waits for it
                    self.loading[name] = done_bytes / max(1, total_bytes)

            loading = asyncio.to_thread(
                engine.load_model,
                self.folders[name],
                host_memory=host_memory,
                progress=progress,
            )
            try:
                model = await loading
            except HMTError as error:
                raise as_api_error(error, "model") from error
            finally:
                self.loading.pop(name, None)
            return self.put(name, model)

    async def unload(self, name: str, patience_s: float) -> None:
        """Take no more requests to a model, let its answers end, and free its memory.

        What has not ended after `patience_s` is cut off.  Raises ApiError.
        """
        self._may_change(name)
        async with self._moving:
            service = self.services.get(name)
            if service is None:
                return
            self._leaving.add(name)
            try:
                async with asyncio.timeout(patience_s):
                    while service.limit.inside:
                        await asyncio.sleep(_LOOK_S)
            except TimeoutError:
                pass  # closing tells them
            finally:
                await asyncio.to_thread(_free, service.model)
                del self.services[name]
                self._leaving.discard(name)
            self.changed(next(iter(self.services.values()), service))

    def _may_change(self, name: str) -> Engine:
        if self.engine is None:
            raise ApiError(
                403,
                "this server keeps the model it was started with; "
                "hmt serve --extra-model FOLDER lets "
                "models be loaded and unloaded",
                code="models_are_fixed",
            )
        if name not in self.folders:
            self.find(name)
        return self.engine


def _free(model: LoadedModel) -> None:
    model.close()
    trim_heap()


def manager_of(request: Request) -> ModelManager:
    """That of a request's server."""
    manager: ModelManager = request.app.state.model_manager
    return manager


def described(name: str, service: Service | None) -> dict[str, Any]:
    """A model in OpenAI's words, and whether it is loaded."""
    about = {"id": name, "object": "model", "created": 0, "owned_by": "hmt", "loaded": False}
    if service is None:
        return about
    loaded = {"loaded": True, "max_model_len": service.max_positions}
    return about | loaded | {"created": service.created}

"""Adapters over HTTP, with vLLM's paths and fields: /v1/load_lora_adapter and its opposite."""

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from hmt.base.errors import AdapterError, CheckpointError, DiskReadError, HMTError, RequestError
from hmt.server.errors import ApiError, as_api_error
from hmt.server.model_manager import manager_of
from hmt.server.openai.schemas import LoadAdapterBody, UnloadAdapterBody
from hmt.server.service import service_of

router = APIRouter()


@router.post("/v1/load_lora_adapter")
async def load_adapter(body: LoadAdapterBody, request: Request) -> PlainTextResponse:
    """Let requests name an adapter that lies in the server's folder of adapters."""
    service = service_of(request, body.model)
    path = _inside(service.config.adapter_dir, body.lora_path)
    try:
        await asyncio.to_thread(service.model.load_adapter, body.lora_name, path)
    except (CheckpointError, DiskReadError) as error:
        raise ApiError(400, str(error), param="lora_path", code="invalid_adapter") from error
    except HMTError as error:
        raise as_api_error(error, "lora_name") from error
    return PlainTextResponse(
        f"Success: LoRA adapter '{body.lora_name}' added successfully: ask for the model "
        f"{service.name}:{body.lora_name}"
    )


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(body: UnloadAdapterBody, request: Request) -> PlainTextResponse:
    """Forget an adapter that no request uses."""
    service = service_of(request, body.model)
    _inside(service.config.adapter_dir, ".")
    try:
        await asyncio.to_thread(service.model.unload_adapter, body.lora_name)
    except AdapterError as error:
        raise ApiError(409, str(error), param="lora_name", code="adapter_in_use") from error
    except RequestError as error:
        message = str(error)
        raise ApiError(404, message, param="lora_name", code="adapter_not_found") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully")


@router.get("/v1/adapters")
async def adapters(request: Request, model: str | None = None) -> dict[str, Any]:
    """Adapters of a model, and which of them are in memory."""
    service = service_of(request, model)
    store = service.model.adapters.store
    there = store.in_memory
    data = [
        {
            "id": name, "object": "adapter", "model": service.base_name,
            "bytes": store.describe(name).nbytes, "rank": store.describe(name).most_rank,
            "in_memory": name in there,
        }
        for name in store.names
    ]  # fmt: skip
    return {"object": "list", "data": data, "memory_bytes": store.limit_bytes}


def _inside(folder: Path | None, path: str) -> Path:
    """`path` within the server's folder.  Raises ApiError for what is not."""
    if folder is None:
        raise ApiError(
            403,
            "this server keeps the adapters it was started with; hmt serve --adapter-dir FOLDER "
            "lets clients load those in a folder, and unload them",
            code="adapters_are_fixed",
        )
    root = folder.resolve()
    if "\0" in path or not (found := (root / path).resolve()).is_relative_to(root):
        raise ApiError(
            400, f"{path!r:.200} is not in the server's folder of adapters: give a path in it",
            param="lora_path", code="invalid_value",
        )  # fmt: skip
    return found


def listed(request: Request) -> list[dict[str, Any]]:
    """Adapters of all models as models of their own, in OpenAI's words."""
    found = []
    for service in manager_of(request).services.values():
        for name in service.model.adapters.store.names:
            about = {"id": f"{service.name}:{name}", "object": "model", "owned_by": "hmt"}
            more = {"parent": service.name, "max_model_len": service.max_positions}
            found.append(about | {"created": service.created, "loaded": True} | more)
    return found

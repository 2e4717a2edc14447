"""GET /api/tags, /api/ps and /api/version, POST /api/show: what can be asked, and of whom."""

import hashlib
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter, Request

from hmt import __version__
from hmt.server.model_manager import manager_of
from hmt.server.ollama.schemas import ShowBody
from hmt.server.service import Service

router = APIRouter()

# The version of Ollama whose API this is: clients look at it for what they may send.
_SPOKEN: Final = "0.12.11"
_LATEST: Final = ":latest"  # the tag that Ollama's clients give a name without one
_NEVER: Final = "9999-12-31T23:59:59Z"


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Of Ollama's API, and HMT's own."""
    return {"version": _SPOKEN, "hmt": __version__}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """All models, the loaded ones first."""
    return {"models": [_listed(name, one) for name, one in manager_of(request).about()]}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """Those that are loaded."""
    loaded = manager_of(request).services
    return {
        "models": [
            _listed(name, service) | {"expires_at": _NEVER, "context_length": service.max_positions}
            for name, service in loaded.items()
        ]
    }


@router.post("/api/show")
async def show(body: ShowBody, request: Request) -> dict[str, Any]:
    """One that is loaded."""
    service = served(request, body.known_as)
    spec, tokenizer = service.model.prepared.model.spec, service.model.tokenizer
    template = tokenizer.about["chat_template"]
    family = spec.architecture
    return {
        "modelfile": "",
        "license": "",
        "parameters": "",
        "template": template if isinstance(template, str) else "",
        "details": _details(service),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": service.max_positions,
            f"{family}.block_count": spec.layers,
            f"{family}.embedding_length": spec.hidden_size,
            f"{family}.vocab_size": spec.vocab_size,
        },
        "capabilities": _capabilities(service),
        "modified_at": _time(service),
    }


def served(request: Request, name: str) -> Service:
    """The model of this name, with or without Ollama's tag.  Raises ApiError 404."""
    manager = manager_of(request)
    return manager.find(name if name in manager.services else name.removesuffix(_LATEST))


def _listed(name: str, service: Service | None) -> dict[str, Any]:
    size = 0 if service is None else service.model.prepared.published_bytes
    return {
        "name": name,
        "model": name,
        "modified_at": _time(service),
        "size": size,
        "digest": hashlib.sha256(name.encode(errors="replace")).hexdigest(),  # tells names apart
        "details": _details(service),
    }


def _details(service: Service | None) -> dict[str, Any]:
    family = path = ""
    if service is not None:
        prepared = service.model.prepared
        family, path = prepared.model.spec.architecture, prepared.source.path.suffix
    return {
        "parent_model": "",
        "format": "gguf" if path.lower() == ".gguf" else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _capabilities(service: Service) -> list[str]:
    """In Ollama's words, what may be asked of a model."""
    model = service.model
    able = {
        "completion": not model.prepared.headless,
        "tools": model.tokenizer.tool_style is not None,
        "thinking": model.tokenizer.thinks,
        "vision": not model.images_refused,
    }
    return [name for name, can in able.items() if can]


def _time(service: Service | None) -> str:
    """When it was loaded; the beginning of 1970 where it is not."""
    at = datetime.fromtimestamp(0 if service is None else service.created, UTC)
    return at.isoformat().replace("+00:00", "Z")

"""POST /v1/embeddings: what a model holds of texts, as vectors."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from hmt.contracts.request import Pooling
from hmt.server.errors import ApiError
from hmt.server.openai.schemas import EmbeddingsBody
from hmt.server.service import ApiRequest, Service, service_of
from hmt.server.stream import unless_gone

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Embed texts."""
    service = service_of(request, body.model)
    width = service.model.prepared.model.spec.hidden_size
    if body.dimensions is not None and body.dimensions > width:
        raise ApiError(
            400,
            f"{body.dimensions} dimensions were asked for; this model's embeddings have {width}",
            param="dimensions",
            code="invalid_value",
        )
    folder = service.model.prepared.source.path
    pooling = await asyncio.to_thread(_pooling, folder) if body.pooling is None else body.pooling
    asked = ApiRequest(
        owner=request.state.owner,
        max_new_tokens=0,
        timeout_s=body.timeout,
        embedding=Pooling(pooling),
    )
    found, tokens = await unless_gone(request.receive, _embed(service, asked, body.texts))
    data = await asyncio.to_thread(_as_response, found, body)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "model": service.name, "data": data, "usage": usage})


async def _embed(
    service: Service, asked: ApiRequest, inputs: list[str | list[int]]
) -> tuple[list[torch.Tensor], int]:
    """Embeddings f32 [hidden_size] in order, and tokens in all.

    As many at a time as the engine computes at once, so that others have their turn.
    """
    tokenizer, found, tokens = service.model.tokenizer, list[torch.Tensor](), 0
    for first in range(0, len(inputs), service.limit.running):
        some = inputs[first : first + service.limit.running]

        def prompts(some: list[str | list[int]] = some) -> list[list[int]]:
            most = service.max_positions
            return [
                tokenizer.encode(one, most=most) if isinstance(one, str) else one for one in some
            ]

        generation = await service.begin(asked, prompts, len(some), "input")
        async with generation:
            async for _ in generation.events():
                pass  # there are no tokens
            told = [course.prompt.embedding for course in generation.choices]
            found += [one for one in told if one is not None]
            tokens += generation.prompt_tokens
    return found, tokens


def _as_response(found: list[torch.Tensor], body: EmbeddingsBody) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = []
    for index, vector in enumerate(found):
        if body.dimensions is not None:
            vector = torch.nn.functional.normalize(vector[: body.dimensions], dim=0)
        value: Any = vector.tolist()
        if body.encoding_format == "base64":
            value = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode("ascii")
        data.append({"object": "embedding", "index": index, "embedding": value})
    return data


def _pooling(folder: Path) -> Pooling:
    """As a model's folder says in the form of sentence-transformers; else the last token's."""
    try:
        said = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
        return Pooling.MEAN if said.get("pooling_mode_mean_tokens") else Pooling.LAST
    except (OSError, ValueError, AttributeError):
        return Pooling.LAST

"""POST /api/embed and /api/embeddings."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from hmt.server.ollama.models import served
from hmt.server.ollama.schemas import EmbedBody, EmbeddingsBody
from hmt.server.openai.embeddings import EmbeddingsAsked, embeddings_of

router = APIRouter()


@router.post("/api/embed")
async def embed(body: EmbedBody, request: Request) -> Response:
    """Embed one or several inputs."""
    begin, service = time.perf_counter(), served(request, body.model)
    told: dict[str, Any] = {"model": body.model, "embeddings": []}
    if not body.texts:
        return JSONResponse(told)
    wanted = EmbeddingsAsked(
        [*body.texts], body.dimensions or None, cuts=body.truncate is not False
    )
    found, tokens = await embeddings_of(service, wanted, request)
    took = round(1e9 * (time.perf_counter() - begin))
    told |= {"total_duration": took, "load_duration": 0, "prompt_eval_count": tokens}
    vectors = await asyncio.to_thread(lambda: [vector.tolist() for vector in found])
    return JSONResponse(told | {"embeddings": vectors})


@router.post("/api/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Embed one text."""
    service = served(request, body.model)
    if not body.prompt:
        return JSONResponse({"embedding": []})
    wanted = EmbeddingsAsked([body.prompt], cuts=True)
    (vector,), _ = await embeddings_of(service, wanted, request)
    return JSONResponse({"embedding": vector.tolist()})

"""POST /v1/rerank and /v1/score: how near texts are to each other, by their embeddings.

In the words of Jina's, Cohere's and vLLM's APIs.  A score is the cosine between two embeddings.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from hmt.server.openai.embeddings import EmbeddingsAsked, embeddings_of
from hmt.server.openai.schemas import RankingBody, RerankBody, ScoreBody
from hmt.server.service import Service, service_of
from hmt.text.small_file import read_object

router = APIRouter()

_PROMPTS: Final = "config_sentence_transformers.json"


@router.post("/v1/rerank")
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
async def rerank(body: RerankBody, request: Request) -> Response:
    """Documents, the nearest to a query first."""
    service = service_of(request, body.model)
    texts = body.texts
    (vector, *others), tokens = await _vectors(service, body, [body.query], texts, request)
    scores = [float(vector @ other) for other in others]
    best = sorted(range(len(scores)), key=lambda one: -scores[one])[: body.top_n]
    results: list[dict[str, Any]] = []
    for index in best:
        told = {"document": {"text": texts[index]}} if body.return_documents is not False else {}
        results.append({"index": index, "relevance_score": scores[index], **told})
    return JSONResponse(
        {"id": _named("rerank"), "model": service.name, **_usage(tokens), "results": results}
    )


@router.post("/v1/score")
@router.post("/score", include_in_schema=False)
async def score(body: ScoreBody, request: Request) -> Response:
    """Scores of pairs: of one text with each of several, or of as many with as many."""
    service = service_of(request, body.model)
    first, second = body.pairs
    vectors, tokens = await _vectors(service, body, first, second, request)
    left, right = vectors[: len(first)], vectors[len(first) :]
    pairs = zip(left * (len(right) // len(left)), right, strict=True)
    data = [
        {"index": index, "object": "score", "score": float(one @ other)}
        for index, (one, other) in enumerate(pairs)
    ]
    told = {"id": _named("score"), "object": "list", "created": int(time.time())}
    return JSONResponse({**told, "model": service.name, "data": data, **_usage(tokens)})


async def _vectors(
    service: Service,
    body: RankingBody,
    queries: Sequence[str],
    documents: Sequence[str],
    request: Request,
) -> tuple[list[torch.Tensor], int]:
    """Embeddings of all, each of length 1, and tokens in all.

    Raises ApiError; ClientGone once the client goes.
    """
    prompts = _prompts(service.model.prepared.source.path)
    asked = [prompts.get("query", "") + one for one in queries]
    inputs: list[str | list[int]] = [
        *asked,
        *(prompts.get("document", "") + one for one in documents),
    ]
    wanted = EmbeddingsAsked(inputs, pooling=body.pooling, timeout_s=body.timeout)
    return await embeddings_of(service, wanted, request)


def _prompts(folder: Path) -> Mapping[str, str]:
    """What a folder puts before queries and documents, as sentence-transformers reads it."""
    try:
        said = read_object(folder / _PROMPTS).get("prompts")
    except (OSError, ValueError):
        return {}
    known = said if isinstance(said, dict) else {}
    return {name: text for name, text in known.items() if isinstance(text, str)}


def _named(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _usage(tokens: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}

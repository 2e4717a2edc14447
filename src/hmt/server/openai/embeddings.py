"""POST /v1/embeddings: what a model holds of texts, as vectors."""

import asyncio
import base64
import json
from dataclasses import dataclass
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
from hmt.text import Tokenizer

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Embed texts."""
    service = service_of(request, body.model)
    wanted = EmbeddingsAsked(body.texts, body.dimensions, body.pooling, body.timeout)
    found, tokens = await embeddings_of(service, wanted, request)
    data = await asyncio.to_thread(_as_response, found, body.encoding_format == "base64")
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "model": service.name, "data": data, "usage": usage})


@dataclass(frozen=True, slots=True)
class EmbeddingsAsked:
    """What is embedded, and how, in any API's words.

    dimensions  that are kept; None: all
    pooling     None: as the model's folder says
    timeout_s   None: the server's
    cuts        whether inputs are cut to the context where they are longer
    """

    inputs: list[str | list[int]]
    dimensions: int | None = None
    pooling: str | None = None
    timeout_s: float | None = None
    cuts: bool = False


async def embeddings_of(
    service: Service, wanted: EmbeddingsAsked, request: Request
) -> tuple[list[torch.Tensor], int]:
    """Embeddings f32 [dimensions] of length 1, in order, and tokens in all.

    Raises ApiError; ClientGone once the client goes.
    """
    width = service.model.prepared.model.spec.hidden_size
    dimensions = width if wanted.dimensions is None else wanted.dimensions
    if dimensions > width:
        raise ApiError(
            400,
            f"{dimensions} dimensions were asked for; this model's embeddings have {width}",
            param="dimensions",
            code="invalid_value",
        )
    folder, pooling = service.model.prepared.source.path, wanted.pooling
    if pooling is None:
        pooling = await asyncio.to_thread(_pooling, folder)
    asked = ApiRequest(
        owner=request.state.owner,
        max_new_tokens=0,
        timeout_s=wanted.timeout_s,
        embedding=Pooling(pooling),
    )
    found, tokens = await unless_gone(request.receive, _embed(service, asked, wanted))
    if dimensions < width:
        found = [torch.nn.functional.normalize(one[:dimensions], dim=0) for one in found]
    return found, tokens


async def _embed(
    service: Service, asked: ApiRequest, wanted: EmbeddingsAsked
) -> tuple[list[torch.Tensor], int]:
    """Whole embeddings f32 [hidden_size] in order, and tokens in all.

    As many at a time as the engine computes at once, so that others have their turn.
    """
    tokenizer, most = service.model.tokenizer, service.max_positions
    inputs, found, tokens = wanted.inputs, list[torch.Tensor](), 0

    def ids(text: str | list[int]) -> list[int]:
        if not isinstance(text, str):
            return text
        return _cut(tokenizer, text, most) if wanted.cuts else tokenizer.encode(text, most=most)

    for first in range(0, len(inputs), service.limit.running):
        some = inputs[first : first + service.limit.running]

        def prompts(some: list[str | list[int]] = some) -> list[list[int]]:
            return [ids(one) for one in some]

        generation = await service.begin(asked, prompts, len(some), "input")
        async with generation:
            async for _ in generation.events():
                pass  # there are no tokens
            told = [course.prompt.embedding for course in generation.choices]
            found += [one for one in told if one is not None]
            tokens += generation.prompt_tokens
    return found, tokens


def _cut(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """The first `most` tokens of a text; the last is the end token, where all of it ends with one.

    Models are trained to have what they know of a text behind that.
    """
    ids = tokenizer.encode(text)
    ends = ids[-1:] if ids[-1:] and ids[-1] in tokenizer.eos_ids else []
    return ids if len(ids) <= most else ids[: most - len(ends)] + ends


def _as_response(found: list[torch.Tensor], as_base64: bool) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = []
    for index, vector in enumerate(found):
        value: Any = vector.tolist()
        if as_base64:
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

"""GET /v1/models, and tokens: /tokenize and /detokenize."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from hmt.base.errors import HMTError
from hmt.engine import check_tokens
from hmt.server.errors import told
from hmt.server.openai.schemas import DetokenizeBody, TokenizeBody
from hmt.server.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """What can be asked."""
    return {"object": "list", "data": [_about(service_of(request))]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    service = service_of(request)
    service.check_name(name)
    return _about(service)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """Token ids of a text, or of a chat as the model will read it."""
    service = service_of(request)
    service.check_name(body.model)
    tokenizer, messages = service.model.tokenizer, body.messages

    def encode() -> list[int]:
        if messages is not None:
            return tokenizer.chat_prompt([message.plain() for message in messages])
        return tokenizer.encode(body.prompt or "")

    try:
        tokens = await asyncio.to_thread(encode)
    except HMTError as error:
        raise told(error, "messages" if messages else "prompt") from error
    return {"count": len(tokens), "max_model_len": service.max_positions, "tokens": tokens}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
    """The text of token ids."""
    service = service_of(request)
    service.check_name(body.model)
    try:
        check_tokens(body.tokens, service.model.prepared.model.spec.vocab_size)
    except HMTError as error:
        raise told(error, "tokens") from error
    return {"prompt": await asyncio.to_thread(service.model.tokenizer.decode, body.tokens)}


def _about(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "hmt",
        "max_model_len": service.max_positions,
    }

"""GET /v1/models, and tokens: /tokenize and /detokenize."""

import json
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from hmt.base.errors import HMTError
from hmt.engine import check_tokens
from hmt.server.client import off_loop
from hmt.server.errors import as_api_error
from hmt.server.model_manager import described, manager_of
from hmt.server.openai.adapters import listed
from hmt.server.openai.response import token_text
from hmt.server.openai.schemas import DetokenizeBody, LoadBody, TokenizeBody, UnloadBody
from hmt.server.openai.tools import plain_tools
from hmt.server.service import service_of

router = APIRouter()

_AT_ONCE: Final = 1 << 16  # tokens that are written as text


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """What can be asked, and what could be loaded."""
    manager = manager_of(request)
    data = [described(name, service) for name, service in manager.about()]
    return {"object": "list", "data": data + listed(request)}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    manager = manager_of(request)
    adapter = next((one for one in listed(request) if one["id"] == name), None)
    if adapter is not None:
        return adapter
    found = dict(manager.about())
    return described(name, found[name] if name in found else manager.find(name))


@router.post("/v1/models/load")
async def load(body: LoadBody, request: Request) -> dict[str, Any]:
    """Load a model that the server knows, in what its budget has left."""
    return described(body.model, await manager_of(request).load(body.model, body.memory_bytes))


@router.post("/v1/models/unload")
async def unload(body: UnloadBody, request: Request) -> dict[str, Any]:
    """Let a model's answers end, and free its memory."""
    manager = manager_of(request)
    patience = service_of(request).config.shutdown_s
    await manager.unload(body.model, patience if body.timeout is None else body.timeout)
    return described(body.model, None)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a text, or of a chat as the model will read it."""
    service = service_of(request, body.model)
    tokenizer, messages = service.model.tokenizer, body.messages

    def encode() -> bytes:
        if messages is not None:
            tokens = tokenizer.chat_prompt(
                [message.plain() for message in messages],
                plain_tools(body.tools or ()) or None,
                variables=body.variables,
                goes_on=bool(body.continue_final_message),
            )
        elif body.add_special_tokens is False:
            tokens = tokenizer.encode_bare(body.prompt or "")
        else:
            tokens = tokenizer.encode(body.prompt or "")
        strings = None
        if body.return_token_strs:
            strings = [token_text(tokenizer, token) for token in tokens]
        heading = {"count": len(tokens), "max_model_len": service.max_positions,
                   "token_strs": strings, "tokens": []}  # fmt: skip
        # A piece at a time: the GIL is held meanwhile.
        pieces = (
            str(tokens[begin : begin + _AT_ONCE])[1:-1] for begin in range(0, len(tokens), _AT_ONCE)
        )
        return json.dumps(heading).encode()[:-2] + ",".join(pieces).encode() + b"]}"

    try:
        content = await off_loop(encode)
    except HMTError as error:
        raise as_api_error(error, "messages" if messages else "prompt") from error
    return Response(content, media_type="application/json")


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
    """What the model's tokenizer_config.json says, as vLLM: special tokens, chat template, ..."""
    return service_of(request, model).model.tokenizer.about


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
    """The text of token ids."""
    service = service_of(request, body.model)
    try:
        check_tokens(body.tokens, service.model.prepared.model.spec.vocab_size)
    except HMTError as error:
        raise as_api_error(error, "tokens") from error
    return {"prompt": await off_loop(lambda: service.model.tokenizer.decode(body.tokens))}

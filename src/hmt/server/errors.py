"""Errors as clients expect them: {"error": {"message", "type", "param", "code"}} is OpenAI's form.

Under /v1/messages they have Anthropic's, and under /api/ Ollama's.
"""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hmt.base.errors import (
    BudgetError,
    Cancelled,
    ClosedError,
    ContextLengthError,
    DeadlineError,
    HMTError,
    RequestError,
)
from hmt.base.log import logger

_UNREADABLE: Final = (
    "the body is not JSON that can be read: UTF-8, not too deep, no endless numbers"
)
_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"

# What pydantic calls them, and what OpenAI does.
_CODES: Final = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unknown_parameter": "unknown_parameter",
    "unsupported": "unsupported",
    "json_invalid": "invalid_json",
    "thread_not_found": "thread_not_found",
}

# Those that Anthropic's client reads in `error.details.error_code`: after this one it sends its
# conversation whole.
_ANTHROPIC_CODES: Final = ("thread_not_found",)

_BLOCKS: Final = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
ITEM_TAG: Final = "item "  # before the kinds of items and tools of the Responses API
_ANTHROPIC_PATH: Final = "/v1/messages"
_OLLAMA_PATH: Final = "/api/"
_ANTHROPIC: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @classmethod
    def internal(cls) -> "ApiError":
        """For what should not happen; the log has the rest."""
        message = "internal error, please report it; the server's log has the details"
        return cls(500, message, kind=_SERVER, code="internal_error")

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The same for Anthropic's clients."""
        kind = _ANTHROPIC.get(self.status, "api_error")
        error: dict[str, Any] = {"type": kind, "message": self._placed}
        if self.code in _ANTHROPIC_CODES:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error}

    @property
    def ollama_body(self) -> dict[str, Any]:
        """The same for Ollama's clients."""
        return {"error": self._placed}

    @property
    def _placed(self) -> str:
        """The message, with the parameter that it is about."""
        if self.param is None or self.message.startswith(f"'{self.param}"):
            return self.message
        return f"{self.param}: {self.message}"

    def response(self, path: str) -> Response:
        """As a response of its own to a request to `path`."""
        # Only ASCII: a message may quote text that has no UTF-8.
        body = self.body
        if path.startswith(_ANTHROPIC_PATH):
            body = self.anthropic_body
        elif path.startswith(_OLLAMA_PATH):
            body = self.ollama_body
        content = json.dumps(body).encode("ascii")
        return Response(content, self.status, self.headers, media_type="application/json")


def as_api_error(error: HMTError, param: str | None = None) -> ApiError:
    """What a client is told of an error of the engine.  `param` is what held the prompt."""
    message = str(error)
    if isinstance(error, ContextLengthError):
        return ApiError(400, message, param=param, code="context_length_exceeded")
    if isinstance(error, RequestError) and not isinstance(error, ClosedError):
        return ApiError(400, message, param=param, code="invalid_value")
    if isinstance(error, DeadlineError):
        return ApiError(504, message, kind=_SERVER, code="timeout")
    if isinstance(error, (BudgetError, Cancelled, ClosedError)):
        return ApiError(
            503, message, kind=_SERVER, code="unavailable", headers={"Retry-After": "5"}
        )
    return ApiError(500, message, kind=_SERVER, code="engine_failed")


def install(app: FastAPI) -> None:
    """Have all errors of `app` told in this form."""

    @app.exception_handler(ApiError)
    async def _own(request: Request, error: ApiError) -> Response:
        return _answer(request, error)

    @app.exception_handler(HMTError)
    async def _engines(request: Request, error: HMTError) -> Response:
        return _answer(request, as_api_error(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return _answer(request, _not_valid(error))

    @app.exception_handler(RecursionError)
    async def _deep(request: Request, error: RecursionError) -> Response:
        # Nothing here recurses but over what clients nest: JSON that is read, checked and written.
        return _answer(request, ApiError(400, _UNREADABLE, code="invalid_json"))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        return _answer(request, _of_http(request, error))

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        logger.error("the server failed for a reason that it does not know", exc_info=error)
        return _answer(request, ApiError.internal())


def _answer(request: Request, error: ApiError) -> Response:
    request.state.code = error.code  # for the journal
    return error.response(request.url.path)


def _not_valid(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a request."""
    meant = _meant(list(error.errors()))
    place = _without_tags([part for part in meant["loc"][1:] if not _is_union_member(part)])
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    kind, context = meant["type"], meant.get("ctx", {})
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context.get('error')}", code=_CODES[kind])
    if context.get("param"):  # where several parameters disagree, the one to change
        param = f"{param}.{context['param']}" if param else context["param"]
    if not param and kind == "disagreement":
        return ApiError(400, f"the body: {meant['msg']}", code="invalid_value")
    if not param:
        return ApiError(400, "the body must be a JSON object", code="invalid_type")
    message = f"{param!r} is missing" if kind == "missing" else f"{param!r}: {_plain(meant)}"
    otherwise = "invalid_type" if _is_of_type(kind) else "invalid_value"
    status = 404 if kind == "thread_not_found" else 400
    return ApiError(status, message, param=param, code=_CODES.get(kind, otherwise))


def _without_tags(place: list[Any]) -> list[Any]:
    """The place of an error without the types of blocks and items, which pydantic puts in it."""
    return [
        part
        for n, part in enumerate(place)
        if not str(part).startswith(ITEM_TAG)
        and not (part in _BLOCKS and n and isinstance(place[n - 1], int) and n + 1 < len(place))
    ]


def _meant(found: list[Mapping[str, Any]], begin: int = 0) -> Mapping[str, Any]:
    """Of all complaints the one to tell.

    Of a union every member complains.  That one was meant whose own type fits, and which has least
    to say.  Of unions within unions the outer ones, up to part `begin` of the place, are decided.
    """

    def member(one: Mapping[str, Any]) -> tuple[Any, ...]:
        place = one["loc"]
        ends = [n + 1 for n, part in enumerate(place) if n >= begin and _is_union_member(part)]
        return tuple(place[: ends[0]]) if ends else tuple(place)

    first = member(found[0])
    if first == tuple(found[0]["loc"]) and not _is_union_member(first[-1]):
        return found[0]
    members: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in found:
        if member(one)[:-1] == first[:-1]:
            members.setdefault(member(one), []).append(one)
    fitting = [
        complaints
        for place, complaints in members.items()
        if not (tuple(complaints[0]["loc"]) == place and _is_mistyped(complaints[0]))
    ]

    def rank(complaints: list[Mapping[str, Any]]) -> tuple[int, bool, int]:
        """Least is best; of lists, which end at their first fault, what was read furthest."""
        first = complaints[0]
        read = next((part for part in first["loc"][1:] if isinstance(part, int)), 0)
        return len(complaints), _is_of_type(first["type"]), -read

    meant = min(fitting or list(members.values()), key=rank)
    decided = len(member(meant[0]))
    return meant[0] if len(meant) == 1 or decided <= begin else _meant(meant, decided)


def _is_mistyped(one: Mapping[str, Any]) -> bool:
    """Whether a value's type is the complaint: also where a word was wanted and none came."""
    word = one["type"] == "literal_error"
    return _is_of_type(one["type"]) or (word and not isinstance(one["input"], str))


def _is_of_type(kind: str) -> bool:
    return kind.endswith(("_type", "_attributes_type", "_from_float"))


def _plain(found: Mapping[str, Any]) -> str:
    text = str(found["msg"])
    return text[:1].lower() + text[1:]


def _is_union_member(part: object) -> bool:
    """Pydantic names the member of a union in the place of an error: "str", "list[str]"."""
    if not isinstance(part, str):
        return False
    names = ("str", "int", "float", "bool", "NamedTool", "AllowedTools")
    return part in names or part.startswith(("constrained-", "function-", "list[", "literal["))


def _of_http(request: Request, error: HTTPException) -> ApiError:
    status, asked = error.status_code, f"{request.method} {request.url.path}"
    if status == 404:
        return ApiError(404, f"there is nothing at {asked}", code="unknown_url")
    if status == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{asked}: this method is not allowed here; allowed: {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    if status == 400:  # FastAPI's, which does not say more
        return ApiError(400, _UNREADABLE, code="invalid_json")
    kind = _INVALID if status < 500 else _SERVER
    message = str(error.detail) or HTTPStatus(status).phrase
    return ApiError(status, message, kind=kind, headers=error.headers)

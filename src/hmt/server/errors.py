"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

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
    ContextLengthError,
    DeadlineError,
    HMTError,
    RequestError,
)
from hmt.base.log import logger

_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"

# What pydantic calls them, and what OpenAI does.
_CODES: Final = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
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

    def response(self) -> Response:
        """As a response of its own."""
        # Only ASCII: a message may quote text that has no UTF-8.
        content = json.dumps(self.body).encode("ascii")
        return Response(content, self.status, self.headers, media_type="application/json")


def told(error: HMTError, param: str | None = None) -> ApiError:
    """What a client is told of an error of the engine.  `param` is what held the prompt."""
    message = str(error)
    if isinstance(error, ContextLengthError):
        return ApiError(400, message, param=param, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, message, code="invalid_value")
    if isinstance(error, DeadlineError):
        return ApiError(504, message, kind=_SERVER, code="timeout")
    if isinstance(error, (BudgetError, Cancelled)):
        return ApiError(
            503, message, kind=_SERVER, code="unavailable", headers={"Retry-After": "5"}
        )
    return ApiError(500, message, kind=_SERVER, code="engine_failed")


def install(app: FastAPI) -> None:
    """Have all errors of `app` told in this form."""

    @app.exception_handler(ApiError)
    async def _own(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HMTError)
    async def _engines(request: Request, error: HMTError) -> Response:
        return told(error).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return _not_valid(error).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        return _of_http(request, error).response()

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        logger.error("the server failed for a reason that it does not know", exc_info=error)
        return ApiError.internal().response()


def _not_valid(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a request."""
    # Of a union every member complains: the deepest complaint is of the member that was meant.
    found = list(error.errors())
    first = found[0]
    same = [one for one in found if one["loc"][:2] == first["loc"][:2]]
    deepest = max(same, key=lambda one: len(one["loc"]))
    place = [part for part in deepest["loc"][1:] if not _is_union_member(part)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    kind = deepest["type"]
    if kind == "json_invalid":
        reason = deepest.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    if not param:
        return ApiError(400, "the body must be a JSON object", code="invalid_type")
    messages = {
        "missing": f"{param!r} is missing",
        "extra_forbidden": f"{param!r} is not a parameter that this server knows",
    }
    message = messages.get(kind, f"{param!r}: {_plain(deepest)}")
    wrong_type = kind.endswith("_type") or kind == "literal_error"
    code = _CODES.get(kind, "invalid_type" if wrong_type else "invalid_value")
    return ApiError(400, message, param=param, code=code)


def _plain(found: Mapping[str, Any]) -> str:
    text = str(found["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _is_union_member(part: object) -> bool:
    """Pydantic names the member of a union in the place of an error: "str", "list[str]"."""
    return isinstance(part, str) and (
        part in ("str", "int", "bool", "float", "none") or "[" in part or part[:1].isupper()
    )


def _of_http(request: Request, error: HTTPException) -> ApiError:
    status, asked = error.status_code, f"{request.method} {request.url.path}"
    if status == 404:
        return ApiError(404, f"there is nothing at {asked}", code="unknown_url")
    if status == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{asked}: this method is not allowed here; allowed: {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    kind = _INVALID if status < 500 else _SERVER
    message = str(error.detail) or HTTPStatus(status).phrase
    return ApiError(status, message, kind=kind, headers=error.headers)

"""A line for each response: what was asked for and how it went, not what was said."""

import json
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.routing import Route
from starlette.types import Scope


def log_response(scope: Scope, status: int, seconds: float, to: TextIO | None = None) -> None:
    """One JSON object on a line, to stderr.

    Of a key only the beginning of its hash; of a path only what is served there, and nothing where
    nothing is.  `code` says why a request was refused.  `prompt` says how many tokens it had, how
    many of them the prefix cache had, and where it differed from all that was cached.
    """
    state: dict[str, Any] = scope.get("state", {})
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": state.get("request_id"),
        "owner": state.get("owner") or None,
        "method": scope["method"],
        "path": _served(scope),
        "status": status,
        "code": state.get("code"),
        "seconds": round(seconds, 4),
        "prompt": state.get("prompt"),
    }
    print(json.dumps(entry), file=to or sys.stderr, flush=True)


def _served(scope: Scope) -> str | None:
    """The pattern of what is asked for, also where a request came no further than the guard."""
    path: str | None = getattr(scope.get("route"), "path", None)
    if path is not None:
        return path
    served: list[Route] = scope["app"].state.served
    return next((one.path for one in served if one.path_regex.match(scope["path"])), None)

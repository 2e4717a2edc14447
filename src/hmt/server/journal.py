"""A line for each response: what was asked for and how it went, not what was said."""

import json
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import Scope


def write(scope: Scope, status: int, seconds: float, to: TextIO | None = None) -> None:
    """One JSON object on a line, to stderr.

    Of a key only the beginning of its hash; of a path only what is served there.
    """
    state: dict[str, Any] = scope.get("state", {})
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": state.get("request_id"),
        "owner": state.get("owner") or None,
        "method": scope["method"],
        "path": getattr(scope.get("route"), "path", None),
        "status": status,
        "seconds": round(seconds, 4),
    }
    print(json.dumps(entry), file=to or sys.stderr, flush=True)

"""A replica: a server of a model that a router's process starts, and that ends with it."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, get_args, get_type_hints

from hmt.base.errors import HMTError
from hmt.cli.options import EngineOptions
from hmt.cli.serve import ServerOptions, serve_here
from hmt.engine import LoadedModel

_LOOK_S: Final = 0.5
Options = TypeVar("Options", EngineOptions, ServerOptions)


def main() -> NoReturn:
    """Serve what stdin says, until that ends or SIGTERM comes; never returns."""
    told = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not for the router
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=told, flush=True)

    try:
        _serve(order, lambda: tell(state="ready"))
    except Exception as error:
        said = str(error) if isinstance(error, HMTError) else f"{type(error).__name__}: {error}"
        tell(state="failed", kind=type(error).__name__, said=said)
        _leave(1)
    _leave(0)


def _serve(order: Mapping[str, Any], ready: Any) -> None:
    from hmt.server import KeyRing

    server = _options(ServerOptions, order["server"])
    config = server.config(KeyRing.of(order["keys"]), replica=order["number"])
    path = Path(order["path"])
    path.unlink(missing_ok=True)  # of one that has ended, in whose place this is
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(path))
    engine = _options(EngineOptions, order["engine"])
    serve_here(
        Path(order["model"]), engine, server, config, bound, lambda address: ready(), _watch_ranks
    )


def _options(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """Options as JSON carried them."""
    hints, values = get_type_hints(kind), dict[str, Any](given)
    for field in fields(kind):
        if values[field.name] is not None and _is_path(hints[field.name]):
            values[field.name] = Path(values[field.name])
    return kind(**values)


def _is_path(hint: Any) -> bool:
    return hint is Path or Path in get_args(hint)


def _watch_ranks(model: LoadedModel) -> None:
    """End where processes that compute the model with this one have: a new one takes its place."""

    def watch() -> None:
        while not any(rank.failure for rank in model.ranks):
            time.sleep(_LOOK_S)
        _terminate()

    if model.ranks:
        threading.Thread(target=watch, daemon=True).start()


def _terminate() -> None:
    """Let answers end, and then this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def _end_with_stdin() -> None:
    """The router's process has ended."""
    sys.stdin.read()
    _terminate()


def _leave(status: int) -> NoReturn:
    """Without what threads and kernels are in the middle of: nothing here outlives the process."""
    sys.stderr.flush()
    os._exit(status)
